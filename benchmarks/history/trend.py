"""Where a series of figures over the runs went to another level, and which level it has now.

Each point is the median of one process. Runs under other conditions (another driver, another kernel of the host) are
made comparable where something tells how (`bridges`), and are followed apart where nothing does, also where two hosts
take turns.

In each part ruptures finds the levels of log(latency) that explain it best at a price per level, after single points
that nothing follows are smoothed away; then changes too small to matter are dropped, and those that the uncertainty of
a bridge could explain. A new level counts once a second run has seen it: a change of the last point alone is
unconfirmed and asks for another run, as far as dense attention of that run does not show it too (another GPU of the
kind, a slow host). The first run is a level of its own only where other sources were measured and dense attention of
the same run shows that the machine was as it is. A slow drift comes out as steps, each as large as the smallest change
that is reported.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.history import conditions
from benchmarks.history.anchors import SeriesAnchors
from benchmarks.history.bridges import NEAR, Break, JoinedSeries, shared_step, sigma
from benchmarks.history.store import LatencySeries, Point
from harness.fingerprint import Fingerprint

SMALLEST_CHANGE = 0.03
"""Of a change that is reported; runs of different days differ more than processes of one hour."""
_SIGMAS = 4.0  # by how much the last point must leave its level to be asked about
_PENALTY = 3.0  # of one more level, in variances times log(points): ruptures' advice for a mean that jumps
_FEWEST_OF_LEVEL = 2
"""Runs after a first one that must agree before that one counts."""


@dataclass(frozen=True)
class Change:
    """A series went to another level."""

    index: int
    """The first point of the new level, in the whole series."""
    change: float
    """Of the latency: 0.1 is 10 % slower than the level before."""
    confirmed: bool
    """Seen by a second run."""
    uncertainty: float = 0.0
    """Half the 95 % interval of log(1 + change) that bridges between the two levels add: 0 under equal conditions."""


@dataclass(frozen=True)
class Trend:
    """A series of one case on one machine."""

    changes: tuple[Change, ...]
    breaks: tuple[Break, ...]
    level_ms: float
    """Now, under the newest run's conditions: the median since the last confirmed change or break."""
    level_begin: int
    """The first point of that level."""
    comparable: tuple[tuple[int, float], ...]
    """Every point that can be compared with the newest: its index, and its latency as under the newest's conditions,
    which a bridge may tell."""
    sigma: float
    """Noise of one of them, relative."""

    @property
    def confirmation_wanted(self) -> bool:
        """Whether another run must say if the last point is a change."""
        return bool(self.changes) and not self.changes[-1].confirmed


@dataclass(frozen=True)
class SeriesTrend:
    """A series and what became of it."""

    series: LatencySeries
    trend: Trend


def of(series: LatencySeries, smallest: float = SMALLEST_CHANGE) -> Trend:
    """The trend of a stored series."""
    return of_points(series.points, smallest, series.anchors)


def follow(history: Iterable[LatencySeries]) -> list[SeriesTrend]:
    """Find the changes of every series."""
    return [SeriesTrend(series, of(series)) for series in history]


def newest_paths(history: Iterable[LatencySeries]) -> list[LatencySeries]:
    """One series per case and device: that of the path (backend) that ran last."""
    newest: dict[tuple[str, str], LatencySeries] = {}
    for one in history:
        name = (one.newest.fingerprint.device, one.newest.key.name)
        if name not in newest or newest[name].points[-1].utc < one.points[-1].utc:
            newest[name] = one
    return list(newest.values())


def of_points(
    points: Sequence[Point], smallest: float = SMALLEST_CHANGE, anchors: SeriesAnchors | None = None
) -> Trend:
    """The trend of one series, oldest point first. ValueError where it is empty."""
    latencies_ms = [point.latency_ms for point in points]
    fingerprints = [point.fingerprint for point in points]
    return of_series(latencies_ms, fingerprints, smallest, [point.host_ms for point in points], anchors)


def of_series(
    latencies_ms: Sequence[float],
    fingerprints: Sequence[Fingerprint],
    smallest: float = SMALLEST_CHANGE,
    dense_ms: Sequence[Mapping[str, float]] = (),
    anchors: SeriesAnchors | None = None,
) -> Trend:
    """The same from columns of equal length; `dense_ms` may be left out: then every change of conditions cuts, but for
    those that `anchors` bridge."""
    if not latencies_ms:
        raise ValueError("latencies_ms must hold at least one point; got none")
    last = len(latencies_ms) - 1
    logs = [math.log(latency_ms) for latency_ms in latencies_ms]
    dense_ms = dense_ms or [{}] * len(logs)
    joined = JoinedSeries(logs, fingerprints, dense_ms, anchors)
    changes: list[Change] = []
    for part in joined.parts:
        own = [logs[i] - joined.offsets[i] for i in part]
        alone = _first_alone(own, part, fingerprints, dense_ms, smallest)
        dense = _dense_step([_dense(fingerprints[i], dense_ms[i], joined.offsets[i]) for i in part])
        found = _changes(own[alone:], smallest, _within(joined, part[alone:]), dense)
        placed = [Change(part[alone + one.index], one.change, one.confirmed, one.uncertainty) for one in found]
        if alone:
            end = 1 + found[0].index if found else len(part)
            unsure = joined.uncertainty(part[:1], part[1:end])
            step = statistics.median(own[1:end]) - own[0]
            if abs(step) > max(math.log1p(smallest), unsure):
                placed.insert(0, Change(part[1], math.expm1(step), True, unsure))
        changes += [change for change in placed if change.confirmed or change.index == last]
        if part[-1] == last:
            confirmed = [change.index for change in placed if change.confirmed]
            level_begin = max([part[0], *confirmed])
            unconfirmed = len(placed) > len(confirmed)
            newest = joined.offsets[last]
            comparable = [(i, latencies_ms[i] * math.exp(newest - joined.offsets[i])) for i in part]
            level = [ms for i, ms in comparable if i >= level_begin and not (unconfirmed and i == last)]
            noise = sigma([math.log(ms) for _, ms in comparable])
    changes.sort(key=lambda change: change.index)
    return Trend(tuple(changes), tuple(joined.breaks), statistics.median(level), level_begin, tuple(comparable), noise)


def _within(joined: JoinedSeries, part: Sequence[int]) -> Callable[[range, range], float]:
    """`JoinedSeries.uncertainty` for two stretches of one part."""

    def uncertainty(before: range, after: range) -> float:
        return joined.uncertainty([part[i] for i in before], [part[i] for i in after])

    return uncertainty


def _first_alone(
    logs: Sequence[float],
    part: Sequence[int],
    fingerprints: Sequence[Fingerprint],
    dense_ms: Sequence[Mapping[str, float]],
    smallest: float,
) -> int:
    """1 where the first run of a part is a level of its own, which one run alone is not elsewhere; else 0.

    It is one where the runs after it agree on another level, other sources were measured then, and dense attention ran
    on both sides: what that shows of the step (of a machine that was busy, say) is not NSA's.
    """
    near = part[1 : 1 + _FEWEST_OF_LEVEL]
    if len(near) < _FEWEST_OF_LEVEL or fingerprints[part[0]].nsa_sha256 == fingerprints[part[1]].nsa_sha256:
        return 0
    dense = [
        statistics.median(math.log(dense_ms[i][name]) for i in near) - math.log(ms)
        for name, ms in dense_ms[part[0]].items()
        if all(name in dense_ms[i] for i in near)
    ]
    if not dense:
        return 0
    after = logs[1 : 1 + len(near)]
    step = abs(statistics.median(after) - logs[0]) - max(map(abs, dense))
    return int(step >= max(math.log1p(smallest), _SIGMAS * sigma(after)))


def _dense(made: Fingerprint, dense_ms: Mapping[str, float], offset: float) -> dict[tuple[object, str], float]:
    """Of a run: the log of each dense baseline's latency less `offset`, by the run's hard conditions and the name."""
    return {(conditions.hard(made.conditions), name): math.log(ms) - offset for name, ms in dense_ms.items()}


def _dense_step(runs: Sequence[Mapping[tuple[object, str], float]]) -> float:
    """The last run's step from those before it, of the fastest baseline that ran in both; 0 without one.

    The runs before need not be of NSA's level: dense attention does not change with NSA's sources.
    """
    *before, last = runs
    near = {name: [one[name] for one in before if name in one][-NEAR:] for name in last}
    fastest = min((name for name in last if near[name]), key=lambda name: last[name], default=None)
    return 0.0 if fastest is None else last[fastest] - statistics.median(near[fastest])


def _changes(
    logs: Sequence[float], smallest: float, uncertainty: Callable[[range, range], float], dense_step: float
) -> list[Change]:
    """Of one part whose points are comparable; `uncertainty`: what bridges add between two stretches of it;
    `dense_step`: that of dense attention at the last point."""
    # a last point that is far from the two before it belongs to no level yet, or a level of two points would be half it
    agreed = logs[:-1] if _last_is_far(logs, math.log1p(smallest)) else logs
    starts = _without_small(agreed, _level_starts(agreed), math.log1p(smallest), uncertainty)
    stretches = _stretches(starts, len(agreed))
    levels = [_median(agreed, stretch) for stretch in stretches]
    found = [
        Change(start, math.expm1(new - old), True, uncertainty(*sides))
        for start, old, new, sides in zip(starts, levels, levels[1:], itertools.pairwise(stretches), strict=False)
    ]
    last = _unconfirmed(logs, starts, smallest, dense_step)
    end = range(len(logs) - 1, len(logs))
    if last is None or abs(math.log1p(last)) < (unsure := uncertainty(range(stretches[-1].start, end.start), end)):
        return found
    return [*found, Change(end.start, last, False, unsure)]


def _last_is_far(logs: Sequence[float], smallest: float) -> bool:
    """Whether the last of three points or more is the only one of these three at its place."""
    return len(logs) >= 3 and abs(logs[-1] - statistics.median(logs[-3:])) >= smallest


def _stretches(starts: Sequence[int], count: int) -> list[range]:
    """The levels that begin at the first of so many points, and at these."""
    return [range(a, b) for a, b in zip([0, *starts], [*starts, count], strict=True)]


def _median(logs: Sequence[float], stretch: range) -> float:
    return statistics.median(logs[stretch.start : stretch.stop])


def _level_starts(logs: Sequence[float]) -> list[int]:
    """Where ruptures begins a new level, each at least two points long."""
    if len(logs) < 4:
        return []
    import ruptures  # takes a second, which no other command need wait for

    smooth = [logs[0], *map(statistics.median, zip(logs, logs[1:], logs[2:], strict=False)), logs[-1]]
    smooth[-1] = smooth[-2]  # one point alone is no level; _unconfirmed looks at it
    smooth[0] = smooth[1]
    penalty = _PENALTY * sigma(logs) ** 2 * math.log(len(logs))
    signal = np.asarray(smooth).reshape(-1, 1)
    ends = ruptures.KernelCPD(kernel="linear", min_size=2).fit(signal).predict(pen=penalty)
    return [int(end) for end in ends[:-1]]


def _without_small(
    logs: Sequence[float], starts: list[int], smallest: float, uncertainty: Callable[[range, range], float]
) -> list[int]:
    """Take out the smallest change until all are large enough, and larger than bridges make them uncertain; the levels
    beside it become one."""
    starts = list(starts)
    while starts:
        sides = list(itertools.pairwise(_stretches(starts, len(logs))))
        sizes = [abs(_median(logs, new) - _median(logs, old)) for old, new in sides]
        shares = [size / max(smallest, uncertainty(*both)) for size, both in zip(sizes, sides, strict=True)]
        if min(shares) >= 1:
            break
        del starts[shares.index(min(shares))]
    return starts


def _unconfirmed(logs: Sequence[float], starts: Sequence[int], smallest: float, dense_step: float) -> float | None:
    """The change of the last point against its level, less what dense attention shows of it, where it is large and rare
    enough; else None."""
    level = logs[starts[-1] if starts else 0 : -1]
    if len(level) < 2:
        return None
    step = logs[-1] - statistics.median(level)
    step -= shared_step(step, dense_step)
    noise = sigma(logs[:-1])  # without the step, which would hide itself among few points
    return math.expm1(step) if abs(step) >= max(math.log1p(smallest), _SIGMAS * noise) else None
