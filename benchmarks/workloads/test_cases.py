"""Every case of this machine's suite as a pytest-benchmark test; its name is the test's.

The samples were taken by `benchmarks.timing.latency` and are shown to pytest-benchmark as if it had timed them: its
rounds cannot tell a launch from a run, nor queue work ahead of a GPU. So the clock that it is given, through its own
`timer` option, stands still but for the samples: what it prints, compares and exports is ours.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from benchmarks.cases.key import Key
from benchmarks.cases.outcome import CaseOutcome
from benchmarks.history import speedup
from benchmarks.runner import Measurement


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


@pytest.mark.benchmark(timer=CLOCK.now)
def test_case(key: Key, measure: Callable[[Key], Measurement], benchmark: BenchmarkFixture) -> None:
    """Measure it, then show its samples; a baseline that gives no figure is skipped, and NSA where it is not wrong."""
    measured = measure(key)
    record = measured.record
    if speedup.faults([record]):
        pytest.fail(f"{record.outcome.value}: {record.reason}", pytrace=False)
    if record.outcome is not CaseOutcome.PASSED or measured.raw is None:
        pytest.skip(f"{record.outcome.value}: {record.reason}")
    benchmark.group = key.case
    benchmark.extra_info.update(
        implementation=key.implementation,
        path=record.correctness.path if record.correctness else None,
        clock=record.clock,
        tokens_per_s=record.tokens_per_s,
        peak_mem_mib=record.peak_mem_mib,
        command=record.command,
    )
    CLOCK.replay(benchmark, measured.raw.samples_ms)
