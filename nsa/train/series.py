"""Is a series of figures still the same at its end? Rank statistics: they ask nothing of the noise's shape."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

MAX_POINTS = 240
"""A longer series is thinned to medians of equal stretches, so that all pairs stay few."""


@dataclass(frozen=True)
class ChangePoint:
    """Where a series splits best into two levels."""

    index: int
    """First point of the second level."""
    before: float
    """Median of the points before it."""
    after: float
    p_value: float
    """How often a series without a change splits as well as this: Pettitt's (1979) approximation."""

    @property
    def relative(self) -> float:
        """The step over the first level; -0.1 is a fall of 10 %. Infinite where the first level is 0."""
        return (self.after - self.before) / abs(self.before) if self.before else math.copysign(math.inf, self.after)


def change_point(series: Sequence[float]) -> ChangePoint | None:
    """The best split, of any quality; None for fewer than 4 points. Also a slow drift splits, near its middle."""
    n = len(series)
    if n < 4:
        return None
    ranks, total, best, at = _ranks(series), 0.0, 0.0, 1
    for t in range(1, n):
        total += ranks[t - 1]
        u = abs(2 * total - t * (n + 1))
        if u > best:
            best, at = u, t
    p_value = min(1.0, 2 * math.exp(-6 * best**2 / (n**3 + n**2)))
    return ChangePoint(at, statistics.median(series[:at]), statistics.median(series[at:]), p_value)


def slope(series: Sequence[float]) -> float | None:
    """Theil-Sen: the median rise per point over all pairs, which a third of wild points cannot move; None below 2."""
    thinned, stride = thin(series)
    if len(thinned) < 2:
        return None
    rises = [(b - a) / (j - i) for i, a in enumerate(thinned) for j, b in enumerate(thinned[i + 1 :], i + 1)]
    return statistics.median(rises) / stride


def steady_slope(series: Sequence[float]) -> float | None:
    """The lesser slope of the last two quarters: a level that is reached once lifts one of them only.

    What begins to rise by the middle of the series is seen. None below 7 points.
    """
    last = series[len(series) // 2 :]
    middle = len(last) // 2
    slopes = slope(last[:middle]), slope(last[middle:])
    return None if slopes[0] is None or slopes[1] is None else min(slopes[0], slopes[1])


def fall(series: Sequence[float], p_value: float = 1e-3) -> float | None:
    """Share of its level that the series lost for good, at once or slowly; 0 where chance explains it.

    None where the series is so short that chance could explain any fall: below 22 points for the default.
    """
    thinned, _ = thin(series)
    n, split = len(thinned), len(thinned) // 2
    found = change_point(thinned)
    if found is None or 2 * math.exp(-6 * (split * (n - split)) ** 2 / (n**3 + n**2)) > p_value:
        return None
    if found.p_value > p_value or not found.before:
        return 0.0
    drift = (slope(thinned) or 0.0) * len(thinned) / found.before  # a slow fall is twice the step between halves
    return max(-found.relative, -drift, 0.0)


def thin(series: Sequence[float]) -> tuple[list[float], int]:
    """At most MAX_POINTS medians of stretches of equal length, and that length; a shorter rest is left out."""
    stride = -(-len(series) // MAX_POINTS) or 1
    whole = len(series) - len(series) % stride
    return [statistics.median(series[i : i + stride]) for i in range(0, whole, stride)], stride


def _ranks(series: Sequence[float]) -> list[float]:
    """1 for the least; equal values share the mean of their ranks."""
    order = sorted(range(len(series)), key=series.__getitem__)
    ranks = [0.0] * len(series)
    first = 0
    while first < len(order):
        last = first
        while last + 1 < len(order) and series[order[last + 1]] == series[order[first]]:
            last += 1
        for i in order[first : last + 1]:
            ranks[i] = (first + last) / 2 + 1
        first = last + 1
    return ranks
