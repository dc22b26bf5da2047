"""The ledger: for each commit and machine, what the incidents and the comparisons of speed say, in one row.

The incidents are another suite's, so that its files are read here by the fields that a row needs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.report.table import BAD, CODE, GOOD, NAME, NBSP, Cell, ReportTable, version, when
from harness import jsonl, schema

PASSED, SKIPPED = "PASSED", "SKIPPED"
COLUMNS: Mapping[str, frozenset[str]] = {
    "causality": frozenset({"future_seen", "loss_nats", "LEAK", "TOO_GOOD"}),
    "NaN": frozenset({"nonfinite", "NONFINITE"}),
    "stalls": frozenset({"ops", "host_syncs", "slowdown", "silence_s", "STALLED", "SLOW"}),
}
"""Column -> the aspects that it is about, and the verdicts that make it red."""
OTHER = "other promises"
FAULTY, SOAK = "faulty", "soak"
NAMED = 3
"""As many incidents are named; of more it is said how many they are."""


@dataclass(frozen=True)
class Where:
    """One run of the regression suite."""

    machine: str
    utc: str
    commit: str | None
    dirty: bool | None


@dataclass(frozen=True)
class IncidentAspect:
    """One thing that was looked at."""

    name: str
    verdict: str
    why: str


@dataclass(frozen=True)
class IncidentReplay:
    """One repro of one incident."""

    fingerprint: Where
    incident: str
    part: str
    """"faulty": the fault under its detector; else the product under it: "product", or "soak" for a long run of it."""
    device: str
    injected: str | None
    """The incident whose fault was put into the product on purpose."""
    verdict: str
    expects: str
    ok: bool
    reason: str | None
    aspects: tuple[IncidentAspect, ...]
    command: str


def read(results: Path) -> tuple[list[IncidentReplay], list[str]]:
    """Every entry under results/regression, oldest file first, and every line that is none."""
    entries: list[IncidentReplay] = []
    damaged: list[str] = []
    for path in sorted((results / "regression").glob("*/*.jsonl"), key=lambda path: path.name):
        found, wrong = jsonl.read_as(path, _entry)
        entries += found
        damaged += [f"{path.parent.relative_to(results)}/{one}" for one in wrong]
    return entries, damaged


def _entry(data: Any) -> IncidentReplay:
    kept = _only(IncidentReplay, data)
    kept["fingerprint"] = _only(Where, kept.get("fingerprint"))
    return schema.build(IncidentReplay, kept, "entry")


def _only(kind: type, data: Any) -> dict[str, Any]:
    """The fields that this page shows; the rest is checked by the suite that wrote it."""
    if not isinstance(data, dict):
        raise TypeError(f"an entry must be a JSON object; got {type(data).__name__}")
    return {name: value for name, value in data.items() if name in kind.__annotations__}


def rows(entries: Iterable[IncidentReplay], speed: Mapping[tuple[str, str], Cell]) -> ReportTable:
    """The newest run of each commit, machine and device, newest first. `speed`: (machine, commit) -> verdicts."""
    head = ("commit", "machine", "when", "speed", *COLUMNS, OTHER, "detectors", "skipped", "not run")
    entries = list(entries)
    known = incidents(entries)
    return ReportTable(head, [_row(run, speed, known) for run in newest(entries)])


def red(entries: Iterable[IncidentReplay]) -> ReportTable:
    """Every repro of these runs that is not as it should be."""
    head = ("commit", "incident", "part", "verdict", "expected", "why", "reproduce with")
    return ReportTable(
        head,
        [
            [
                _commit(entry.fingerprint), Cell(entry.incident, CODE), Cell(entry.part), Cell(entry.verdict, BAD),
                Cell(entry.expects), Cell(entry.reason or ""), Cell(entry.command, NAME),
            ]
            for run in newest(entries)
            for entry in run
            if not entry.ok
        ],
    )  # fmt: skip


def newest(entries: Iterable[IncidentReplay]) -> list[list[IncidentReplay]]:
    """The last entry of each repro by commit, machine and device; one with an injected fault only tests the suite."""
    runs: dict[tuple[str, bool, str, str], dict[tuple[str, str], IncidentReplay]] = {}
    for entry in sorted(entries, key=lambda entry: entry.fingerprint.utc):
        if entry.injected is None:
            where = entry.fingerprint
            run = (where.commit or "unknown", bool(where.dirty), where.machine, entry.device)
            runs.setdefault(run, {})[entry.incident, entry.part] = entry
    newest_first = sorted(runs.values(), key=lambda run: max(e.fingerprint.utc for e in run.values()), reverse=True)
    return [list(run.values()) for run in newest_first]


def _row(run: Sequence[IncidentReplay], speed: Mapping[tuple[str, str], Cell], known: Set[str]) -> list[Cell]:
    where = max((entry.fingerprint for entry in run), key=lambda where: where.utc)
    product = [entry for entry in run if entry.part != FAULTY and entry.verdict != SKIPPED]
    detectors = [entry for entry in run if entry.part == FAULTY and entry.verdict != SKIPPED]
    skipped = {entry.incident for entry in run if entry.verdict == SKIPPED}
    return [
        _commit(where),
        Cell(where.machine + ("" if run[0].device == where.machine else f" ({run[0].device})")),
        when(where.utc),
        speed.get((where.machine, where.commit or ""), Cell("not judged")),
        *(_column(product, column) for column in (*COLUMNS, OTHER)),
        _count(detectors, [entry.incident for entry in detectors if not entry.ok], "fire"),
        Cell(", ".join(sorted(skipped)) or "none"),
        _not_run(run, known),
    ]


def incidents(entries: Iterable[IncidentReplay]) -> set[str]:
    """Every incident that any run knows."""
    return {entry.incident for entry in entries if entry.part != SOAK}


def not_run(run: Sequence[IncidentReplay], known: Set[str]) -> list[str]:
    """Of the incidents that any run knows, those that this one did not replay, or not both ways: it was cut off, or
    asked for a few, and what is green in it says nothing of them."""
    parts = Counter(entry.incident for entry in run if entry.part != SOAK)
    return sorted(incident for incident in known if parts[incident] < 2)


def _not_run(run: Sequence[IncidentReplay], known: Set[str]) -> Cell:
    missing = not_run(run, known)
    if not missing:
        return Cell("none")
    return Cell(", ".join(missing) if len(missing) <= NAMED else f"{len(missing)} incidents", BAD)


def _commit(where: Where) -> Cell:
    return Cell(version(where.commit, where.dirty), CODE)


def _column(product: Sequence[IncidentReplay], column: str) -> Cell:
    seen = [entry for entry in product if any(column_of(aspect) == column for aspect in entry.aspects)]
    bad = [e.incident for e in seen if any(column_of(a) == column and a.verdict != PASSED for a in e.aspects)]
    return _count(seen, bad, "green")


def column_of(aspect: IncidentAspect) -> str:
    """By its verdict where it is red, else by what was looked at."""
    sign = aspect.name if aspect.verdict == PASSED else aspect.verdict
    return next((column for column, signs in COLUMNS.items() if sign in signs), OTHER)


def _count(seen: Sequence[IncidentReplay], bad: Sequence[str], word: str) -> Cell:
    if not seen:
        return Cell("not looked at")
    if bad:
        return Cell(f"RED: {', '.join(dict.fromkeys(bad))}", BAD)
    return Cell(f"{len(seen)} of {len(seen)} {word}".replace(" ", NBSP), GOOD)
