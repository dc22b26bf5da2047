"""What `compare` answered: the newest comparison of each machine case by case, the earlier ones in a line each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from benchmarks import peak_memory
from benchmarks.ab.result import CompareVerdict, ComparisonResult, Side
from benchmarks.history.accepted import Acceptance
from benchmarks.peak_memory import MemoryVerdict
from benchmarks.report import memory
from benchmarks.report.table import (
    BAD,
    GOOD,
    NAME,
    NBSP,
    PLAIN,
    Cell,
    ReportTable,
    digits,
    number,
    percent,
    version,
    when,
)

GRAVEST_FIRST = (
    CompareVerdict.FAILED,
    CompareVerdict.SLOWER,
    CompareVerdict.UNDECIDED,
    CompareVerdict.FASTER,
    CompareVerdict.SAME,
)
KINDS = {
    CompareVerdict.FAILED: BAD,
    CompareVerdict.SLOWER: BAD,
    CompareVerdict.FASTER: GOOD,
    CompareVerdict.SAME: GOOD,
    CompareVerdict.UNDECIDED: PLAIN,
}


@dataclass(frozen=True)
class CompareRun:
    """All results of one run of `compare`."""

    results: Sequence[ComparisonResult]

    @property
    def machine(self) -> str:
        return self.results[0].fingerprint.machine

    @property
    def utc(self) -> str:
        return self.results[0].utc

    @property
    def sides(self) -> str:
        """What was compared: "main (0123456789) → working tree (9876543210 + changes)"."""
        return f"{_side(self.results[0].base)} → {_side(self.results[0].head)}"

    @property
    def table(self) -> ReportTable:
        """A row per case, the gravest verdicts first."""
        return cases(self.results)

    @property
    def summary(self) -> Cell:
        """How many of each verdict, the gravest first."""
        counts = Counter(result.verdict for result in self.results)
        seen = [verdict for verdict in GRAVEST_FIRST if counts[verdict]]
        return Cell(", ".join(f"{counts[verdict]}{NBSP}{verdict.value}" for verdict in seen), KINDS[seen[0]])


def comparisons(results: Iterable[ComparisonResult]) -> list[CompareRun]:
    """Newest first. One that was killed has the cases that it finished."""
    together: dict[tuple[str, str, Side, Side], list[ComparisonResult]] = {}
    for result in results:
        run = (result.utc, result.fingerprint.machine, result.base, result.head)
        together.setdefault(run, []).append(result)
    return sorted(
        (CompareRun(found) for found in together.values()), key=lambda comparison: comparison.utc, reverse=True
    )


def newest(all_comparisons: Sequence[CompareRun]) -> list[CompareRun]:
    """One of each machine."""
    first: dict[str, CompareRun] = {}
    for comparison in all_comparisons:
        first.setdefault(comparison.machine, comparison)
    return list(first.values())


def cases(results: Iterable[ComparisonResult]) -> ReportTable:
    """A row per case, the gravest verdicts first."""
    head = (
        "case",
        "verdict",
        "change of time",
        "95 % interval",
        "detectable change",
        "base, ms",
        "head, ms",
        "memory",
        "why",
    )
    ordered = sorted(results, key=lambda one: (GRAVEST_FIRST.index(one.verdict), one.key.name))
    rows = [
        [
            Cell(one.key.name, NAME),
            Cell(one.verdict.value, KINDS[one.verdict]),
            number(None if one.change is None else percent(one.change)),
            number(None if one.interval is None else " to ".join(map(percent, one.interval))),
            number(None if one.detectable is None else f"{100 * one.detectable:.1f} %"),
            number(None if one.base_ms is None else digits(one.base_ms)),
            number(None if one.head_ms is None else digits(one.head_ms)),
            _memory(one),
            Cell(one.reason or ""),
        ]
        for one in ordered
    ]
    return ReportTable(head, rows)


def _memory(one: ComparisonResult) -> Cell:
    """In words where it changed."""
    if one.peaks_mib is None or one.memory is None:
        return Cell("–")
    changed = "" if one.memory is MemoryVerdict.SAME else f": {peak_memory.message(*one.peaks_mib)}"
    return Cell(one.memory.value + changed, memory.KINDS[one.memory])


def earlier(all_comparisons: Sequence[CompareRun]) -> ReportTable:
    """A row per comparison that is not the newest of its machine."""
    shown = newest(all_comparisons)
    head = ("when", "machine", "compared", "verdicts")
    rows = [
        [when(one.utc), Cell(one.machine), Cell(one.sides), one.summary] for one in all_comparisons if one not in shown
    ]
    return ReportTable(head, rows)


def speed(all_comparisons: Sequence[CompareRun]) -> dict[tuple[str, str], Cell]:
    """(machine, commit) -> the newest result of exactly that commit against another."""
    found: dict[tuple[str, str], Cell] = {}
    for comparison in all_comparisons:
        head = comparison.results[0].head
        if head.commit is not None and not head.dirty:
            found.setdefault((comparison.machine, head.commit), comparison.summary)
    return found


def accepted(entries: Iterable[Acceptance]) -> ReportTable:
    """Every baseline that a person moved, newest first."""
    head = ("when", "case", "from, ms", "to, ms", "who", "why")
    rows = [
        [
            when(one.utc),
            Cell(one.case, NAME),
            number(None if one.previous_ms is None else digits(one.previous_ms)),
            number(digits(one.latency_ms)),
            Cell(one.who),
            Cell(one.reason),
        ]
        for one in sorted(entries, key=lambda entry: entry.utc, reverse=True)
    ]
    return ReportTable(head, rows)


def _side(side: Side) -> str:
    commit = version(side.commit, side.dirty)
    return commit if side.ref == side.commit else f"{side.ref} ({commit})"
