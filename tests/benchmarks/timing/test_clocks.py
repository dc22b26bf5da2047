"""What NVML says of the clocks stands beside the right samples; heat voids a measurement, a power cap does not."""

# ruff: noqa: N802, N815 - the fake has NVML's own names
from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from benchmarks import runner
from benchmarks.cases.outcome import CaseOutcome
from benchmarks.cases.work import Work
from benchmarks.history.samples import RawSamples
from benchmarks.timing import clocks, latency
from benchmarks.timing.clocks import ClockMonitor, Clocks
from benchmarks.timing.latency import SamplingPlan, Timing
from harness import nvml
from tests.benchmarks.synthetic import FINGERPRINT, GREEN, failed, key

POWER_CAP, THERMAL, BRAKE, IDLE = 0x4, 0x20, 0x80, 0x1


class FakeNVML:
    """A device that tells one thing after the other; the last of them for ever."""

    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0
    NVMLError = RuntimeError
    nvmlClocksThrottleReasonSwPowerCap = POWER_CAP
    nvmlClocksThrottleReasonSwThermalSlowdown = THERMAL
    nvmlClocksThrottleReasonHwThermalSlowdown = 0x40
    nvmlClocksThrottleReasonHwSlowdown = 0x8
    nvmlClocksThrottleReasonHwPowerBrakeSlowdown = BRAKE

    def __init__(self, *reasons: int) -> None:
        self._reasons, self._now = list(reasons), 0

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: Any) -> int:
        self._now = self._reasons.pop(0) if self._reasons else self._now
        return self._now

    def nvmlDeviceGetClockInfo(self, handle: Any, what: int) -> int:
        return 1200 if self._now & ~IDLE else 1980

    def nvmlDeviceGetPowerUsage(self, handle: Any) -> int:
        return 650_500

    def nvmlDeviceGetTemperature(self, handle: Any, sensor: int) -> int:
        return 88


def watched(reasons: list[int], samples: int, readings_due: list[bool] | None = None) -> Clocks:
    """Clocks beside so many samples; a reading is due after those named (default: after each)."""
    moment = iter_moments(readings_due or [True] * samples)
    watch = ClockMonitor(FakeNVML(*reasons), None, lambda: next(moment))
    for _ in range(samples):
        watch.observe()
    return watch.clocks()


def iter_moments(due: list[bool]) -> Iterator[float]:
    now = 0.0
    yield now
    for is_due in due:
        now += 1.0 if is_due else 0.0
        yield now
        if is_due:
            yield now


def test_readings_stand_beside_the_samples() -> None:
    seen = watched([IDLE, IDLE, THERMAL, IDLE], 3)
    assert seen == Clocks((1980, 1200, 1980), (650.5,) * 3, (88,) * 3, (1, 2), ("thermal", "thermal"))


def test_a_sample_is_tagged_by_the_reading_before_it_and_the_next_after_it() -> None:
    # readings: 0 at the start, one after the third sample, one at the end
    seen = watched([0, BRAKE | POWER_CAP, 0], 5, [False, False, True, False, False])
    assert seen.throttled_samples == (0, 1, 2, 3, 4)
    assert set(seen.throttle_reasons) == {"power_brake+power_cap"}
    assert seen.sm_mhz == (1200, 1200, 1200, 1980, 1980)


@pytest.mark.parametrize(
    ("sm_mhz", "drift"),
    [
        ((1980,) * 6, 0.0),
        ((2000, 2000, 1990, 1950, 1900, 1900), pytest.approx(-0.05)),
        ((1000, 1000, 1500, 1500, 1100, 1100), pytest.approx(0.1)),
        ((2000, 1000, 1000, 1000, 1000), None),  # too few to tell a drift from noise
        ((0,) * 6, None),
    ],
)
def test_the_drift_of_the_clock_is_from_the_first_third_of_the_samples_to_the_last(
    sm_mhz: tuple[int, ...], drift: float | None
) -> None:
    seen = Clocks(sm_mhz, (300.0,) * len(sm_mhz), (60,) * len(sm_mhz))
    assert seen.drift == drift
    assert seen.summary.sm_mhz_drift == seen.drift


def test_an_idle_device_is_not_throttled() -> None:
    assert watched([IDLE], 3).throttled_samples == ()


@pytest.mark.parametrize(
    ("reasons", "void"),
    [
        ([THERMAL] * 4, True),
        ([0, THERMAL, 0, 0, 0], False),  # beside two of four
        ([POWER_CAP] * 4, False),
        ([POWER_CAP | BRAKE] * 4, True),
    ],
)
def test_most_samples_throttled_by_more_than_the_power_cap_void_a_measurement(reasons: list[int], void: bool) -> None:
    seen = watched(reasons, 4)
    assert (seen.void_because is not None) == void


def test_a_void_measurement_has_an_outcome_its_clocks_and_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    hot = watched([THERMAL] * 3, 3)

    def measure(*_: object) -> Timing:
        return Timing((1.0,) * 3, "cuda_event", "warm", 1, "enough_samples", clocks=hot)

    monkeypatch.setattr(latency, "measure", measure)
    work = Work(lambda _: GREEN, lambda: (torch.zeros(1),), 1)
    measured = runner.measure(key(), "cpu", SamplingPlan(3, 0.0, 1.0), FINGERPRINT, "command", lambda *_: work)
    record = measured.record
    assert record.outcome is CaseOutcome.THROTTLED
    assert record.reason == "3 of 3 samples throttled: thermal; SM clock 1200 to 1200 MHz, up to 88 degrees C"
    assert record.clocks == hot.summary
    assert record.clocks.throttled == {"thermal": 3}
    assert record.latency_ms is None
    assert measured.raw is not None
    assert measured.raw.clocks == hot


def test_clocks_are_as_many_as_samples() -> None:
    three = watched([0], 3)
    with pytest.raises(ValueError, match=r"clocks\.sm_mhz must be beside each of the 2 samples; got 3"):
        RawSamples("a case", (1.0, 1.0), three)
    with pytest.raises(ValueError, match=r"clocks\.throttle_reasons must be one for each of the 1 throttled"):
        dataclasses.replace(three, throttled_samples=(0,))
    assert failed(key(), CaseOutcome.UNSUPPORTED, "why").clocks is None


def test_there_is_no_watch_where_the_device_hides_what_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    class Hiding(FakeNVML):
        def nvmlDeviceGetPowerUsage(self, handle: Any) -> int:
            raise self.NVMLError("not supported")

    monkeypatch.setattr(nvml, "device", lambda: (Hiding(), None))
    assert clocks.monitor() is None
    monkeypatch.setattr(nvml, "device", lambda: None)
    assert clocks.monitor() is None
    assert nvml.limits() is None
    assert nvml.driver() is None


def test_limits_that_are_not_told_are_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    class Partly(FakeNVML):
        def nvmlDeviceGetEnforcedPowerLimit(self, handle: Any) -> int:
            return 700_000

        def nvmlDeviceGetMaxClockInfo(self, handle: Any, what: int) -> int:
            if what == self.NVML_CLOCK_MEM:
                raise self.NVMLError("not supported")
            return 1980

    monkeypatch.setattr(nvml, "device", lambda: (Partly(), None))
    assert nvml.limits() == nvml.ClockLimits(1980, None, 700.0)


def test_the_reasons_are_nvml_s_own() -> None:
    pynvml = pytest.importorskip("pynvml")
    for constant in clocks._REASONS.values():
        assert getattr(pynvml, constant) == getattr(FakeNVML, constant)


@pytest.mark.gpu
def test_reads_a_real_gpu() -> None:
    if nvml.device() is None:
        pytest.skip("NVML is not there")
    x = torch.randn(4096, 4096, device="cuda")
    timed = latency.measure(lambda: x @ x, "cuda", "warm", SamplingPlan(20, 0.2, 5.0))
    assert timed.clocks is not None
    assert len(timed.clocks.sm_mhz) == len(timed.samples_ms)
    assert all(mhz > 100 for mhz in timed.clocks.sm_mhz)
    assert all(watts > 10 for watts in timed.clocks.power_w)
    found = nvml.limits()
    assert found is not None
    assert found.max_sm_mhz is not None
