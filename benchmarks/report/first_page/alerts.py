"""The open alerts on the first page: a number, and a row for each."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timezone

from benchmarks.history.alerts import Alert, AlertState
from benchmarks.report.first_page.evidence import HeadlineNumber
from benchmarks.report.links import Link, Repository, short
from benchmarks.report.table import BAD, BRIEF, CODE, GOOD, NAME, PLAIN, Cell, ReportTable, number, percent

ANCHOR = "#alerts"
_KINDS = {AlertState.CONFIRMED: BAD, AlertState.NEW: "warn"}


def headline(stored: Sequence[Alert]) -> HeadlineNumber:
    """How many are open, and how many of them a paired re-run has confirmed; green only where none is open."""
    open_ = [alert for alert in stored if alert.is_open]
    confirmed = sum(alert.state is AlertState.CONFIRMED for alert in open_)
    text = f"{len(open_)}, {confirmed} confirmed" if open_ else "0"
    kind = BAD if confirmed else PLAIN if open_ or not stored else GOOD
    return HeadlineNumber("Open alerts", text, kind, href=ANCHOR if open_ else None)


def table(stored: Sequence[Alert], repository: Repository, now: datetime) -> ReportTable:
    """A row per open alert, the confirmed ones first."""
    head = ("state", "machine", "cause", "owner", "cases", "time, worst change", "age")
    open_ = sorted((alert for alert in stored if alert.is_open), key=lambda alert: alert.state is AlertState.NEW)
    return ReportTable(head, [_row(alert, repository, now) for alert in open_])


def _row(alert: Alert, repository: Repository, now: datetime) -> list[Cell]:
    cause = _cause(alert, repository)
    names = [case.case for case in alert.cases]
    cases = names[0] if len(names) == 1 else f"{len(names)}: {names[0]} and others"
    opened = datetime.fromisoformat(alert.opened.removesuffix("Z")).replace(tzinfo=timezone.utc)
    days = max((now - opened).days, 0)
    return [
        Cell(alert.state.value, _KINDS[alert.state]),
        Cell(alert.machine),
        Cell(cause.text, CODE, cause.href),
        Cell(alert.owner, NAME),
        Cell(cases, NAME),
        number(percent(alert.cases[0].change)),
        Cell(f"{days} {'day' if days == 1 else 'days'}", BRIEF),
    ]


def _cause(alert: Alert, repository: Repository) -> Link:
    """The commit; of several the difference that holds them all."""
    suspects = alert.suspects
    if not suspects:
        return Link("no commit")
    if len(suspects) == 1:
        return repository.commit(suspects[0])
    all_of_them = repository.difference(alert.good, suspects[-1])
    named = f"{short(suspects[0])}..{short(suspects[-1])} ({len(suspects)})"
    return Link(named, all_of_them.href if all_of_them else None)
