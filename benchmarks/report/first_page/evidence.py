"""Headline numbers beside the speed: laws, incidents and mutants of the newest commit that has them, peak memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import peak_memory
from benchmarks.cases.key import NSA
from benchmarks.history import laws as law_summaries
from benchmarks.history import mutants as recorded
from benchmarks.history.memory import MemoryTrend
from benchmarks.history.mutants import MutantOutcome
from benchmarks.peak_memory import MemoryVerdict
from benchmarks.report.further_pages import ledger
from benchmarks.report.further_pages.ledger import IncidentReplay
from benchmarks.report.further_pages.mutants import Commit
from benchmarks.report.links import Link, Repository
from benchmarks.report.table import BAD, GOOD, PLAIN
from harness import forced


@dataclass(frozen=True)
class HeadlineNumber:
    """One number of the first screen."""

    name: str
    text: str
    kind: str
    commit: Link | None = None
    href: str | None = None
    """The page with the rest of it."""
    file: str | None = None
    """Where the rest stands, without a page."""
    note: str | None = None
    """What the number is of, in small letters."""


def laws(results: Path, repository: Repository) -> HeadlineNumber:
    """The newest summary under results/laws that ran at least half of the tests of the largest one, and how many tests
    failed in others and have not passed since.

    A file's name says of which commit it is.
    """
    found = law_summaries.own(law_summaries.read_all(results))
    name = law_summaries.newest(found)
    if name is None:
        return HeadlineNumber("Laws and tests", "none recorded", PLAIN)
    counts = found[name].counts
    text = f"{counts.failed} of {counts.tried} failed" if counts.failed else f"{counts.passed} passed"
    others = [file for _, file in law_summaries.not_passed_since(found) if file != name]
    text += f", {len(others)} failed in other records" if others else ""
    red = name if counts.failed else others[0] if others else None
    where = law_summaries.NAME.fullmatch(Path(name).stem)
    return HeadlineNumber(
        "Laws and tests",
        text,
        BAD if red else GOOD,
        repository.commit(where["commit"]) if where else None,
        file=f"laws/{red}" if red else None,
        note=f"on {where['machine']}" if where else None,
    )


def incidents(entries: Sequence[IncidentReplay], repository: Repository, page: str) -> HeadlineNumber:
    """The newest run of the regression suite; one of a few incidents only is not green."""
    runs = ledger.newest(entry for entry in entries if forced.of(entry.fingerprint.machine) is None)
    if not runs:
        return HeadlineNumber("Incidents", "none replayed", PLAIN, href=page)
    run = [entry for entry in runs[0] if entry.verdict != ledger.SKIPPED]
    red = {entry.incident for entry in run if not entry.ok}
    known = {entry.incident for entry in run}
    left_out = ledger.not_run(runs[0], ledger.incidents(entries))
    text = f"{len(red)} of {len(known)} red" if red else f"{len(known)} green"
    text += f", {len(left_out)} not run" if left_out else ""
    kind = BAD if red else PLAIN if left_out else GOOD
    where = runs[0][0].fingerprint
    return HeadlineNumber("Incidents", text, kind, repository.commit(where.commit), page, note=f"on {where.machine}")


def mutants(commits: Sequence[Commit], repository: Repository, page: str) -> HeadlineNumber:
    """The newest commit with mutants; one of which a part was tried is not green."""
    if not commits:
        return HeadlineNumber("Mutants", "none tried", PLAIN, href=page)
    rates = recorded.rates(commits[0].lines)
    seen, total = sum(rate.seen for rate in rates), sum(rate.total for rate in rates)
    survived = sum(line.outcome is MutantOutcome.SURVIVED for line in commits[0].lines)
    left_out = sum(recorded.not_tried(commits[0].begin, rates).values())
    text = f"{seen} of {total} seen" + (f", {survived} survived" if survived else "")
    text += f", {left_out} not tried" if left_out else ""
    commit = repository.commit(commits[0].begin.fingerprint.commit)
    kind = BAD if not all(rate.enough for rate in rates) else PLAIN if left_out else GOOD
    return HeadlineNumber("Mutants", text, kind, commit, page)


def memory(by_machine: Sequence[tuple[str, Sequence[MemoryTrend]]]) -> HeadlineNumber:
    """How many cases need more memory than they once did, or than was accepted, and which of them the most MiB more."""
    grew = [(page, one) for page, trends in by_machine for one in trends if one.verdict is MemoryVerdict.GREW]
    if not any(trends for _, trends in by_machine):
        return HeadlineNumber("Peak memory", "none recorded", PLAIN)
    if all(one.verdict is MemoryVerdict.FIRST for _, trends in by_machine for one in trends):
        return HeadlineNumber("Peak memory", "first peaks alone", PLAIN)
    if not grew:
        return HeadlineNumber("Peak memory", "no case grew", GOOD)
    page, most = max(grew, key=lambda found: _more_mib(found[1]))
    assert most.before_mib is not None
    message = peak_memory.message(most.before_mib, most.now_mib)
    text = f"{len(grew)} case{'s' if len(grew) > 1 else ''} grew"
    name = most.name.removesuffix(f"/{NSA}")
    return HeadlineNumber("Peak memory", text, BAD, href=page, note=f"most: {name}, {message}")


def _more_mib(one: MemoryTrend) -> float:
    """Not a share: where a call needs a few KiB, 1 MiB is the largest share of all, and decides nothing."""
    assert one.before_mib is not None
    return one.now_mib - one.before_mib
