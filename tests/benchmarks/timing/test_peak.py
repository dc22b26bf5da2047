"""What the device reaches is measured, and a figure above it is refused, with the reason."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from benchmarks import runner
from benchmarks.cases.outcome import CaseOutcome
from benchmarks.cases.work import Work
from benchmarks.history.records import Record
from benchmarks.timing import peak
from benchmarks.timing.latency import SamplingPlan
from harness import machines
from harness.peak import MeasuredPeak
from tests.benchmarks.synthetic import FINGERPRINT, GREEN, key

H200 = MeasuredPeak(700.0, 50.0, 4.2, 50.0, sheet_bf16_tflops=989.0, sheet_memory_tb_per_s=4.8)
UNLISTED = MeasuredPeak(100.0, 10.0, 1.0, 50.0)
TERA, MIB = 1e12, 2**20


@pytest.mark.parametrize(
    ("device", "latency_ms", "flops", "bytes_moved", "beaten"),
    [
        (H200, 1.0, 0.98 * TERA, None, False),  # above what a product reached, below the data sheet
        (H200, 1.0, 1.00 * TERA, None, True),
        (H200, 1.0, None, 4.7e-3 * TERA, False),
        (H200, 1.0, None, 4.9e-3 * TERA, True),
        (UNLISTED, 1.0, 0.104 * TERA, None, False),  # within the margin of the measurement
        (UNLISTED, 1.0, 0.106 * TERA, None, True),
        (UNLISTED, 1.0, None, 1.04e-3 * TERA + 50 * MIB, False),  # what the cache holds need not be read again
        (UNLISTED, 1.0, None, 1.06e-3 * TERA + 50 * MIB, True),
        (dataclasses.replace(UNLISTED, cache_mib=None), 1.0, None, 9 * TERA, False),
        (UNLISTED, 1.0, None, None, False),
    ],
)
def test_no_call_is_faster_than_the_device(
    device: MeasuredPeak, latency_ms: float, flops: float | None, bytes_moved: float | None, beaten: bool
) -> None:
    assert (device.exceeded_by(latency_ms, flops, bytes_moved) is not None) == beaten


def test_the_reason_holds_the_figures() -> None:
    reason = H200.exceeded_by(1.0, 2 * TERA, None)
    assert reason is not None
    assert reason.startswith("1 ms for 2 TFLOP is 2000 TFLOP/s, above the physical limit of this device, 989")


def measure(work: Work, limits: MeasuredPeak) -> Record:
    identity = dataclasses.replace(FINGERPRINT, measured_peak=limits)
    return runner.measure(key(), "cpu", SamplingPlan(3, 0.0, 1.0), identity, "command", lambda *_: work).record


def test_a_figure_above_the_physical_limit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peak, "remeasured", lambda limits, device: limits)
    record = measure(Work(lambda _: GREEN, lambda: (torch.zeros(1),), 1, flops=1e15), UNLISTED)
    assert record.outcome is CaseOutcome.INCORRECT
    assert record.reason is not None
    assert "above the physical limit of this device" in record.reason
    assert record.latency_ms is None


def test_a_peak_that_a_neighbour_hid_is_measured_again_before_a_figure_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(peak, "_product_tflops", lambda device, dtype: 1000.0)  # measured on a busy CPU it may be low
    hidden = MeasuredPeak(1e-9, 1e-9, 1e-9, 0.0)
    x = torch.randn(256, 256)
    record = measure(Work(lambda _: GREEN, lambda: (x @ x,), 1, flops=2.0 * 256**3), hidden)
    assert (record.outcome, record.reason) == (CaseOutcome.PASSED, None)
    assert record.flops == 2.0 * 256**3


@pytest.mark.parametrize("name", [x.name for x in dataclasses.fields(MeasuredPeak) if x.name != "cache_mib"])
def test_no_peak_is_zero(name: str) -> None:
    with pytest.raises(ValueError, match=rf"measured_peak\.{name} must be above 0; got 0\.0"):
        dataclasses.replace(MeasuredPeak(1.0, 1.0, 1.0, 1.0), **{name: 0.0})


def test_measures_this_cpu() -> None:
    found = peak.measure(machines.recognise(None))
    assert 1e-3 < found.float32_tflops < 1000
    assert 1e-4 < found.copy_tb_per_s < 100
    assert found.sheet_bf16_tflops is None
    better = dataclasses.replace(found, copy_tb_per_s=1000.0)
    assert peak.remeasured(better, "cpu").copy_tb_per_s == 1000.0


@pytest.mark.parametrize(("size", "count"), [("48K", 49152), ("36608K\n", 37486592), ("2M", 2097152)])
def test_reads_the_kernel_s_sizes(size: str, count: int) -> None:
    assert peak._bytes(size) == count


@pytest.mark.gpu
def test_a_gpu_reaches_much_of_its_data_sheet() -> None:
    found = peak.measure(machines.machine(None, machines.visible_gpu()))
    assert found.cache_mib is not None
    if found.sheet_bf16_tflops is not None and found.sheet_memory_tb_per_s is not None:
        assert 0.4 < found.bf16_tflops / found.sheet_bf16_tflops <= 1.05
        assert 0.5 < found.copy_tb_per_s / found.sheet_memory_tb_per_s <= 1.05
