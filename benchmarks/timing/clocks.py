"""What the GPU's clocks did beside the samples, as NVML tells it.

NVML is read between samples, at most every `_PERIOD_S`, because a reading takes the host longer than a short sample.
A sample is tagged as throttled where the reading before it or the one after it says so. A power cap is how a board
works at its limit, and part of its figures; heat and a failing supply are not, and make a measurement void.
"""

from __future__ import annotations

import statistics
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from harness import nvml

_PERIOD_S = 0.02
_REASONS = {
    "power_cap": "nvmlClocksThrottleReasonSwPowerCap",
    "thermal": "nvmlClocksThrottleReasonSwThermalSlowdown",
    "hardware_thermal": "nvmlClocksThrottleReasonHwThermalSlowdown",
    "hardware_slowdown": "nvmlClocksThrottleReasonHwSlowdown",
    "power_brake": "nvmlClocksThrottleReasonHwPowerBrakeSlowdown",
}
"""Our name for each reason that lowers a clock, and NVML's."""
_FEWEST_OF_A_THIRD = 2
ORDINARY = ("power_cap",)
"""Reasons that belong to a board's own limits."""


@dataclass(frozen=True)
class Clocks:
    """Readings beside the samples; each tuple is as long as `samples_ms`, unless its docstring says otherwise."""

    sm_mhz: tuple[int, ...]
    """Clock of the multiprocessors."""
    power_w: tuple[float, ...]
    """Power that the board draws."""
    temperature_c: tuple[int, ...]
    """Of the GPU."""
    throttled_samples: tuple[int, ...] = ()
    """Indices of the samples beside which the device lowered its clocks; they are kept all the same."""
    throttle_reasons: tuple[str, ...] = ()
    """Why, one for each of `throttled_samples`: "power_cap", "thermal", "hardware_slowdown", ..., joined by "+"."""

    def __post_init__(self) -> None:
        if len(self.throttle_reasons) != len(self.throttled_samples):
            raise ValueError(
                f"clocks.throttle_reasons must be one for each of the {len(self.throttled_samples)} throttled samples;"
                f" got {len(self.throttle_reasons)}"
            )

    @property
    def void_because(self) -> str | None:
        """Why the samples are no figure of this board; None unless most of them were throttled by more than `ORDINARY`
        reasons."""
        extraordinary = [reasons for reasons in self.throttle_reasons if set(reasons.split("+")) - set(ORDINARY)]
        if len(extraordinary) * 2 <= len(self.sm_mhz):
            return None
        named = sorted({reason for reasons in extraordinary for reason in reasons.split("+")} - set(ORDINARY))
        lowest, highest = min(self.sm_mhz), max(self.sm_mhz)
        return (
            f"{len(extraordinary)} of {len(self.sm_mhz)} samples throttled: {', '.join(named)}; SM clock {lowest} to"
            f" {highest} MHz, up to {max(self.temperature_c)} degrees C"
        )

    @property
    def summary(self) -> ClockSummary:
        """In a few numbers, as a record keeps it."""
        return ClockSummary(
            min(self.sm_mhz),
            statistics.median(self.sm_mhz),
            statistics.median(self.power_w),
            max(self.temperature_c),
            dict(Counter(self.throttle_reasons)),
            self.drift,
        )

    @property
    def drift(self) -> float | None:
        """By what share the SM clock changed from the first third of the samples to the last; None for few samples."""
        third = len(self.sm_mhz) // 3
        if third < _FEWEST_OF_A_THIRD:
            return None
        first, last = statistics.median(self.sm_mhz[:third]), statistics.median(self.sm_mhz[-third:])
        return last / first - 1 if first else None


@dataclass(frozen=True)
class ClockSummary:
    """What the GPU's clocks did beside the samples of one measurement."""

    sm_mhz_min: int
    """Lowest clock of the multiprocessors."""
    sm_mhz_median: float
    power_w_median: float
    """Power that the board drew."""
    temperature_c_max: int
    throttled: Mapping[str, int] = field(default_factory=dict)
    """Samples beside which the device lowered its clocks, by reason ("power_cap", "hardware_slowdown+thermal")."""
    sm_mhz_drift: float | None = None
    """From the first third of the samples to the last, as a share of the median clock of the first: -0.05 is 5 % lower.
    None for fewer than 6 samples, and in records from before it was computed."""

    def __post_init__(self) -> None:
        if not all(type(count) is int and count > 0 for count in self.throttled.values()):
            raise ValueError(f"clocks.throttled must count samples by reason; got {self.throttled}")


@dataclass(frozen=True)
class Reading:
    """The state of the device at one moment."""

    sm_mhz: int
    power_w: float
    temperature_c: int
    reasons: frozenset[str]


class ClockMonitor:
    """Reads the state of the device beside the samples."""

    def __init__(self, nvml: Any, handle: Any, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._nvml, self._handle, self._clock_s = nvml, handle, clock_s
        self._taken = 0
        self._readings = [(0, self._read())]  # after how many samples, and what
        self._read_s = clock_s()

    def observe(self) -> None:
        """To be called after each sample."""
        self._taken += 1
        if self._clock_s() - self._read_s >= _PERIOD_S:
            self._readings.append((self._taken, self._read()))
            self._read_s = self._clock_s()

    def clocks(self) -> Clocks:
        """What was seen beside the samples; of a value, the next reading after each."""
        if self._readings[-1][0] < self._taken:
            self._readings.append((self._taken, self._read()))
        after = [bisect_right(self._readings, i, key=lambda reading: reading[0]) for i in range(self._taken)]
        beside = [(self._readings[j - 1][1], self._readings[j][1]) for j in after]
        reasons = ["+".join(sorted(before.reasons | following.reasons)) for before, following in beside]
        return Clocks(
            tuple(following.sm_mhz for _, following in beside),
            tuple(following.power_w for _, following in beside),
            tuple(following.temperature_c for _, following in beside),
            tuple(i for i, why in enumerate(reasons) if why),
            tuple(why for why in reasons if why),
        )

    def _read(self) -> Reading:
        nvml, handle = self._nvml, self._handle
        active = nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)
        return Reading(
            nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
            nvml.nvmlDeviceGetPowerUsage(handle) / 1e3,
            nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
            frozenset(name for name, constant in _REASONS.items() if active & getattr(nvml, constant)),
        )


def monitor() -> ClockMonitor | None:
    """A monitor of PyTorch's current GPU; None where NVML is missing or does not tell all that is asked."""
    found = nvml.device()
    if found is None:
        return None
    try:
        return ClockMonitor(*found)
    except found[0].NVMLError:  # a virtual GPU, say, that hides its power
        return None
