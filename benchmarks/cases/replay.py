"""Samples that were taken by `benchmarks.timing`, shown to pytest-benchmark as if it had timed them.

Its rounds cannot tell a launch from a run, nor queue work ahead of a GPU. So the clock that it is given, through its
own `timer` option, stands still but for the samples: what it prints, compares and exports is ours.
"""

from __future__ import annotations

from collections.abc import Sequence

from pytest_benchmark.fixture import BenchmarkFixture


class SampleClock:
    """A timer in seconds that moves only when a sample is replayed."""

    def __init__(self) -> None:
        self._now_s = 0.0

    def now(self) -> float:
        """What pytest-benchmark reads before and after each round."""
        return self._now_s

    def replay(self, benchmark: BenchmarkFixture, samples_ms: Sequence[float]) -> None:
        """One round for each sample."""
        samples = iter(samples_ms)

        def advance() -> None:
            self._now_s += next(samples) / 1e3

        def rewind() -> None:
            self._now_s = 0.0  # so that each round is its sample to the last bit

        benchmark.pedantic(advance, setup=rewind, rounds=len(samples_ms))


CLOCK = SampleClock()
"""The timer of every case; pytest-benchmark takes it before a test begins."""
