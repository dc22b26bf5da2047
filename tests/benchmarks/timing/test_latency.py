"""Every sample is kept, warm-ups are not among them, and why the sampling ended is said, with what was not reached."""

from __future__ import annotations

import itertools
import math
import random
import statistics
import time
from types import SimpleNamespace

import pytest
import torch

from benchmarks.timing import host_clock, latency
from benchmarks.timing.device_clock import EventSampler, UnjoinedWorkError
from benchmarks.timing.latency import SamplingPlan, median_interval


def test_ends_with_enough_samples() -> None:
    calls = []
    timed = latency.measure(lambda: calls.append(1), "cpu", "warm", SamplingPlan(5, 0.0, 10.0, warmup_calls=3))
    assert len(calls) == 5 + timed.warmup_calls
    assert timed.warmup_calls >= 3
    assert (len(timed.samples_ms), timed.stop_reason, timed.unmet) == (5, "enough_samples", None)
    assert (timed.clock, timed.cache, timed.queued_ahead) == ("perf_counter", "warm", None)


def test_ends_at_the_wall_limit_with_one_sample_at_least() -> None:
    timed = latency.measure(lambda: time.sleep(0.02), "cpu", "warm", SamplingPlan(1000, 0.0, 0.01))
    assert (timed.stop_reason, timed.unmet) == ("wall_limit", "1 of 1000 samples")
    assert len(timed.samples_ms) == 1
    assert timed.warmup_calls == 1


def test_samples_cover_the_time_asked_for() -> None:
    timed = latency.measure(lambda: time.sleep(0.002), "cpu", "warm", SamplingPlan(1, 0.02, 10.0))
    assert sum(timed.samples_ms) >= 20
    assert all(sample >= 2 for sample in timed.samples_ms)


class Clock:
    """The host's time, which moves only where a test says so."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def wait(self, seconds: float) -> None:
        self.now_s += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    for module in (latency, host_clock):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: clock.now_s))
    monkeypatch.setattr(host_clock, "raw_s", lambda: clock.now_s)
    return clock


def test_what_is_made_ready_ahead_of_a_call_is_not_timed(clock: Clock) -> None:
    plan, make_ready = SamplingPlan(3, 0.0, 10.0), lambda: clock.wait(0.01)
    timed = latency.measure(lambda: clock.wait(0.002), "cpu", "warm", plan, before=make_ready)
    assert timed.samples_ms == pytest.approx((2.0,) * 3)


def test_warms_up_until_calls_no_longer_get_faster(clock: Clock) -> None:
    def call() -> None:
        clock.wait(next(seconds, 0.01))

    seconds = iter([0.04, 0.02, 0.01])
    timed = latency.measure(call, "cpu", "warm", SamplingPlan(3, 0.0, 10.0, warmup_calls=1))
    assert timed.warmup_calls == 1  # nothing to compare one call with
    seconds = iter([0.08, 0.04, 0.02, 0.01])
    timed = latency.measure(call, "cpu", "warm", SamplingPlan(3, 0.0, 10.0, warmup_calls=2))
    assert timed.warmup_calls >= 4
    assert max(timed.samples_ms) < 40


def test_latency_is_the_median() -> None:
    assert latency.Timing((9.0, 1.0, 2.0), "perf_counter", "warm", 0, "enough_samples").latency_ms == 2.0


@pytest.mark.parametrize("cache", ["cold", "tepid"])
def test_refuses_a_cache_state_it_cannot_make(cache: str) -> None:
    with pytest.raises(ValueError, match=f"cache must be .*; got '{cache}'"):
        latency.measure(lambda: None, "cpu", cache, SamplingPlan(1, 0.0, 1.0))


@pytest.mark.parametrize(
    ("samples", "plan", "missing"),
    [
        ([1.0] * 5, SamplingPlan(6, 0.0, 1.0), "5 of 6 samples"),
        ([1.0] * 6, SamplingPlan(6, 0.5, 1.0), "samples cover 0.006 of 0.5 s"),
        ([1.0] * 6, SamplingPlan(6, 0.0, 1.0, precision=0.01), None),
        (
            [1.0] * 5,
            SamplingPlan(5, 0.0, 1.0, precision=0.01),
            "5 samples, too few to say how well the median is known",
        ),
        (
            [0.9, 1.0, 1.0, 1.0, 1.0, 1.1],
            SamplingPlan(6, 0.0, 1.0, precision=0.01),
            "median known to 10.00%, wanted 1.00%",
        ),
        ([1.0] * 6, SamplingPlan(6, 0.0, 1.0), None),
    ],
)
def test_says_which_condition_is_not_met(samples: list[float], plan: SamplingPlan, missing: str | None) -> None:
    assert latency.unmet(samples, sum(samples) / 1e3, plan) == missing


def short_calls(clock: Clock, slowest_ms: float, between_s: float, wall_limit_s: float) -> latency.Timing:
    """Calls of 0.1 ms and of `slowest_ms`, in turn; 0.1 s are to be covered, and the median known to 2 %."""
    lengths_ms = itertools.cycle([0.1, slowest_ms])
    plan = SamplingPlan(6, 0.1, wall_limit_s, precision=0.02)
    return latency.measure(
        lambda: clock.wait(next(lengths_ms) / 1e3), "cpu", "warm", plan, before=lambda: clock.wait(between_s)
    )


def test_short_calls_that_are_spread_over_the_wall_limit_cover_time(clock: Clock) -> None:
    spread = short_calls(clock, slowest_ms=0.101, between_s=0.004, wall_limit_s=2.0)
    assert sum(spread.samples_ms) < 100
    assert len(spread.samples_ms) > 400  # it goes on to the wall limit all the same
    assert spread.unmet is None


def test_short_calls_whose_median_is_not_known_are_not_enough_at_the_wall_limit(clock: Clock) -> None:
    wide = short_calls(clock, slowest_ms=0.2, between_s=0.004, wall_limit_s=2.0)
    assert (wide.stop_reason, wide.unmet) == ("wall_limit", "median known to 33.33%, wanted 2.00%")


def test_samples_of_a_few_milliseconds_are_not_enough(clock: Clock) -> None:
    hurried = short_calls(clock, slowest_ms=0.101, between_s=0.0, wall_limit_s=0.005)
    assert hurried.unmet is not None
    assert hurried.unmet.startswith("samples cover 0.005")
    long = short_calls(clock, slowest_ms=0.101, between_s=0.0, wall_limit_s=2.0)
    assert sum(long.samples_ms) >= 100
    assert (long.stop_reason, long.unmet) == ("precise_enough", None)


def test_goes_on_until_the_median_is_known_well_enough() -> None:
    noise = random.Random(0)
    call = lambda: time.sleep(0.001 * noise.uniform(1, 1.5))  # noqa: E731
    precise = latency.measure(call, "cpu", "warm", SamplingPlan(6, 0.0, 20.0, precision=0.05))
    assert precise.stop_reason == "precise_enough"
    assert precise.interval_ms is not None
    low, high = precise.interval_ms
    assert (high - low) / 2 <= 0.05 * precise.latency_ms
    assert low <= precise.latency_ms <= high
    assert len(precise.samples_ms) > 6
    hurried = latency.measure(call, "cpu", "warm", SamplingPlan(6, 0.0, 0.02, precision=1e-6))
    assert hurried.stop_reason == "wall_limit"
    assert hurried.unmet is not None


@pytest.mark.parametrize("count", [6, 7, 15, 40, 499, 500, 501, 900])
def test_the_interval_holds_the_median_as_often_as_it_says(count: int) -> None:
    """Exactly, by the binomial distribution: the next narrower pair of order statistics would miss it too often."""
    samples = [float(i) for i in range(count)]
    interval = median_interval(samples)
    assert interval is not None
    rank = int(interval[0]) + 1
    assert interval[1] == count - rank

    def missed(rank: int) -> float:
        return 2 * sum(math.comb(count, i) for i in range(rank)) / 2**count

    assert missed(rank) <= 1 - latency.CONFIDENCE + 1e-3
    assert missed(rank + 1) > 1 - latency.CONFIDENCE


def test_the_interval_holds_for_a_skewed_distribution() -> None:
    noise = random.Random(1)
    held = 0
    for _ in range(400):
        interval = median_interval([noise.paretovariate(1.0) for _ in range(25)])
        assert interval is not None
        held += interval[0] <= 2.0 <= interval[1]  # the median of a Pareto distribution with alpha = 1
    assert held / 400 > 0.93


def test_five_samples_have_no_interval() -> None:
    assert median_interval([1.0] * 5) is None


def small_kernels(count: int, x: torch.Tensor) -> None:
    """Launching each takes the host longer than running it takes the GPU."""
    for _ in range(count):
        x.add_(1.0)


@pytest.mark.gpu
def test_launch_latency_stays_outside_and_is_a_figure_of_its_own() -> None:
    x = torch.zeros(64, device="cuda")
    timed = latency.measure(lambda: small_kernels(100, x), "cuda", "warm", SamplingPlan(20, 0.0, 5.0))
    assert timed.queued_ahead
    assert timed.end_to_end_ms is not None
    assert timed.latency_ms < 0.7 * timed.end_to_end_ms
    sampler = EventSampler(lambda: small_kernels(100, x), lambda: None, cold=False)
    gaps = statistics.median(sampler.plain_sample() for _ in range(20))
    assert timed.latency_ms < gaps  # without the spin the host's gaps are inside


@pytest.mark.gpu
def test_a_call_that_waits_for_the_device_is_said_to() -> None:
    x = torch.zeros(64, device="cuda")
    timed = latency.measure(lambda: float(x.sum()), "cuda", "warm", SamplingPlan(5, 0.0, 5.0))
    assert timed.queued_ahead is False


@pytest.mark.gpu
def test_cold_is_slower_than_warm_for_what_fits_in_l2() -> None:
    l2_bytes = torch.cuda.get_device_properties(0).L2_cache_size
    x = torch.ones(l2_bytes // 3 // 4, device="cuda")  # float32: a third of L2
    cold, warm = (
        latency.measure(lambda: x.sum(), "cuda", cache, SamplingPlan(50, 0.0, 5.0)).latency_ms
        for cache in ("cold", "warm")
    )
    assert cold > 1.05 * warm


@pytest.mark.gpu
def test_work_on_a_stream_that_nobody_waits_for_is_refused() -> None:
    x, side = torch.randn(4096, 4096, device="cuda"), torch.cuda.Stream()

    def elsewhere() -> None:
        with torch.cuda.stream(side):
            x @ x

    with pytest.raises(UnjoinedWorkError, match="another stream"):
        latency.measure(elsewhere, "cuda", "warm", SamplingPlan(5, 0.0, 5.0))

    def joined() -> None:
        side.wait_stream(torch.cuda.current_stream())
        elsewhere()
        torch.cuda.current_stream().wait_stream(side)

    assert latency.measure(joined, "cuda", "warm", SamplingPlan(5, 0.0, 5.0)).latency_ms > 0.1
