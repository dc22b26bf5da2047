"""What NVML tells of PyTorch's current GPU: its driver, and what it may do at most."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch


@dataclass(frozen=True)
class ClockLimits:
    """What the device may do at most, as it is set now. None where NVML does not say."""

    max_sm_mhz: int | None
    max_memory_mhz: int | None
    power_limit_w: float | None
    """The limit in force, which an operator may have lowered."""

    def __str__(self) -> str:
        return f"SM {self.max_sm_mhz} MHz, memory {self.max_memory_mhz} MHz, {self.power_limit_w} W"


def limits() -> ClockLimits | None:
    """Of PyTorch's current GPU; None without NVML."""
    found = device()
    if found is None:
        return None
    nvml, handle = found

    def told(ask: Callable[..., int], *what: int) -> int | None:
        try:
            return ask(handle, *what)
        except nvml.NVMLError:
            return None

    power_mw = told(nvml.nvmlDeviceGetEnforcedPowerLimit)
    return ClockLimits(
        told(nvml.nvmlDeviceGetMaxClockInfo, nvml.NVML_CLOCK_SM),
        told(nvml.nvmlDeviceGetMaxClockInfo, nvml.NVML_CLOCK_MEM),
        None if power_mw is None else power_mw / 1e3,
    )


def driver() -> str | None:
    """Version of the NVIDIA driver; None without NVML."""
    found = device()
    return None if found is None else str(found[0].nvmlSystemGetDriverVersion())


@cache
def device() -> tuple[Any, Any] | None:
    """(NVML, its handle of PyTorch's current GPU), by UUID: the two may count the devices differently."""
    try:
        import pynvml

        pynvml.nvmlInit()
        uuid = torch.cuda.get_device_properties(torch.cuda.current_device()).uuid
        return pynvml, pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
    except Exception:  # whatever keeps NVML away, the figures stand without it
        return None
