"""Monitors of a training run: pure functions of its metrics, each returning None or an Alarm that says why.

They take plain numbers, those that are logged anyway, and wait for no GPU. The second half answers whether a series of
numbers is still the same at its end, by rank statistics, which assume nothing about the distribution of the noise.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from nsa.config import BRANCHES

FALSE_ALARM = 1e-6
"""How often at most a statistical test may raise an alarm in a healthy run."""


@dataclass(frozen=True)
class Alarm:
    """Something that no healthy run shows."""

    monitor: str
    """Its name: "too_good", "non_finite", ..."""
    why: str
    """The figure, what was allowed, and what it usually means."""


def loss_floor_nats(vocab_size: int, num_tokens: int) -> float:
    """The mean loss below which no honest model gets on uniformly random tokens that it has not seen before.

    The product of V·p over the targets is a martingale of mean 1 whatever the model predicts from the past, so that by
    Markov's inequality the mean of N losses lies below ln V - ln(1/FALSE_ALARM)/N with probability FALSE_ALARM at most.
    """
    if vocab_size < 1 or num_tokens < 1:
        raise ValueError(f"vocab_size and num_tokens must be at least 1; got {vocab_size} and {num_tokens}")
    return math.log(vocab_size) - math.log(1 / FALSE_ALARM) / num_tokens


def too_good(mean_loss_nats: float, vocab_size: int, num_tokens: int) -> Alarm | None:
    """On fresh uniformly random tokens: the mean loss of `num_tokens` targets is below their entropy."""
    floor = loss_floor_nats(vocab_size, num_tokens)
    if mean_loss_nats >= floor or math.isnan(mean_loss_nats):
        return None
    found = f"{mean_loss_nats:.4f} nats on {num_tokens} random tokens, whose entropy allows {floor:.4f}"
    return Alarm("too_good", f"{found}: the model sees its targets")


def non_finite(figures: Mapping[str, float | None]) -> Alarm | None:
    """NaN or infinity among losses and gradient norms by name; None is unknown and no alarm."""
    found = [name for name, value in figures.items() if value is not None and not math.isfinite(value)]
    return Alarm("non_finite", f"NaN or infinity in {_few(found)}") if found else None


def silence(gap_s: float, steps_s: Sequence[float], *, floor_s: float = 30.0, times: float = 10.0) -> Alarm | None:
    """No heartbeat for longer than `times` the median step and `floor_s`; before the first step use a floor alone."""
    allowed = max(floor_s, times * statistics.median(steps_s)) if steps_s else floor_s
    if gap_s <= allowed:
        return None
    return Alarm("silence", f"no heartbeat for {gap_s:.1f} s; {allowed:.1f} s are allowed at this run's own pace")


def throughput_drift(tokens_per_s: Sequence[float], *, tolerance: float = 0.1) -> Alarm | None:
    """The throughput has fallen for good by more than `tolerance`, at once or slowly; leave warm-up steps out."""
    fell = fall(tokens_per_s)
    if fell is None or fell <= tolerance:
        return None
    quarter = -(-len(tokens_per_s) // 4)
    first, last = statistics.median(tokens_per_s[:quarter]), statistics.median(tokens_per_s[-quarter:])
    levels = f"from {first:.4g} to {last:.4g} tokens/s over {len(tokens_per_s)} steps"
    return Alarm("throughput_drift", f"fell by {fell:.0%}, {levels}; {tolerance:.0%} is allowed")


def memory_slope(memory_mib: Sequence[float], *, limit_mib_per_step: float, grown_mib: float = 16.0) -> Alarm | None:
    """Memory after each step rises at the end of the series: its slope there, and the growth that it makes.

    A level that is reached once (a longer batch, the allocator's cache) is no slope. Leave warm-up out.
    """
    per_step = steady_slope(memory_mib)
    if per_step is None or per_step <= limit_mib_per_step or per_step * len(memory_mib) / 2 <= grown_mib:
        return None
    found = f"{per_step:.3g} MiB per step at the end of {len(memory_mib)} steps; {limit_mib_per_step:.3g} is allowed"
    return Alarm("memory_slope", f"memory grows {found}: something is kept from each step")


def gates_collapsed(
    entropy_nats: Sequence[float],
    max_share: Sequence[float],
    *,
    least_entropy_nats: float = 0.5,
    most_share: float = 0.9,
    most_heads: float = 0.1,
) -> Alarm | None:
    """Means over rows, one per head, of the entropy of the three shares and of the largest share.

    A head has collapsed where one branch has won; more of them than `most_heads`, a share of all, are a fault.
    """
    heads = list(zip(entropy_nats, max_share, strict=True))
    found = [head for head in heads if head[0] < least_entropy_nats or head[1] > most_share]
    if len(found) <= most_heads * len(heads):
        return None
    entropy, share = found[0]
    return Alarm(
        "gates_collapsed",
        f"one branch is left in {len(found)} of {len(heads)} heads; the first has {entropy:.3f} nats of entropy and a "
        f"largest share of {share:.3f}",
    )


def gates_uniform(entropy_nats: float, *, tolerance_nats: float = 1e-5) -> Alarm | None:
    """The mean entropy is ln 3 exactly: gates that were never trained. Ask after the warm-up, not at step 0."""
    if abs(entropy_nats - math.log(len(BRANCHES))) > tolerance_nats:
        return None
    return Alarm(
        "gates_uniform", f"entropy {entropy_nats:.6f} nats is ln 3: the gates take every branch alike, untrained"
    )


def selection_at_maximum(share: float, expected_share: float, *, tolerance: float = 0.01) -> Alarm | None:
    """Share of rows with as many distinct blocks as fit, against the share that the lengths dictate.

    Rows with at least n blocks behind them take n, the others all: fewer at the maximum lost blocks, more hold
    duplicates or padding that was counted.
    """
    if abs(share - expected_share) <= tolerance:
        return None
    cause = "blocks were lost" if share < expected_share else "duplicates or padding were counted"
    found = f"{share:.1%} of the rows hold the most blocks where the lengths dictate {expected_share:.1%}"
    return Alarm("selection_at_maximum", f"{found}: {cause}")


def missing_gradients(norms: Mapping[str, float | None]) -> Alarm | None:
    """Parameters by name whose gradient after a backward pass is None or exactly zero: nothing trains them."""
    found = [name for name, norm in norms.items() if norm is None or norm == 0]
    return Alarm("missing_gradients", f"no gradient reaches {_few(found)}") if found else None


def _few(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


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
