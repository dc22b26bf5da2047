"""The one timing primitive: warm up, then sample until there are enough or the wall limit is reached.

On a GPU a sample is the time between two CUDA events around the call, so it holds the gaps between kernels where the
host cannot keep ahead. Cold: a buffer larger than L2 is overwritten before each sample. On the CPU it is wall time.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Plan:
    """How long to measure."""

    min_samples: int
    min_time_s: float
    """Time to be covered by samples, beside their number."""
    wall_limit_s: float
    """After this the sampling ends, but never before the first sample."""
    warmup_calls: int = 2
    """Calls before the first sample; after the wall limit no further ones."""


@dataclass(frozen=True)
class Timing:
    """Every sample of one measurement."""

    samples_ms: tuple[float, ...]
    clock: str
    cache: str
    warmup_calls: int
    stop_reason: str

    @property
    def latency_ms(self) -> float:
        """The median."""
        return statistics.median(self.samples_ms)


def measure(call: Callable[[], object], device: str, cache: str, plan: Plan) -> Timing:
    """Time one call on "cuda" or "cpu", with the cache "cold" or "warm"."""
    if cache not in ("cold", "warm"):
        raise ValueError(f"cache must be 'cold' or 'warm'; got {cache!r}")
    if cache == "cold" and device == "cpu":
        raise ValueError("cache must be 'warm' on the CPU, whose caches are not flushed; got 'cold'")
    sample = _event_sampler(call, cache) if device == "cuda" else _wall_sampler(call)
    begin = time.perf_counter()
    warmups = _warm_up(sample, begin, plan)
    samples: list[float] = []
    begin = time.perf_counter()
    stop_reason = "wall_limit"
    while not samples or time.perf_counter() - begin < plan.wall_limit_s:
        samples.append(sample())
        if len(samples) >= plan.min_samples and sum(samples) >= plan.min_time_s * 1e3:
            stop_reason = "enough_samples"
            break
    clock = "cuda_event" if device == "cuda" else "perf_counter"
    return Timing(tuple(samples), clock, cache, warmups, stop_reason)


def _warm_up(sample: Callable[[], float], begin: float, plan: Plan) -> int:
    for done in range(plan.warmup_calls):
        if done and time.perf_counter() - begin > plan.wall_limit_s:
            return done
        sample()
    return plan.warmup_calls


def _wall_sampler(call: Callable[[], object]) -> Callable[[], float]:
    def sample() -> float:
        begin = time.perf_counter()
        call()
        return (time.perf_counter() - begin) * 1e3

    return sample


def _event_sampler(call: Callable[[], object], cache: str) -> Callable[[], float]:
    l2_bytes = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
    flush = torch.empty(2 * l2_bytes, dtype=torch.int8, device="cuda") if cache == "cold" else None

    def sample() -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        if flush is not None:
            flush.zero_()
        begin.record()
        call()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end))

    return sample
