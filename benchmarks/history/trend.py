"""Where a series of figures over the runs went to another level, and which level it has now.

Each point is the median of one process. Runs under other conditions cannot be compared (another driver, another GPU
board) and are followed apart, also where two hosts take turns. Conditions that change often and mostly touch the host
(`SOFT`: a kernel patch, another flash-attn) do not cut a series: dense attention was measured in the same runs, and
what its time shows of the change is taken out of NSA's, as far as NSA's own time shows it too. So a host that is slower
for both raises no alarm, nor does a baseline that alone became faster, and a slower NSA is still seen.

In each part ruptures finds the levels of log(latency) that explain it best at a price per level, after single points
that nothing follows are smoothed away; then changes too small to matter are dropped. A new level counts once a second
run has seen it: a change of the last point alone is unconfirmed and asks for another run. A slow drift comes out as
steps, each as large as the smallest change that is reported.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.history.store import Point
from harness import fingerprint
from harness.fingerprint import CONDITIONS, Fingerprint

SMALLEST_CHANGE = 0.03
"""Of a change that is reported; runs of different days differ more than processes of one hour."""
SOFT = frozenset({"platform", "threads", "flash_attn", "benchmarks_sha256"})
"""Conditions whose change a dense baseline of the same run makes up for."""
_HARD = [number for number, name in enumerate(CONDITIONS) if name not in SOFT]
_NEAR = 5  # runs on each side of a soft change that tell what it did
_SIGMAS = 4.0  # by how much the last point must leave its level to be asked about
_PENALTY = 3.0  # of one more level, in variances times log(points): ruptures' advice for a mean that jumps
_SMALLEST_SIGMA = 0.002
_SIGMA_OF_FEW = 0.01  # at least, while fewer differences of neighbours than this tell the noise:
_FEW = 5


@dataclass(frozen=True)
class Change:
    """A series went to another level."""

    index: int
    """The first point of the new level, in the whole series."""
    change: float
    """Of the latency: 0.1 is 10 % slower than the level before."""
    confirmed: bool
    """Seen by a second run."""


@dataclass(frozen=True)
class Break:
    """Here conditions begin that no run had before."""

    index: int
    differences: tuple[str, ...]
    """From the run before: "driver 555 -> 560"."""
    bridged: bool = False
    """Whether the series goes on all the same: the change is soft, and a dense baseline tells what it did."""


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
    """Every point that can be compared with the newest: its index, and its latency as under the newest's conditions."""
    sigma: float
    """Noise of one of them, relative."""

    @property
    def confirmation_wanted(self) -> bool:
        """Whether another run must say if the last point is a change."""
        return bool(self.changes) and not self.changes[-1].confirmed


def of_points(points: Sequence[Point], smallest: float = SMALLEST_CHANGE) -> Trend:
    """The trend of one series, oldest point first. ValueError where it is empty."""
    latencies_ms = [point.latency_ms for point in points]
    fingerprints = [point.fingerprint for point in points]
    return of_series(latencies_ms, fingerprints, smallest, [point.dense_ms for point in points])


def of_series(
    latencies_ms: Sequence[float],
    fingerprints: Sequence[Fingerprint],
    smallest: float = SMALLEST_CHANGE,
    dense_ms: Sequence[Mapping[str, float]] = (),
) -> Trend:
    """The same from columns of equal length; `dense_ms` may be left out: then every change of conditions cuts."""
    if not latencies_ms:
        raise ValueError("latencies_ms must hold at least one point; got none")
    last = len(latencies_ms) - 1
    logs = [math.log(latency_ms) for latency_ms in latencies_ms]
    parts, offsets, cuts = _parts(logs, fingerprints, dense_ms or [{}] * len(logs))
    changes: list[Change] = []
    for part in parts:
        found = _changes([logs[i] - offsets[i] for i in part], smallest)
        placed = [Change(part[change.index], change.change, change.confirmed) for change in found]
        changes += [change for change in placed if change.confirmed or change.index == last]
        if part[-1] == last:
            confirmed = [change.index for change in placed if change.confirmed]
            level_begin = max([part[0], *confirmed])
            unconfirmed = len(placed) > len(confirmed)
            comparable = [(i, latencies_ms[i] * math.exp(offsets[last] - offsets[i])) for i in part]
            level = [ms for i, ms in comparable if i >= level_begin and not (unconfirmed and i == last)]
            sigma = _sigma([math.log(ms) for _, ms in comparable])
    changes.sort(key=lambda change: change.index)
    return Trend(tuple(changes), tuple(cuts), statistics.median(level), level_begin, tuple(comparable), sigma)


def breaks(fingerprints: Sequence[Fingerprint]) -> list[Break]:
    """Where conditions begin that no run had before, and how they differ from those of the run before.

    `bridged` where all that changed is soft: series with a dense baseline go on.
    """
    begins = [group[0] for group in _groups(fingerprints)][1:]
    return [
        _break(fingerprints, i, bridged=_hard(fingerprints[i]) in {_hard(one) for one in fingerprints[:i]})
        for i in begins
    ]


def _break(fingerprints: Sequence[Fingerprint], index: int, *, bridged: bool) -> Break:
    return Break(index, tuple(fingerprint.differences(fingerprints[index - 1], fingerprints[index])), bridged)


def _groups(fingerprints: Sequence[Fingerprint]) -> list[list[int]]:
    """Indices of the runs that share all their conditions, in the order in which these began."""
    groups: dict[tuple[object, ...], list[int]] = {}
    for i, one in enumerate(fingerprints):
        groups.setdefault(one.conditions, []).append(i)
    return list(groups.values())


def _hard(one: Fingerprint) -> tuple[object, ...]:
    """The conditions that no baseline makes up for."""
    return tuple(one.conditions[number] for number in _HARD)


def _parts(
    logs: Sequence[float], fingerprints: Sequence[Fingerprint], dense_ms: Sequence[Mapping[str, float]]
) -> tuple[list[list[int]], list[float], list[Break]]:
    """Indices of the points that can be compared, what to take off each point's log for that, and the breaks."""
    parts: list[list[int]] = []
    offsets = [0.0] * len(logs)
    found: list[Break] = []
    for group in _groups(fingerprints):
        hard = _hard(fingerprints[group[0]])
        offset = None
        for part in reversed(parts):  # the newest that is alike
            if offset is None and _hard(fingerprints[part[0]]) == hard:
                before = [i for i in part if i < group[0]][-_NEAR:]
                offset = _effect(logs, dense_ms, offsets, before, group[:_NEAR])
                if offset is not None:
                    part += group
        if offset is None:
            parts.append(list(group))
        for i in group:
            offsets[i] = offset or 0.0
        if group[0]:
            found.append(_break(fingerprints, group[0], bridged=offset is not None))
    return [sorted(part) for part in parts], offsets, found


def _effect(
    logs: Sequence[float],
    dense_ms: Sequence[Mapping[str, float]],
    offsets: Sequence[float],
    before: Sequence[int],
    after: Sequence[int],
) -> float | None:
    """What a soft change did to the log of the latency; None where no dense baseline ran on both sides.

    It is NSA's own step, but no more of it than dense attention shows too.
    """
    names = {name for i in before for name in dense_ms[i]} & {name for i in after for name in dense_ms[i]}
    if not names:
        return None

    def level(side: Sequence[int], name: str) -> float:
        return statistics.median(math.log(dense_ms[i][name]) - offsets[i] for i in side if name in dense_ms[i])

    fastest = min(sorted(names), key=lambda name: level(after, name))
    dense = level(after, fastest) - level(before, fastest)
    ours = statistics.median(logs[i] for i in after) - statistics.median(logs[i] - offsets[i] for i in before)
    return min(max(ours, min(dense, 0.0)), max(dense, 0.0))


def _changes(logs: Sequence[float], smallest: float) -> list[Change]:
    """Of one part whose points are comparable."""
    starts = _without_small(logs, _level_starts(logs), math.log1p(smallest))
    levels = [statistics.median(logs[a:b]) for a, b in zip([0, *starts], [*starts, len(logs)], strict=True)]
    found = [
        Change(start, math.expm1(new - old), confirmed=True)
        for start, old, new in zip(starts, levels, levels[1:], strict=False)
    ]
    last = _unconfirmed(logs, starts, smallest)
    return found if last is None else [*found, Change(len(logs) - 1, last, confirmed=False)]


def _level_starts(logs: Sequence[float]) -> list[int]:
    """Where ruptures begins a new level, each at least two points long."""
    if len(logs) < 4:
        return []
    import ruptures  # takes a second, which no other command need wait for

    smooth = [logs[0], *map(statistics.median, zip(logs, logs[1:], logs[2:], strict=False)), logs[-1]]
    smooth[-1] = smooth[-2]  # one point alone is no level; _unconfirmed looks at it
    smooth[0] = smooth[1]
    penalty = _PENALTY * _sigma(logs) ** 2 * math.log(len(logs))
    signal = np.asarray(smooth).reshape(-1, 1)
    ends = ruptures.KernelCPD(kernel="linear", min_size=2).fit(signal).predict(pen=penalty)
    return [int(end) for end in ends[:-1]]


def _without_small(logs: Sequence[float], starts: list[int], smallest: float) -> list[int]:
    """Take out the smallest change until all are large enough; the levels beside it become one."""
    starts = list(starts)
    while starts:
        levels = [statistics.median(logs[a:b]) for a, b in zip([0, *starts], [*starts, len(logs)], strict=True)]
        sizes = [abs(new - old) for old, new in itertools.pairwise(levels)]
        if min(sizes) >= smallest:
            break
        del starts[sizes.index(min(sizes))]
    return starts


def _unconfirmed(logs: Sequence[float], starts: Sequence[int], smallest: float) -> float | None:
    """The change of the last point against its level, where it is large and rare enough; else None."""
    level = logs[starts[-1] if starts else 0 : -1]
    if len(level) < 2:
        return None
    step = logs[-1] - statistics.median(level)
    noise = _sigma(logs[:-1])  # without the step, which would hide itself among few points
    return math.expm1(step) if abs(step) >= max(math.log1p(smallest), _SIGMAS * noise) else None


def _sigma(logs: Sequence[float]) -> float:
    """Noise of one point, from the differences of neighbours, which a few changes of level do not widen."""
    steps = [abs(b - a) for a, b in itertools.pairwise(logs)]
    smallest = _SIGMA_OF_FEW if len(steps) < _FEW else _SMALLEST_SIGMA
    return max(smallest, 1.4826 * statistics.median(steps) / math.sqrt(2)) if steps else smallest
