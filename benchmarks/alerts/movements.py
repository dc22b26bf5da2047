"""Each case that went to another level, with the commits that may have done it: from the runs, and from `compare`.

A movement of the runs is a change of level that a second run has seen, where the first page would rely on it. One of
`compare` is a SLOWER between two commits of this repository's main line.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.ab.result import CompareVerdict, ComparisonResult
from benchmarks.alerts.commits import Commits
from benchmarks.history import judgement, trend
from benchmarks.history.accepted import Acceptance
from benchmarks.history.alerts import AlertCase
from benchmarks.history.judgement import CaseState, Judgement, Level
from benchmarks.history.store import Store
from benchmarks.history.trend import SMALLEST_CHANGE, SeriesTrend

_Z95 = 1.96
_MEDIAN = math.sqrt(math.pi / 2)
"""The standard error of a median over that of a mean."""
_UNLIKELY = 3.0
"""In log-likelihood: a run that is exp(3) = 20 times less likely to be the first is not."""
_AT_LEAST = 2
"""Runs of a level."""
Accepted = Mapping[tuple[str, str, str], Acceptance]
"""The newest acceptance by (machine, device, case)."""


@dataclass(frozen=True)
class Movement:
    """One case of one machine went to another level."""

    machine: str
    case: AlertCase
    good: str | None
    """The last commit at the level before."""
    suspects: tuple[str, ...]
    """The commits after it, up to the first one at the new level; none where nsa/ is the same in both."""
    back: bool = False
    """Whether the level is as before again."""
    accepted: Acceptance | None = None
    """By which a person took the new level."""
    of_today: bool = True
    """Whether it says something of HEAD; a comparison of older commits does not."""

    @property
    def lasts(self) -> bool:
        """Whether the level is not as before, and nobody has accepted that."""
        return self.of_today and not self.back and self.accepted is None


def of_runs(store: Store, machine: str, accepted: Accepted, commits: Commits) -> list[Movement]:
    """Every movement among the runs of a machine that can be compared with the newest ones."""
    found: list[Movement] = []
    for one in trend.follow(trend.newest_paths(store.history(machine))):
        acceptance = accepted.get((machine, one.series.newest.fingerprint.device, one.series.newest.key.name))
        found += _of_series(one, machine, acceptance, commits)
    return found


def _of_series(one: SeriesTrend, machine: str, acceptance: Acceptance | None, commits: Commits) -> Iterator[Movement]:
    accepted_ms = judgement.accepted_ms(acceptance, one)
    verdict = judgement.judge(one, accepted_ms, acceptance)
    if verdict.state in (CaseState.NEW, CaseState.NOT_JUDGED):
        return
    levels = judgement.levels_of(one)
    now_ms, accepted_at = levels[-1].latency_ms, judgement.last_alike(one, acceptance)
    ends = [*(level.begin for level in levels[2:]), len(one.series.points)]
    for number, (before, level, end) in enumerate(zip(levels, levels[1:], ends, strict=False), start=1):
        slower = level.change > 0
        step = Judgement(CaseState.SLOWER, level.change, level.begin)
        if slower and judgement.only_if_reliable(one, step).state is not CaseState.SLOWER:
            continue
        earliest, latest = _begins(one, before, level, end)
        good, bad = _last_clean(one, before.begin, earliest), _first_clean(one, latest)
        since_accepted = judgement.least_change([step for step in levels[: number + 1] if step.begin > accepted_at])
        took = accepted_ms is not None and level.latency_ms <= accepted_ms * (1 + since_accepted)
        yield Movement(
            machine,
            _case(one, level, _interval(one, before, level)),
            good,
            commits.suspects(good, bad),
            back=slower and now_ms <= before.latency_ms * (1 + judgement.least_change(levels[number:])),
            accepted=acceptance if slower and took else None,
        )
    if (
        verdict.state is CaseState.SLOWER
        and verdict.since is None
        and verdict.change is not None
        and acceptance is not None
    ):
        drift = Level(levels[0].begin, now_ms, verdict.change, 0.0)  # away from the accepted level, without a step
        suspects = commits.suspects(acceptance.commit, _first_clean(one, drift.begin))
        yield Movement(machine, _case(one, drift, None), acceptance.commit, suspects)


def _case(one: SeriesTrend, level: Level, interval: tuple[float, float] | None) -> AlertCase:
    newest, point = one.series.newest, one.series.points[level.begin]
    return AlertCase(newest.key.name, newest.fingerprint.device, level.change, interval, point.utc, "runs")


def _begins(one: SeriesTrend, before: Level, level: Level, end: int) -> tuple[int, int]:
    """The earliest and the latest run with which a level, which ends before `end`, may have begun, by the noise.

    Each run at which it may have begun has a likelihood; those are left out that are `_UNLIKELY` beside the best.
    """
    low, high = math.log(before.latency_ms), math.log(before.latency_ms * (1 + level.change))
    runs = [(i, math.log(ms)) for i, ms in one.trend.comparable if before.begin <= i < end]
    unlikely, total = dict[int, float](), 0.0  # by the run with which it begins; of each run before: at the old level
    for i, log_ms in runs[: -_AT_LEAST + 1]:
        if i > before.begin:
            unlikely[i] = total
        total += ((log_ms - low) ** 2 - (log_ms - high) ** 2) / (2 * one.trend.sigma**2)
    likely = [i for i, cost in unlikely.items() if cost <= min(unlikely.values()) + _UNLIKELY]
    return min([*likely, level.begin]), max([*likely, level.begin])


def _interval(one: SeriesTrend, before: Level, level: Level) -> tuple[float, float]:
    """Of the change between two neighbouring levels: the noise of one run, how many runs each has, bridges between."""
    after = [i for i, _ in one.trend.comparable if i >= level.begin]
    counts = (sum(before.begin <= i < level.begin for i, _ in one.trend.comparable), len(after))
    width = _Z95 * _MEDIAN * one.trend.sigma * math.sqrt(sum(1 / max(count, 1) for count in counts))
    width, centre = math.hypot(width, level.uncertainty), math.log1p(level.change)
    return math.expm1(centre - width), math.expm1(centre + width)


def _last_clean(one: SeriesTrend, begin: int, end: int) -> str | None:
    """The commit of the last run in [begin, end) whose sources were those of its commit."""
    return next(iter(reversed(_clean(one, begin, end))), None)


def _first_clean(one: SeriesTrend, begin: int) -> str | None:
    return next(iter(_clean(one, begin, len(one.series.points))), None)


def _clean(one: SeriesTrend, begin: int, end: int) -> list[str]:
    runs = (one.series.points[i].fingerprint for i, _ in one.trend.comparable if begin <= i < end)
    return [run.commit for run in runs if run.commit is not None and not run.dirty]


def of_comparisons(results: Sequence[ComparisonResult], accepted: Accepted, commits: Commits) -> list[Movement]:
    """Every SLOWER between two commits that HEAD came from."""
    return list(filter(None, (_of_comparison(one, results, accepted, commits) for one in results)))


def _of_comparison(
    one: ComparisonResult, others: Iterable[ComparisonResult], accepted: Accepted, commits: Commits
) -> Movement | None:
    if one.verdict is not CompareVerdict.SLOWER or one.change is None:
        return None
    if any(side.dirty or commits.position(side.commit) is None for side in (one.base, one.head)):
        return None
    machine, device = one.fingerprint.machine, one.fingerprint.device
    case = AlertCase(one.key.name, device, one.change, one.interval, one.utc, "compare")
    acceptance = accepted.get((machine, device, case.case))
    return Movement(
        machine,
        case,
        one.base.commit,
        commits.suspects(one.base.commit, one.head.commit),
        back=any(_shows_it_back(other, one, commits) for other in others),
        accepted=acceptance if acceptance is not None and acceptance.utc > one.utc else None,
        of_today=commits.is_today(one.head.commit),
    )


def _shows_it_back(later: ComparisonResult, slower: ComparisonResult, commits: Commits) -> bool:
    """Whether a later comparison found that commit, or one after it, no slower than BASE, or faster by as much."""
    alike = later.key.name == slower.key.name and later.fingerprint.device == slower.fingerprint.device
    if not alike or later.utc <= slower.utc or later.head.dirty or later.base.dirty:
        return False
    was, base, head = (commits.position(side.commit) for side in (slower.head, later.base, later.head))
    if was is None or base is None or head is None or head < was:
        return False
    if later.base.commit == slower.base.commit:
        return later.verdict in (CompareVerdict.SAME, CompareVerdict.FASTER)
    if later.verdict is not CompareVerdict.FASTER or base < was:
        return False
    return (1 + (slower.change or 0.0)) * (1 + (later.change or 0.0)) <= 1 + SMALLEST_CHANGE
