"""Every case of this machine's suite; its name is the test's."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from benchmarks import verdict
from benchmarks.cases.replay import CLOCK
from benchmarks.records import Key, Outcome
from benchmarks.runner import Measurement


@pytest.mark.benchmark(timer=CLOCK.now)
def test_case(key: Key, measure: Callable[[Key], Measurement], benchmark: BenchmarkFixture) -> None:
    """Measure it, then show its samples; a baseline that gives no figure is skipped, and NSA where it is not wrong."""
    measured = measure(key)
    record = measured.record
    if verdict.faults([record]):
        pytest.fail(f"{record.outcome.value}: {record.reason}", pytrace=False)
    if record.outcome is not Outcome.PASSED or measured.raw is None:
        pytest.skip(f"{record.outcome.value}: {record.reason}")
    benchmark.group = key.case
    benchmark.extra_info.update(
        implementation=key.implementation,
        path=record.gate.path if record.gate else None,
        clock=record.clock,
        tokens_per_s=record.tokens_per_s,
        peak_mem_mib=record.peak_mem_mib,
        command=record.command,
    )
    CLOCK.replay(benchmark, measured.raw.samples_ms)
