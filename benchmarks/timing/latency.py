"""The one timing primitive: warm up, then sample until the median is known well enough or the wall limit is reached.

On the CPU a sample is wall time. On a GPU it is the device's own time between two events (`device_clock`); what a
caller waits for, launch included, is a second figure taken apart. Samples beside which the GPU lowered its clocks are
kept and tagged.
"""

from __future__ import annotations

import dataclasses
import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache as remember

from benchmarks.timing import clocks, device_clock, host_clock
from benchmarks.timing.clocks import Clocks

CONFIDENCE = 0.95
"""Of the median's interval."""
_EXACT_COINS = 500  # beyond, the binomial is as good as normal
_SETTLED = 0.8  # a warm-up call that takes less than this share of the one before shows that something was still made
_MOST_WARMUPS = 10
_END_TO_END_SHARE = 0.25  # of the wall limit
STEPS_OF_A_LOOP = 4
"""How many steps one sample of a loop times, one after the other."""


@dataclass(frozen=True)
class SamplingPlan:
    """How long to measure."""

    min_samples: int
    """The sampling goes in rounds of this many."""
    min_time_s: float
    """Time to be covered by samples, beside their number, so that slow changes (clocks, other load) are among them."""
    wall_limit_s: float
    """After this the sampling ends, but never before the first sample. The samples then cover the time over which they
    were spread: between short calls, changing inputs and flushing caches takes longer than the calls."""
    warmup_calls: int = 2
    """Calls before the first sample, more while they still get faster; after the wall limit no further ones."""
    precision: float | None = None
    """Half the width of the median's interval over the median, that is enough; None: the number of samples is."""
    end_to_end: bool = True
    """Whether the latency from the call to the end of a GPU's work is measured too, which takes as many samples."""
    clocks: bool = True
    """Whether the GPU's clocks are read beside the samples, which takes the host longer than a short sample."""


@dataclass(frozen=True)
class Timing:
    """Every sample of one measurement."""

    samples_ms: tuple[float, ...]
    clock: str
    """"cuda_event" or "perf_counter"."""
    cache: str
    warmup_calls: int
    stop_reason: str
    """"precise_enough", "enough_samples" or "wall_limit"."""
    unmet: str | None = None
    """What the plan wanted and did not get; None where it got everything."""
    end_to_end_ms: float | None = None
    """Median wall time of a call and of waiting for the device; None where the plan leaves it out."""
    queued_ahead: bool | None = None
    """Whether no sample holds launch latency; None on the CPU, and of a loop, which is timed with it."""
    clocks: Clocks | None = None
    later_calls: int = 0
    """Made after the last sample, each as long as a sample: to tell a slow host from work that nobody waits for."""

    @property
    def latency_ms(self) -> float:
        """The median."""
        return statistics.median(self.samples_ms)

    @property
    def interval_ms(self) -> tuple[float, float] | None:
        """Where the median lies with `CONFIDENCE`; None for too few samples."""
        return median_interval(self.samples_ms)


def median_interval(samples: Sequence[float]) -> tuple[float, float] | None:
    """Two order statistics that hold the median with at least `CONFIDENCE`, whatever the distribution.

    How many of n samples lie below the median is binomial (n, 1/2), so that the k-th smallest and the k-th largest
    miss it with probability 2 P(fewer than k below). None for fewer than six samples, which cannot be so sure.
    """
    rank = _rank(len(samples))
    if rank == 0:
        return None
    ordered = sorted(samples)
    return ordered[rank - 1], ordered[-rank]


@remember
def _rank(count: int) -> int:
    """The largest k with 2 P(fewer than k of `count` fair coins) <= 1 - CONFIDENCE; 0 where there is none."""
    if count > _EXACT_COINS:
        return math.floor((count + 1 - statistics.NormalDist().inv_cdf((1 + CONFIDENCE) / 2) * math.sqrt(count)) / 2)
    allowed = (1 - CONFIDENCE) / 2 * 2**count
    rank, below, ways = 0, 0, 1  # `ways` to have exactly `rank` heads, `below` to have fewer
    while below + ways <= allowed:
        below += ways
        ways = ways * (count - rank) // (rank + 1)
        rank += 1
    return rank


def measure(
    call: Callable[[], object], device: str, cache: str, plan: SamplingPlan, before: Callable[[], object] | None = None
) -> Timing:
    """Time one call on "cuda" or "cpu", with the cache "cold" or "warm"; `before` runs ahead of each, not timed.

    Raises ValueError for a cache that this device cannot have, `device_clock.UnjoinedWorkError` where the device still
    works after the call's end, `verify.IncorrectError` where the timer was replaced or L2 keeps lines.
    """
    if cache not in ("cold", "warm"):
        raise ValueError(f"cache must be 'cold' or 'warm'; got {cache!r}")
    if cache == "cold" and device == "cpu":
        raise ValueError("cache must be 'warm' on the CPU, whose caches are not flushed; got 'cold'")
    prepare = before or _nothing
    with _old_objects_spared():
        if device == "cuda":
            return _on_device(call, cache, plan, prepare)
        timing = _by_wall_clock(call, plan, prepare)
    return dataclasses.replace(timing, end_to_end_ms=statistics.median(timing.samples_ms))


def of_host(call: Callable[[], object], device: str, plan: SamplingPlan, before: Callable[[], object]) -> Timing:
    """Time a call until it returns: on a GPU, whose earlier work is waited for, until everything is launched.

    On the CPU, which launches nothing, the call returns when its work is done. Raises as `measure` does.
    """

    def ready() -> None:
        before()
        if device == "cuda":
            device_clock.wait()

    with _old_objects_spared():
        return _by_wall_clock(call, plan, ready)


def of_loop(call: Callable[[], object], plan: SamplingPlan, before: Callable[[], object]) -> Timing:
    """Time a step of a loop on the GPU: steps follow one another, the host goes as far ahead as it can, and whichever
    of the two takes longer sets the pace. The time of the GPU's work alone would leave out a host that is slower.

    Raises as `measure` does.
    """

    def steps() -> None:
        for _ in range(STEPS_OF_A_LOOP):
            call()

    with _old_objects_spared():
        sampler = device_clock.EventSampler(steps, before, cold=False)
        warmups = _warm_up(sampler.plain_sample, plan)
        timing = _of_device(sampler, sampler.plain_sample, "warm", warmups, plan, STEPS_OF_A_LOOP)
        step = device_clock.EventSampler(call, before, cold=False)
        end_to_end_ms = _end_to_end_ms(step, plan) if plan.end_to_end else None
    samples_ms = tuple(taken / STEPS_OF_A_LOOP for taken in timing.samples_ms)
    return dataclasses.replace(timing, samples_ms=samples_ms, end_to_end_ms=end_to_end_ms)


def _by_wall_clock(call: Callable[[], object], plan: SamplingPlan, before: Callable[[], object]) -> Timing:
    """Samples from a call until it returns."""
    sampler = host_clock.WallSampler(call, before)
    warmups = _warm_up(sampler.sample, plan)
    samples, stop_reason, missing = _samples(sampler.sample, plan)
    sampler.require_same_time(samples)
    return Timing(samples, "perf_counter", "warm", warmups, stop_reason, missing)


def _on_device(call: Callable[[], object], cache: str, plan: SamplingPlan, before: Callable[[], object]) -> Timing:
    sampler = device_clock.EventSampler(call, before, cold=cache == "cold")
    warmups = _warm_up(sampler.plain_sample, plan)
    sampler.queue_ahead()
    timing = _of_device(sampler, sampler.sample, cache, warmups, plan)
    end_to_end_ms = _end_to_end_ms(sampler, plan) if plan.end_to_end else None
    return dataclasses.replace(timing, end_to_end_ms=end_to_end_ms, queued_ahead=sampler.queued_ahead)


def _of_device(
    sampler: device_clock.EventSampler,
    take: Callable[[], float],
    cache: str,
    warmups: int,
    plan: SamplingPlan,
    steps: int = 1,
) -> Timing:
    """Samples of so many steps each that `take` takes with the sampler, with the clocks beside them."""
    clock_monitor = clocks.monitor() if plan.clocks else None

    def sample() -> float:
        taken = take()
        if clock_monitor is not None:
            clock_monitor.observe()
        return taken

    samples, stop_reason, missing = _samples(sample, plan)
    calls = sampler.calls
    sampler.require_joined(statistics.median(samples) / steps)
    return Timing(
        samples,
        "cuda_event",
        cache,
        warmups,
        stop_reason,
        missing,
        clocks=clock_monitor.clocks() if clock_monitor else None,
        later_calls=sampler.calls - calls,
    )


def _end_to_end_ms(sampler: device_clock.EventSampler, plan: SamplingPlan) -> float:
    share = SamplingPlan(plan.min_samples, 0.0, plan.wall_limit_s * _END_TO_END_SHARE)
    samples, _, _ = _samples(sampler.end_to_end_sample, share)
    return statistics.median(samples)


def seconds(call: Callable[[], object], device: str) -> float:
    """Wall time of one call, the device's work included: of the first one, what is compiled and tuned too."""
    begin = time.perf_counter()
    call()
    if device == "cuda":
        device_clock.wait()
    return time.perf_counter() - begin


def _warm_up(sample: Callable[[], float], plan: SamplingPlan) -> int:
    """How many calls were made before the first sample."""
    begin, taken = time.perf_counter(), list[float]()
    while not _is_warm(taken, plan):
        taken.append(sample())
        if time.perf_counter() - begin > plan.wall_limit_s:
            break
    return len(taken)


def _is_warm(taken: Sequence[float], plan: SamplingPlan) -> bool:
    if len(taken) < plan.warmup_calls:
        return False
    faster = len(taken) > 1 and taken[-1] < _SETTLED * taken[-2]
    return not faster or len(taken) >= _MOST_WARMUPS


def _samples(sample: Callable[[], float], plan: SamplingPlan) -> tuple[tuple[float, ...], str, str | None]:
    """(samples, why they ended, what was not reached by then)."""
    samples: list[float] = []
    begin = time.perf_counter()
    while True:
        samples.append(sample())
        spread_s = time.perf_counter() - begin
        late = spread_s >= plan.wall_limit_s
        if late or len(samples) % plan.min_samples == 0:
            missing = unmet(samples, spread_s if late else sum(samples) / 1e3, plan)
            if late:
                return tuple(samples), "wall_limit", missing
            if missing is None:
                return tuple(samples), "enough_samples" if plan.precision is None else "precise_enough", None


def unmet(samples: Sequence[float], covered_s: float, plan: SamplingPlan) -> str | None:
    """The first condition of the plan that these samples [ms] do not meet, with figures; None where they meet all."""
    if len(samples) < plan.min_samples:
        return f"{len(samples)} of {plan.min_samples} samples"
    if covered_s < plan.min_time_s:
        return f"samples cover {covered_s:.3g} of {plan.min_time_s:g} s"
    if plan.precision is None:
        return None
    interval = median_interval(samples)
    if interval is None:
        return f"{len(samples)} samples, too few to say how well the median is known"
    reached = (interval[1] - interval[0]) / 2 / statistics.median(samples)
    return None if reached <= plan.precision else f"median known to {reached:.2%}, wanted {plan.precision:.2%}"


@contextmanager
def _old_objects_spared() -> Iterator[None]:
    """Python's collector would otherwise walk through every object of PyTorch's in the middle of a sample."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _nothing() -> None:
    """What runs ahead of a call where nothing need be done."""
