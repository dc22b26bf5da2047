"""Changes over the runs in tables: where a case went to another level, and how it stands beside what was accepted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from benchmarks.history.accepted import Standing, State
from benchmarks.history.trend import Change, SeriesTrend
from benchmarks.report.links import Repository
from benchmarks.report.table import (
    BAD,
    CODE,
    GOOD,
    NAME,
    PLAIN,
    Cell,
    ReportTable,
    digits,
    number,
    percent,
    plus_minus,
    when,
)

STATES = (State.SLOWER, State.MISSING, State.NOT_COMPARABLE, State.NEW, State.FASTER, State.AT_BASELINE)
"""What asks for a decision first."""
KINDS = {
    State.SLOWER: BAD,
    State.MISSING: BAD,
    State.NOT_COMPARABLE: PLAIN,
    State.NEW: PLAIN,
    State.FASTER: GOOD,
    State.AT_BASELINE: GOOD,
}


def news(followed: Sequence[SeriesTrend], found: Sequence[Standing]) -> str:
    """Both in a sentence each."""
    changes = [change for one in followed for change in one.trend.changes]
    slower = sum(change.change > 0 for change in changes)
    unsure = sum(not change.confirmed for change in changes)
    kinds = f"{slower} slower, {len(changes) - slower} faster, {unsure} not seen again yet"
    said = f"Changes of level over the runs: {kinds if changes else 'none'}."
    counts = Counter(one.state for one in found)
    beside = ", ".join(f"{counts[state]} {state.value}" for state in STATES if counts[state])
    return f"{said} Beside the accepted baselines: {beside}." if beside else f"{said} No baseline is accepted."


def table(followed: Sequence[SeriesTrend], repository: Repository) -> ReportTable:
    """A row per change, newest first."""
    head = ("when", "case", "commit", "what changed", "change of time", "seen again")
    rows = [(one, change) for one in followed for change in one.trend.changes]
    newest_first = sorted(rows, key=lambda row: row[0].series.points[row[1].index].utc, reverse=True)
    return ReportTable(head, [_row(one, change, repository) for one, change in newest_first])


def _row(one: SeriesTrend, change: Change, repository: Repository) -> list[Cell]:
    series, kind = one.series, BAD if change.change > 0 else GOOD
    point, before = series.points[change.index], series.points[max(change.index - 1, 0)]
    again = "yes" if change.confirmed else f"not yet: {series.newest.command}"
    commit = repository.commit(point.fingerprint.commit)
    difference = repository.difference(before.fingerprint.commit, point.fingerprint.commit)
    return [
        when(point.utc),
        Cell(series.newest.key.name, NAME),
        Cell(commit.text, CODE, commit.href),
        Cell(difference.text, CODE, difference.href) if difference else Cell("–"),
        Cell(percent(change.change) + plus_minus(change.uncertainty), kind),
        Cell(again, PLAIN if change.confirmed else NAME),
    ]


def standings(found: Iterable[Standing]) -> ReportTable:
    """A row per case that is not where its accepted baseline is; those without any baseline are no news."""
    head = ("case", "against its baseline", "now, ms", "accepted, ms", "last run")
    ordered = sorted(found, key=lambda one: (STATES.index(one.state), one.case))
    rows = [
        [
            Cell(one.case, NAME),
            Cell("; ".join([one.state.value, *one.differences]), KINDS[one.state]),
            number(None if one.level_ms is None else digits(one.level_ms)),
            number(None if one.accepted_ms is None else digits(one.accepted_ms)),
            Cell("differs: run it again" if one.unconfirmed else "agrees"),
        ]
        for one in ordered
        if one.state is not State.AT_BASELINE
    ]
    return ReportTable(head, rows)
