"""Alerts follow the records: opened, joined by further cases, closed where levels are back or accepted.

The same records a second time change nothing. A movement belongs to the alert whose suspect commits it shares; the
rest is grouped by cause, and each cause that still makes a case slower opens an alert.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from benchmarks.ab import result
from benchmarks.alerts import movements
from benchmarks.alerts.causes import Cause, causes
from benchmarks.alerts.commits import Commits, owner
from benchmarks.alerts.movements import Accepted, Movement
from benchmarks.history import accepted, alerts
from benchmarks.history.accepted import Acceptance
from benchmarks.history.alerts import Alert, AlertCase, AlertEvent, AlertState
from benchmarks.history.store import Store

_ATTEMPTS = 3
"""Another writer may add to a file between reading it and writing; then what follows is worked out anew."""


def update(results: Path, utc: str) -> list[AlertEvent]:
    """Bring the alerts up to the records; the events that were added, which have this time."""
    taken, commits, store = accepted.current(results), Commits(), Store(results)
    found = [one for machine in store.machines() for one in movements.of_runs(store, machine, taken, commits)]
    found += movements.of_comparisons(result.read(results)[0], taken, commits)
    slower = [one for one in found if one.case.change > 0]
    added: list[AlertEvent] = []
    for _ in range(_ATTEMPTS):
        stored = alerts.read(results)[0]
        wanted = list(_wanted(stored, slower, taken, commits, utc))
        refused = [event for seen, event in wanted if not _append(results, seen, event)]
        added += [event for _, event in wanted if event not in refused]
        if not refused:
            break
    return added


def _append(results: Path, seen: Alert | None, event: AlertEvent) -> bool:
    return alerts.append(results, event, lambda now: now == seen)


def _wanted(
    stored: Sequence[Alert], slower: Sequence[Movement], taken: Accepted, commits: Commits, utc: str
) -> list[tuple[Alert | None, AlertEvent]]:
    """What is to be written: (the alert as it was read, None for a new one; the event)."""
    joined: dict[str, list[Movement]] = {alert.id: [] for alert in stored}
    others: list[Movement] = []
    for one in slower:
        alert = _of(one, stored, slower)
        (others if alert is None else joined[alert.id]).append(one)
    events = [(alert, _next(alert, joined[alert.id], taken, commits, utc)) for alert in stored]
    ids = {alert.id for alert in stored}
    opened = [_opened(cause, ids, utc) for cause in causes((one for one in others if one.lasts), commits)]
    return [*((None, event) for event in opened), *((alert, event) for alert, event in events if event is not None)]


def _of(one: Movement, stored: Sequence[Alert], slower: Sequence[Movement]) -> Alert | None:
    """The alert that a movement belongs to: one that knows its case before another, the oldest first.

    With a further run a change of level can be found one run away: it is still that of its alert.
    """
    here = [alert for alert in reversed(stored) if alert.machine == one.machine]
    alike = [alert for alert in here if _overlaps(one, alert)]
    known = [alert for alert in alike if _knows(alert, one.case)]
    moved = [
        alert
        for alert in here
        if alert.state is AlertState.NEW
        and _knows(alert, one.case)
        and (one.good in alert.suspects or alert.good in one.suspects)
        and not any(_overlaps(other, alert) for other in slower if other.case.name == one.case.name)
    ]
    return next(iter([*known, *alike, *moved]), None)


def _overlaps(one: Movement, alert: Alert) -> bool:
    if one.machine != alert.machine:
        return False
    if not one.suspects:
        return not alert.suspects and any(case.utc == one.case.utc for case in alert.cases)
    return not set(one.suspects).isdisjoint(alert.suspects)


def _knows(alert: Alert, case: AlertCase) -> bool:
    return any(known.name == case.name for known in alert.cases)


def _opened(cause: Cause, taken: Collection[str], utc: str) -> AlertEvent:
    """The first event of an alert, whose id none of those that are taken has."""
    names = itertools.chain([cause.id], (f"{cause.id}.{number}" for number in itertools.count(2)))
    name = next(name for name in names if name not in taken)
    cases = {one.case.name: one.case for one in cause.movements}  # `compare` comes after the runs: it is paired
    worst = max(case.change for case in cases.values())
    why = f"{_cases(len(cases))} slower, the worst by {worst:.1%}"
    suspects = cause.suspects
    return AlertEvent(
        utc, name, cause.movements[0].machine, AlertState.NEW, why, cause.good, suspects, owner(suspects),
        tuple(cases.values()),
    )  # fmt: skip


def _cases(count: int) -> str:
    return "1 case is" if count == 1 else f"{count} cases are"


def _next(alert: Alert, joined: Sequence[Movement], taken: Accepted, commits: Commits, utc: str) -> AlertEvent | None:
    """What the records say that the alert does not yet; None where that is nothing."""
    ended = "" if alert.is_open else alert.history[-1].utc
    lasting = [one for one in joined if one.lasts and (one.case.source == "runs" or one.case.utc > ended)]
    fresh = {one.case.name: one.case for one in lasting if not _knows(alert, one.case)}
    again = alert.state is AlertState.NOT_REPRODUCED and any(one.case.source == "compare" for one in lasting)
    state, messages = (alert.state, []) if alert.is_open else (AlertState.NEW, ["opened again"])
    if not alert.is_open and not fresh and not again:
        return None
    good, suspects = alert.good, alert.suspects
    if again:
        messages.append("a later comparison is SLOWER")
    if fresh:
        messages.append(f"{_cases(len(fresh))} slower too")
    confirmed = alert.cause.state is AlertState.CONFIRMED
    if alert.is_open and not confirmed and (cause := _narrowed(lasting, suspects, commits)) is not None:
        good, suspects = cause.good, cause.suspects
        messages.append(f"suspect since the newest runs: {len(suspects)} commit{'s' * (len(suspects) != 1)}")
    if not fresh and not again and (end := _end(alert, joined, taken)) is not None:
        state, why = end
        messages = [why]
    if not messages:
        return None
    cases = tuple(fresh.values())
    return AlertEvent(
        alert.after(utc), alert.id, alert.machine, state, "; ".join(messages), good, suspects, owner(suspects), cases
    )  # fmt: skip


def _narrowed(lasting: Sequence[Movement], suspects: tuple[str, ...], commits: Commits) -> Cause | None:
    """The cause as the movements have it now, where it leaves out some of these suspects."""
    found = causes((one for one in lasting if one.suspects), commits)
    known = any(set(cause.suspects) >= set(suspects) for cause in found)
    return None if known or not found else max(found, key=lambda cause: len(cause.movements))


def _end(alert: Alert, joined: Sequence[Movement], taken: Accepted) -> tuple[AlertState, str] | None:
    """How an open alert ends: where no case is slower any more but by a level that a person accepted."""
    reasons: list[Acceptance] = []
    for case in alert.cases:
        found = _decisive([one for one in joined if one.case.name == case.name])
        if found and all(one.back for one in found):
            continue
        acceptance = _accepted(alert, case, found, taken)
        if acceptance is None:
            return None
        reasons.append(acceptance)
    if not reasons:
        return AlertState.FIXED, "every case is as fast again as before"
    messages = dict.fromkeys(f"{one.reason} ({one.who})" for one in reasons)
    return AlertState.ACCEPTED, "; ".join(messages)


def _decisive(found: Sequence[Movement]) -> list[Movement]:
    """What says how a case stands now: the runs where they saw it move, else the comparisons."""
    return [one for one in found if one.case.source == "runs"] or list(found)


def _accepted(
    alert: Alert, case: AlertCase, found: Sequence[Movement], taken: Mapping[tuple[str, str, str], Acceptance]
) -> Acceptance | None:
    """By which a case's level was taken; where runs under other conditions hide the movement, any later acceptance."""
    if found:
        open_ = [one for one in found if not one.back]
        return open_[0].accepted if all(one.accepted is not None for one in open_) else None
    acceptance = taken.get((alert.machine, *case.name))
    return acceptance if acceptance is not None and acceptance.utc > case.utc else None
