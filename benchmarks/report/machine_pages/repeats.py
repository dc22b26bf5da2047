"""Figures that were measured again, on a machine's page: how many came again, and which did not."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.history.repeats import GOAL, WITHIN, Repeat
from benchmarks.report.table import BAD, GOOD, Cell, ReportTable, percent, version, when

_MOST_RUNS, _MOST_CASES = 8, 6
_BOARD = {True: "another", False: "the same", None: "not recorded"}


def table(found: Sequence[Repeat]) -> ReportTable:
    """A row per run, the newest first."""
    rows = []
    for one in found[:_MOST_RUNS]:
        share = one.again / len(one.changes)
        far = [f"{case} {percent(change)}" for case, change in one.far]
        more = [f"and {len(far) - _MOST_CASES} more"] if len(far) > _MOST_CASES else []
        rows.append(
            [
                Cell(version(one.second.commit, one.second.dirty)),
                when(one.first.utc),
                when(one.second.utc),
                Cell(_BOARD[one.other_board]),
                Cell(f"{one.again} of {len(one.changes)}", GOOD if share >= GOAL else BAD),
                Cell("; ".join(far[:_MOST_CASES] + more) or "–"),
            ]
        )
    within = percent(WITHIN, 0).lstrip("+")
    return ReportTable(("commit", "first run", "again", "board", f"within {within}", "the others"), rows)


def goal() -> str:
    """What is wanted, in words."""
    return f"{percent(GOAL, 0).lstrip('+')} of the figures are to come again within {percent(WITHIN, 0).lstrip('+')}"
