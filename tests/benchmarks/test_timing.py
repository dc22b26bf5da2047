"""Every sample is kept, warm-ups are not among them, and why the sampling ended is said."""

from __future__ import annotations

import time

import pytest

from benchmarks import timing
from benchmarks.timing import Plan


def test_ends_with_enough_samples() -> None:
    calls = []
    timed = timing.measure(lambda: calls.append(1), "cpu", "warm", Plan(5, 0.0, 10.0, warmup_calls=3))
    assert len(calls) == 8
    assert (len(timed.samples_ms), timed.warmup_calls, timed.stop_reason) == (5, 3, "enough_samples")
    assert (timed.clock, timed.cache) == ("perf_counter", "warm")


def test_ends_at_the_wall_limit_with_one_sample_at_least() -> None:
    timed = timing.measure(lambda: time.sleep(0.02), "cpu", "warm", Plan(1000, 0.0, 0.01))
    assert timed.stop_reason == "wall_limit"
    assert len(timed.samples_ms) == 1
    assert timed.warmup_calls == 1


def test_samples_cover_the_time_asked_for() -> None:
    timed = timing.measure(lambda: time.sleep(0.002), "cpu", "warm", Plan(1, 0.02, 10.0))
    assert sum(timed.samples_ms) >= 20
    assert all(sample >= 2 for sample in timed.samples_ms)


def test_latency_is_the_median() -> None:
    assert timing.Timing((9.0, 1.0, 2.0), "perf_counter", "warm", 0, "enough_samples").latency_ms == 2.0


@pytest.mark.parametrize("cache", ["cold", "tepid"])
def test_refuses_a_cache_state_it_cannot_make(cache: str) -> None:
    with pytest.raises(ValueError, match=f"cache must be .*; got '{cache}'"):
        timing.measure(lambda: None, "cpu", cache, Plan(1, 0.0, 1.0))
