"""What is proven on which machine: of every GPU family what was compiled or ran on a newer GPU, of a machine what ran.

From records alone. Compiling needs no GPU: a summary of tests under results/laws counts by architecture what the
compiler accepted (`conversion.summarize_junit`). A record whose name, or whose machine's, ends in -forced-sm86 or
-forced-sm86-24gb ran on another GPU by the tables and kernels of that architecture (`harness.forced`), which proves
correctness and fit, and no speed. What ran truly is of the machine that the record names and of no other: a slice
proves nothing of its board, nor a capped board of one at its own limit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.history import accepted
from benchmarks.history import laws as law_summaries
from benchmarks.history.laws import LawSummary, OutcomeCounts
from benchmarks.history.store import CaseVisit, Store
from benchmarks.report.further_pages.ledger import SKIPPED, IncidentReplay, Where
from benchmarks.report.links import Repository
from benchmarks.report.table import BAD, CODE, GOOD, Cell, ReportTable
from harness import forced, machines
from harness.fingerprint import Fingerprint
from harness.forced import Forced
from harness.repository import commits_since

HEAD = (
    "GPU family, machine",
    "compute capability",
    "compiled",
    "on a newer GPU",
    "laws",
    "incidents",
    "bench",
    "calibration",
    "baseline",
)
_OWN = HEAD[-5:]
"""The columns that are a machine's own; those before them are of an architecture."""
NOTHING = "–"
_MOST_NAMED = 5
"""Tests in one cell."""


@dataclass(frozen=True)
class LawRecord:
    """One summary of tests."""

    file: str
    machine: str
    commit: str
    forced: Forced | None
    """What this machine's GPU was forced to; None where it was itself."""
    summary: LawSummary


def law_records(results: Path) -> list[LawRecord]:
    """Every summary under results/laws whose name says where it is from, oldest first; others prove nothing here."""
    found = []
    for file, summary in law_summaries.read_all(results).items():
        if (name := law_summaries.NAME.fullmatch(Path(file).stem)) is not None:
            memory_gb = None if name["memory_gb"] is None else int(name["memory_gb"])
            made = Forced(f"sm{name['forced']}", memory_gb) if name["forced"] else None
            found.append(LawRecord(file, name["machine"], name["commit"], made, summary))
    return sorted(found, key=lambda one: one.summary.utc)


def table(
    results: Path,
    runs: Iterable[tuple[str, int, Fingerprint]],
    incidents: Sequence[IncidentReplay],
    calibrated: Iterable[str],
    repository: Repository,
) -> ReportTable:
    """A row per family of harness/machines.toml, and below it one per machine that has records; then the CPU and the
    GPUs that are not listed, where they have some. `runs`: machine, number of cases that its newest figures are of, and
    the run of the newest."""
    laws = law_records(results)
    own = _by_machine(results, laws, runs, incidents, calibrated, repository)
    rows = []
    for family in machines.families().values():
        architecture = "{}{}".format(*family.compute_capability)
        of_family = [
            Cell(family.title),
            Cell("{}.{}".format(*family.compute_capability)),
            _compiled(laws, architecture, repository),
            _forced(results, architecture, laws, incidents, repository),
        ]
        measured = _rows_of(family.id, own)
        rows += [of_family + [Cell("" if measured else NOTHING)] * len(_OWN), *measured]
    for name, title in ((machines.CPU, "the CPU"), (machines.UNKNOWN_GPU, "GPUs that are not listed")):
        if measured := _rows_of(name, own):
            rows += [[Cell(title), *[Cell("")] * (len(HEAD) - 1)], *measured]
    return ReportTable(HEAD, rows)


def _by_machine(
    results: Path,
    laws: Sequence[LawRecord],
    runs: Iterable[tuple[str, int, Fingerprint]],
    incidents: Sequence[IncidentReplay],
    calibrated: Iterable[str],
    repository: Repository,
) -> dict[str, list[Cell]]:
    """The cells of `_OWN` of each machine that fills one of them."""
    ran = {machine: (count, run) for machine, count, run in runs if count}
    baselines = {entry.machine for entry in accepted.read(results)[0]}
    calibrated_here = set(calibrated)
    summed_up = {one.machine for one in laws if one.forced is None}
    names = {*ran, *baselines, *calibrated_here, *summed_up, *(entry.fingerprint.machine for entry in incidents)}
    found = {
        name: [
            _laws([one for one in laws if one.machine == name and one.forced is None], repository),
            _incidents([entry for entry in incidents if entry.fingerprint.machine == name], repository),
            _measured(*ran[name], repository) if name in ran else Cell(NOTHING),
            Cell("calibrated", GOOD) if name in calibrated_here else Cell(NOTHING),
            Cell("accepted", GOOD) if name in baselines else Cell(NOTHING),
        ]
        for name in sorted(names)
        if forced.of(name) is None
    }
    return {name: cells for name, cells in found.items() if any(cell.text != NOTHING for cell in cells)}


def _rows_of(family: str, own: Mapping[str, Sequence[Cell]]) -> list[list[Cell]]:
    """A row for each machine of a family: a board, a slice of one, one that is capped; or a GPU that is not listed."""
    blank = [Cell("")] * (len(HEAD) - 1 - len(_OWN))
    return [[Cell(name, CODE), *blank, *cells] for name, cells in own.items() if _is_of(name, family)]


def _is_of(machine: str, family: str) -> bool:
    if family == machines.UNKNOWN_GPU:
        return machine == family or machine.startswith(f"{family}-")
    return machines.same_family(machines.whole_board(machine), family)


def _compiled(laws: Sequence[LawRecord], architecture: str, repository: Repository) -> Cell:
    """The newest record in which the compiler was asked for this architecture."""
    for one in reversed(laws):
        counts = one.summary.architectures.get(architecture)
        if counts is not None and counts.tried:
            compiled = _counted(counts, one, repository)
            more = f"; {counts.skipped} more are known to fail, or left out" if counts.skipped else ""
            return Cell(compiled.text + more, compiled.kind, compiled.href)
    return Cell(NOTHING)


def _forced(
    results: Path,
    architecture: str,
    laws: Sequence[LawRecord],
    incidents: Sequence[IncidentReplay],
    repository: Repository,
) -> Cell:
    """What other GPUs showed of an architecture, in words: laws, incidents, cases of the bench that were right."""
    if not architecture:
        return Cell(NOTHING)
    cells = []
    told = _laws([one for one in laws if one.forced and one.forced.architecture == f"sm{architecture}"], repository)
    if told.text != NOTHING:
        cells.append(Cell(f"laws {told.text}", told.kind, told.href))
    by_machine: dict[str, list[IncidentReplay]] = {}
    for entry in incidents:
        by_machine.setdefault(entry.fingerprint.machine, []).append(entry)
    for machine, made in _forced_to(architecture, by_machine):
        found = _incidents(by_machine[machine], repository)
        if found.text != NOTHING:
            cells.append(Cell(f"incidents {found.text}{_where(forced.itself(machine), made)}", found.kind))
    for machine, made in _forced_to(architecture, [one.name for one in sorted((results / "runs").glob("*/"))]):
        visits = [found[-1] for found in Store(results, machine).visits(machine).values()]
        if visits:
            cells.append(_fitted(visits, _where(forced.itself(machine), made), repository))
    if not cells:
        return Cell(NOTHING)
    kind = BAD if any(cell.kind == BAD for cell in cells) else GOOD
    return Cell("; ".join(cell.text for cell in cells), kind, next((cell.href for cell in cells if cell.href), None))


def _forced_to(architecture: str, names: Iterable[str]) -> Iterator[tuple[str, Forced]]:
    """Of these machines those that were forced to it, and to how much memory."""
    for name in names:
        if (made := forced.of(name)) is not None and made.architecture == f"sm{architecture}":
            yield name, made


def _where(machine: str, made: Forced) -> str:
    return f", on {machine}" + (f" with {made.memory_gb} GB" if made.memory_gb else "")


def _fitted(newest: Sequence[CaseVisit], where: str, repository: Repository) -> Cell:
    """The newest visit of each case: right, too large, or neither, which is red."""
    right = sum(visit.passed for visit in newest)
    too_large = sum(visit.out_of_memory is not None for visit in newest)
    other = len(newest) - right - too_large
    text = f"bench {right} of {len(newest)} right"
    text += f", {too_large} too large" if too_large else ""
    text += f", {other} with neither" if other else ""
    return Cell(f"{text} {_states([one.fingerprint for one in newest], repository)}{where}", BAD if other else GOOD)


def _laws(found: Sequence[LawRecord], repository: Repository) -> Cell:
    """The newest that ran and is no small part of the tests; by name what failed in others and has not passed since."""
    by_file = {one.file: one for one in found}
    summaries = {file: one.summary for file, one in by_file.items()}
    newest = law_summaries.newest(summaries)
    if newest is None:
        return Cell(NOTHING)
    record = by_file[newest]
    counted = _counted(record.summary.counts, record, repository)
    text = counted.text + (_where(record.machine, record.forced) if record.forced else "")
    failed = [
        f"{test} at {repository.commit(by_file[file].commit).text}"
        for test, file in law_summaries.not_passed_since(summaries)
        if file != newest
    ]
    if not failed:
        return Cell(text, counted.kind, counted.href)
    more = f" and {len(failed) - _MOST_NAMED} more" if len(failed) > _MOST_NAMED else ""
    return Cell(f"{text}; failed, not passed since: {', '.join(failed[:_MOST_NAMED])}{more}", BAD, counted.href)


def _counted(counts: OutcomeCounts, record: LawRecord, repository: Repository) -> Cell:
    commit = repository.commit(record.commit)
    text = f"{counts.passed} of {counts.tried} at {_state(record.commit, False, record.summary.utc, repository)}"
    return Cell(text, BAD if counts.failed else GOOD, commit.href)


def _measured(count: int, newest: Fingerprint, repository: Repository) -> Cell:
    """How many cases have figures."""
    return Cell(f"{count} cases {_states([newest], repository)}", GOOD)


def _states(runs: Sequence[Fingerprint | Where], repository: Repository) -> str:
    """Of the newest run, and of the oldest where that is of another commit."""
    first, last = (choose(runs, key=lambda run: run.utc) for choose in (min, max))
    oldest, newest = (_state(run.commit, bool(run.dirty), run.utc, repository) for run in (first, last))
    same = (first.commit, bool(first.dirty)) == (last.commit, bool(last.dirty))
    return f"at {newest}" if same else f"at {newest} (oldest at {oldest})"


def _state(commit: str | None, dirty: bool, utc: str, repository: Repository) -> str:
    """A commit, with its changes where the tree was dirty; the day; how many commits ago, where git knows it here."""
    name = repository.commit(commit).text + (" + changes" if dirty else "")
    return ", ".join(part for part in (name, utc[:10], _ago(commit)) if part)


def _ago(commit: str | None) -> str:
    behind = None if commit is None else commits_since(commit)
    if behind is None:
        return ""
    return f"{behind} commit{'s' * (behind > 1)} ago" if behind else "this commit"


def _incidents(entries: Sequence[IncidentReplay], repository: Repository) -> Cell:
    """The newest verdict on each incident, of runs without a fault in the product; one that never ran is named."""
    newest: dict[tuple[str, str], IncidentReplay] = {}
    honest = [entry for entry in entries if entry.injected is None]
    for entry in sorted(honest, key=lambda one: one.fingerprint.utc):
        if entry.verdict != SKIPPED:
            newest[entry.incident, entry.part] = entry
    red = {entry.incident for entry in newest.values() if not entry.ok}
    known = {incident for incident, _ in newest}
    if not known:
        return Cell(NOTHING)
    text = f"{len(red)} of {len(known)} red" if red else f"{len(known)} green"
    if skipped := sorted({entry.incident for entry in honest} - known):
        text += f", {len(skipped)} skipped: {', '.join(skipped)},"
    state = _states([entry.fingerprint for entry in newest.values()], repository)
    return Cell(f"{text} {state}", BAD if red else GOOD)
