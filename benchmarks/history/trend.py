"""Where a series of figures over the runs went to another level, and which level it has now.

Each point is the median of one process. Runs that cannot be compared (another driver, another harness) are followed
apart, also where two hosts take turns. In each part ruptures finds the levels of log(latency) that explain it best at a
price per level, after single points that nothing follows are smoothed away; then changes too small to matter are
dropped. A new level counts once a second run has seen it: a change of the last point alone is unconfirmed and asks for
another run. A slow drift comes out as steps, each as large as the smallest change that is reported.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.history.store import Point
from harness import fingerprint
from harness.fingerprint import Fingerprint

SMALLEST_CHANGE = 0.03
"""Of a change that is reported; runs of different days differ more than processes of one hour."""
_SIGMAS = 4.0  # by how much the last point must leave its level to be asked about
_PENALTY = 3.0  # of one more level, in variances times log(points): ruptures' advice for a mean that jumps
_SMALLEST_SIGMA = 0.002


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
    """From here on the points cannot be compared with those before."""

    index: int
    differences: tuple[str, ...]
    """"driver 555 -> 560"."""


@dataclass(frozen=True)
class Trend:
    """A series of one case on one machine."""

    changes: tuple[Change, ...]
    breaks: tuple[Break, ...]
    level_ms: float
    """Now: the median since the last confirmed change or break."""
    level_begin: int
    """The first point of that level."""

    @property
    def confirmation_wanted(self) -> bool:
        """Whether another run must say if the last point is a change."""
        return bool(self.changes) and not self.changes[-1].confirmed


def of_points(points: Sequence[Point], smallest: float = SMALLEST_CHANGE) -> Trend:
    """The trend of one series, oldest point first. ValueError where it is empty."""
    return of_series([point.latency_ms for point in points], [point.fingerprint for point in points], smallest)


def of_series(
    latencies_ms: Sequence[float], fingerprints: Sequence[Fingerprint], smallest: float = SMALLEST_CHANGE
) -> Trend:
    """The same from columns of equal length."""
    if not latencies_ms:
        raise ValueError("latencies_ms must hold at least one point; got none")
    last = len(latencies_ms) - 1
    changes: list[Change] = []
    for part in _comparable(fingerprints):
        found = _changes([latencies_ms[i] for i in part], smallest)
        placed = [dataclasses.replace(change, index=part[change.index]) for change in found]
        changes += [change for change in placed if change.confirmed or change.index == last]
        if part[-1] == last:
            confirmed = [change.index for change in placed if change.confirmed]
            level_begin = max([part[0], *confirmed])
            unconfirmed = len(placed) > len(confirmed)
            level = [latencies_ms[i] for i in part if i >= level_begin and not (unconfirmed and i == last)]
    changes.sort(key=lambda change: change.index)
    return Trend(tuple(changes), tuple(breaks(fingerprints)), statistics.median(level), level_begin)


def breaks(fingerprints: Sequence[Fingerprint]) -> list[Break]:
    """Where conditions begin that no run had before, and how they differ from those of the run before."""
    begins = [part[0] for part in _comparable(fingerprints)][1:]
    return [Break(i, tuple(fingerprint.differences(fingerprints[i - 1], fingerprints[i]))) for i in begins]


def _comparable(fingerprints: Sequence[Fingerprint]) -> list[list[int]]:
    """Indices of the runs that share their conditions, in the order in which these began."""
    parts: dict[tuple[object, ...], list[int]] = {}
    for i, one in enumerate(fingerprints):
        parts.setdefault(one.conditions, []).append(i)
    return list(parts.values())


def _changes(latencies_ms: Sequence[float], smallest: float) -> list[Change]:
    """Of one part whose points are comparable."""
    logs = [math.log(latency_ms) for latency_ms in latencies_ms]
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
    return math.expm1(step) if abs(step) >= max(math.log1p(smallest), _SIGMAS * _sigma(logs)) else None


def _sigma(logs: Sequence[float]) -> float:
    """Noise of one point, from the differences of neighbours, which a few changes of level do not widen."""
    steps = [abs(b - a) for a, b in itertools.pairwise(logs)]
    return max(_SMALLEST_SIGMA, 1.4826 * statistics.median(steps) / math.sqrt(2))
