"""Launches per call on a machine's page: how many, and since which commit there are more or fewer."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.history.launches import LaunchTrend
from benchmarks.report.links import Repository
from benchmarks.report.table import BAD, CODE, GOOD, NAME, PLAIN, Cell, ReportTable, number, when


def table(trends: Sequence[LaunchTrend], repository: Repository) -> ReportTable:
    """A row per case, those with more launches than before first."""
    rows = []
    for one in sorted(trends, key=lambda one: (not one.grew, one.name)):
        changed = one.before is not None
        commit = repository.commit(one.since.fingerprint.commit)
        verdict = ("more launches", BAD) if one.grew else ("fewer launches", GOOD) if changed else ("the same", PLAIN)
        rows.append(
            [
                Cell(one.name, NAME),
                Cell(*verdict),
                number(str(one.now)),
                number(None if one.before is None else str(one.before)),
                Cell(commit.text, CODE, commit.href) if changed else when(one.since.utc),
            ]
        )
    return ReportTable(("case", "verdict", "now", "before", "since"), rows)
