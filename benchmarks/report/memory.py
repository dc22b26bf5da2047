"""Peak memory on the pages: whether a case needs more than it once did, since which commit, and how much there is."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.history.memory import MemoryTrend
from benchmarks.history.store import CaseVisit
from benchmarks.peak_memory import MemoryVerdict
from benchmarks.report.links import Repository
from benchmarks.report.table import BAD, CODE, GOOD, NAME, PLAIN, Cell, ReportTable, digits, number, percent, when
from harness import fingerprint, machines
from harness.peak import MIB

KINDS = {
    MemoryVerdict.GREW: BAD,
    MemoryVerdict.SHRANK: GOOD,
    MemoryVerdict.SAME: PLAIN,
    MemoryVerdict.FIRST: PLAIN,
}
_ORDER = (MemoryVerdict.GREW, MemoryVerdict.SHRANK, MemoryVerdict.SAME, MemoryVerdict.FIRST)


def limit_mib(device: str) -> float | None:
    """The memory of the board of this name, or of its slice, by the data sheet; None where it is not listed."""
    memory_gb = machines.memory_gb(device)
    return None if memory_gb is None else memory_gb * 1e9 / MIB


def table(trends: Sequence[MemoryTrend], board_mib: float | None, repository: Repository) -> ReportTable:
    """A row per case, those that grew first, then the largest."""
    head = ("case", "verdict", "now, MiB", "before, MiB", "change", "of the memory", "since", "what else changed")
    ordered = sorted(trends, key=lambda one: (_ORDER.index(one.verdict), -one.now_mib, one.name))
    rows = []
    for one in ordered:
        changed = one.before_mib is not None and one.verdict in (MemoryVerdict.GREW, MemoryVerdict.SHRANK)
        commit = repository.commit(one.since.fingerprint.commit)
        rows.append(
            [
                Cell(one.name, NAME),
                Cell(one.verdict.value, KINDS[one.verdict]),
                number(digits(one.now_mib)),
                number(None if one.before_mib is None else digits(one.before_mib)),
                number(percent(one.now_mib / one.before_mib - 1) if changed and one.before_mib else None),
                number(None if board_mib is None else f"{100 * one.now_mib / board_mib:.1f} %"),
                Cell(commit.text, CODE, commit.href) if changed else when(one.since.utc),
                Cell("; ".join(_differences(one.earlier, one.since)) if changed else ""),
            ]
        )
    return ReportTable(head, rows)


def _differences(earlier: CaseVisit | None, since: CaseVisit) -> list[str]:
    """What a larger peak may be owed to beside the sources."""
    if earlier is None:
        return []
    names = ("torch", "triton", "cuda", "driver")
    return [
        difference
        for difference in fingerprint.differences(earlier.fingerprint, since.fingerprint)
        if difference.partition(" ")[0] in names
    ]
