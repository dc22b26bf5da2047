"""Wilcoxon's signed-rank test, the Hodges-Lehmann estimate with its interval, and Benjamini and Hochberg's procedure.

Each pair of processes gives one log-ratio. If both sides are the same code, exchanging them changes nothing, so that
each log-ratio is as likely x as -x, whatever the neighbours of the machine do: of all 2^n ways to sign the n ratios,
none is more likely than another. The signed-rank test counts the ways that lie as far to one side as what was seen
(Wilcoxon, Biometrics Bulletin 1, 1945), and the means of all pairs of ratios give the interval that belongs to it
(Tukey; Hodges and Lehmann 1963). Both hold for any number of ratios. A bootstrap of a dozen values does not: it cannot
see further than the values it has, and its intervals are too narrow by an unknown amount. `scipy.stats.wilcoxon` is
exact only where no ratio is 0 and no two are equal, and has no interval.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache


@dataclass(frozen=True)
class Estimate:
    """The Hodges-Lehmann estimate (the median of the means of all pairs), and the interval that holds the true one."""

    value: float
    low: float
    high: float


def hodges_lehmann(values: Sequence[float], alpha: float) -> Estimate:
    """The interval misses with probability alpha at most. ValueError where the values are too few for that."""
    left_out = _critical(len(values), alpha)
    if left_out is None:
        raise ValueError(f"values must be enough for an interval with alpha {alpha}; got {len(values)}")
    means = _walsh(values)
    return Estimate(statistics.median(means), means[left_out], means[-1 - left_out])


def pseudomedian(values: Sequence[float]) -> float:
    """The Hodges-Lehmann estimate alone: nearly as sharp as the mean, and a quarter of the values may be outliers."""
    return statistics.median(_walsh(values))


def p_value(values: Sequence[float]) -> float:
    """Of the signed-rank test against a centre of 0, two-sided, exact. Values of 0 speak for neither side."""
    if not values:
        return 1.0
    means = _walsh(values)  # how many are above 0 is the sum of the ranks of the values above 0 (Tukey)
    zeros = sum(mean == 0 for mean in means) / 2
    above = sum(mean > 0 for mean in means) + zeros
    return min(1.0, 2 * _tail(len(values), math.ceil(min(above, len(means) - above))))


def enough(count: int, alpha: float) -> bool:
    """Whether so many values can have a p-value of alpha or less."""
    return _critical(count, alpha) is not None


def benjamini_hochberg(p_values: Sequence[float], rate: float) -> list[bool]:
    """Which to call discoveries so that at most this share of them is false on average (Benjamini, Hochberg 1995)."""
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    last = max((rank for rank, i in enumerate(order, 1) if p_values[i] <= rate * rank / len(order)), default=0)
    discovered = set(order[:last])
    return [i in discovered for i in range(len(p_values))]


def _walsh(values: Sequence[float]) -> list[float]:
    """The means of all pairs, each value with itself too, ascending."""
    return sorted((x + y) / 2 for i, x in enumerate(values) for y in values[i:])


def _critical(count: int, alpha: float) -> int | None:
    """The largest rank sum whose two-sided probability is alpha at most; None where even 0 is more likely."""
    fitting = [rank_sum for rank_sum in range(count * (count + 1) // 4 + 1) if 2 * _tail(count, rank_sum) <= alpha]
    return fitting[-1] if fitting else None


@cache
def _tail(count: int, rank_sum: int) -> float:
    """Probability that the ranks 1 to count, each with a fair coin, sum up to this or less."""
    return sum(_ways(count)[: rank_sum + 1]) / 2**count


@cache
def _ways(count: int) -> tuple[int, ...]:
    """In how many ways ranks out of 1 to count sum up to 0, 1, 2, ..."""
    ways = [1]
    for rank in range(1, count + 1):
        longer = [*ways, *[0] * rank]
        for rank_sum, number in enumerate(ways):
            longer[rank_sum + rank] += number
        ways = longer
    return tuple(ways)
