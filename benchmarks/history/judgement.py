"""What is to be said of a case: is NSA slower on it, since which run, and may one say so at all?"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from benchmarks.history.accepted import Acceptance
from benchmarks.history.trend import SMALLEST_CHANGE, Change, SeriesTrend

FEWEST_RUNS = 3
"""Fewer that can be compared show no change of level, unless there is an accepted one."""
RECENT = 30
"""Runs for which a case is called faster or fixed; then it is as it always was."""
_SIGMAS, _HIDDEN = 4, 0.25  # not judged: noise that would hide a step of this size


class CaseState(str, Enum):
    """Of a case; what asks for a decision first comes first."""

    WRONG = "wrong"
    """The newest run has a fault in place of a figure: NSA is wrong or broken there."""
    SLOWER = "slower"
    MAYBE_SLOWER = "slower?"
    """The newest run alone; or only runs whose figures are not to be relied on."""
    NOT_JUDGED = "not judged"
    NEW = "new"
    FASTER = "faster"
    MAYBE_FASTER = "faster?"
    FIXED = "fixed"
    """As fast again as before it became slower."""
    ACCEPTED = "accepted"
    """Slower than once, and a person accepted that level."""
    SAME = "same"


@dataclass(frozen=True)
class Judgement:
    """Of one case."""

    state: CaseState
    change: float | None = None
    """Of the latency, against the best level before or the accepted one."""
    since: int | None = None
    """The first point of the level, in the whole series; None for a drift, which has none."""
    why: str = ""
    """What else is to be said: why it is not judged, or what it is slower than."""


@dataclass(frozen=True)
class Level:
    """A stretch of comparable runs between two changes."""

    begin: int
    latency_ms: float
    change: float
    """From the level before; 0 for the first."""
    uncertainty: float = 0.0
    """Of that change, by bridges between conditions; half the 95 % interval of its log."""


def accepted_ms(acceptance: Acceptance | None, one: SeriesTrend) -> float | None:
    """The accepted level as under the newest run's conditions; None where none can be compared."""
    if acceptance is None:
        return None
    if acceptance.fingerprint is None:
        return acceptance.latency_ms  # written before conditions were kept
    newest = one.series.newest
    if acceptance.path != (newest.correctness.path if newest.correctness else None):
        return None
    for i, latency_ms in one.trend.comparable:
        point = one.series.points[i]
        if point.fingerprint.conditions == acceptance.fingerprint.conditions:
            return acceptance.latency_ms * latency_ms / point.latency_ms
    return None


def last_alike(one: SeriesTrend, acceptance: Acceptance | None) -> int:
    """The last run under the conditions of what was accepted; the first of all where they are not known."""
    wanted = acceptance.fingerprint.conditions if acceptance and acceptance.fingerprint else None
    alike = [i for i, _ in one.trend.comparable if one.series.points[i].fingerprint.conditions == wanted]
    return alike[-1] if alike else one.trend.comparable[0][0]


def judge(one: SeriesTrend, accepted_level_ms: float | None, acceptance: Acceptance | None = None) -> Judgement:
    """`accepted_level_ms`: from `accepted_ms` of the acceptance, whose conditions say which bridges lie in between."""
    few = _too_few(one) if accepted_level_ms is None else None
    found = few or _noisy(one) or _by_level(one, accepted_level_ms, last_alike(one, acceptance))
    if found.state is CaseState.SLOWER:
        return only_if_reliable(one, found)
    if found.state is CaseState.NOT_JUDGED:
        return found
    last = one.trend.changes[-1] if one.trend.confirmation_wanted else None
    if last is None or (last.change < 0 and found.state is not CaseState.SAME):
        return found
    state = CaseState.MAYBE_SLOWER if last.change > 0 else CaseState.MAYBE_FASTER
    return Judgement(state, last.change, last.index, "not yet seen again")


def _too_few(one: SeriesTrend) -> Judgement | None:
    count = len(one.trend.comparable)
    if count >= FEWEST_RUNS:
        return None
    cut = [found for found in one.trend.breaks if not found.bridged]
    if not cut:
        return Judgement(CaseState.NEW, why=f"too few runs so far: {count}")
    return Judgement(
        CaseState.NOT_JUDGED, why=f"too few runs since conditions changed: {'; '.join(cut[-1].differences)}"
    )


def _noisy(one: SeriesTrend) -> Judgement | None:
    if _SIGMAS * one.trend.sigma < _HIDDEN or _steps(one):
        return None
    return Judgement(
        CaseState.NOT_JUDGED, why=f"its runs differ too much: by {one.trend.sigma:.0%} from one to the next"
    )


def _steps(one: SeriesTrend) -> list[Change]:
    """Confirmed changes among the runs that can be compared with the newest."""
    first = one.trend.comparable[0][0]
    comparable = {i for i, _ in one.trend.comparable}
    return [step for step in one.trend.changes if step.confirmed and step.index in comparable and step.index > first]


def levels_of(one: SeriesTrend) -> list[Level]:
    """Oldest first; the last is the trend's."""
    steps = [(step.index, step.change, step.uncertainty) for step in _steps(one)]
    begins = [(one.trend.comparable[0][0], 0.0, 0.0), *steps]
    ends = [begin for begin, _, _ in begins[1:]]
    levels = [
        Level(begin, statistics.median(ms for i, ms in one.trend.comparable if begin <= i < end), *change)
        for (begin, *change), end in zip(begins, ends, strict=False)
    ]
    begin, *change = begins[-1]
    return [*levels, Level(begin, one.trend.level_ms, *change)]


def least_change(steps: Sequence[Level]) -> float:
    """The smallest difference, relative, that counts between the level before these steps and the one after them:
    their uncertainties add in quadrature."""
    return max(SMALLEST_CHANGE, math.expm1(math.hypot(*(step.uncertainty for step in steps))))


def _by_level(one: SeriesTrend, accepted_level_ms: float | None, accepted_at: int) -> Judgement:
    levels = levels_of(one)
    now, before = levels[-1], levels[:-1]
    least = least_change([level for level in levels if level.begin > accepted_at])
    faster_ms = [
        level.latency_ms
        for number, level in enumerate(before, start=1)
        if now.latency_ms > level.latency_ms * (1 + least_change(levels[number:]))
    ]
    best_ms = min(faster_ms, default=now.latency_ms)
    than = "than accepted" if accepted_level_ms else ""
    if now.latency_ms > accepted_level_ms * (1 + least) if accepted_level_ms else faster_ms:
        wanted_ms = accepted_level_ms or best_ms
        change = now.latency_ms / wanted_ms - 1
        return Judgement(CaseState.SLOWER, change, _rose(levels, wanted_ms), than)
    if faster_ms:
        return Judgement(
            CaseState.ACCEPTED, now.latency_ms / best_ms - 1, _rose(levels, best_ms), "as slow as accepted"
        )
    if accepted_level_ms and now.latency_ms < accepted_level_ms / (1 + least):
        return Judgement(CaseState.FASTER, now.latency_ms / accepted_level_ms - 1, now.begin if before else None, than)
    recent = sum(i >= now.begin for i, _ in one.trend.comparable) <= RECENT
    if before and recent and now.change < 0:
        as_before = any(level.latency_ms <= now.latency_ms * (1 + SMALLEST_CHANGE) for level in before)
        return Judgement(CaseState.FIXED if as_before else CaseState.FASTER, now.change, now.begin)
    return Judgement(CaseState.SAME)


def _rose(levels: Sequence[Level], wanted_ms: float) -> int | None:
    """Where the latency went above the wanted level for good; None where no level is as low as that."""
    low = [number for number, level in enumerate(levels) if level.latency_ms <= wanted_ms * (1 + SMALLEST_CHANGE)]
    return levels[low[-1] + 1].begin if low else None


def only_if_reliable(one: SeriesTrend, found: Judgement) -> Judgement:
    """Runs with a reservation alone do not show that a case is slower where the runs before had none."""
    since = one.trend.level_begin if found.since is None else found.since
    after = [one.series.points[i].reservations for i, _ in one.trend.comparable if i >= since]
    before = [one.series.points[i].reservations for i, _ in one.trend.comparable if i < since]
    if len(before) == 1 and before[0]:
        return Judgement(CaseState.MAYBE_SLOWER, found.change, found.since, f"than one run alone: {before[0][0]}")
    if all(after) and not all(before):
        return Judgement(CaseState.MAYBE_SLOWER, found.change, found.since, f"not to be relied on: {after[-1][0]}")
    if len(after) == 1:
        return Judgement(CaseState.MAYBE_SLOWER, found.change, found.since, "not yet seen again")
    return found


def against(one: SeriesTrend, runs: int) -> float | None:
    """The newest latency against the median of up to `runs` comparable runs before it; None without one."""
    *before, (_, newest_ms) = one.trend.comparable
    near = [ms for _, ms in before[-runs:]]
    return newest_ms / statistics.median(near) - 1 if near else None


def commits(one: SeriesTrend, since: int) -> tuple[str | None, str | None]:
    """The commits of the run before a point, among those that can be compared, and of the point."""
    before = [i for i, _ in one.trend.comparable if i < since] or [max(since - 1, 0)]
    return one.series.points[before[-1]].fingerprint.commit, one.series.points[since].fingerprint.commit
