"""Whether NVML tells the clock that the GPU has: a program can put another module, or another library, in its place.

The GPU counts its own cycles (`clock64` in the kernel of `torch.cuda._sleep`) between two events; that gives its clock
without NVML, which is read meanwhile.
"""

from __future__ import annotations

import importlib.machinery
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch

from benchmarks.correctness.verify import IncorrectError
from harness import nvml

_SHARE = 0.15
"""By how much the two may differ."""
_ABOVE_LIMIT = 1.1
"""A clock may be counted so much above the highest that NVML says is allowed: an H100 (1980 MHz) runs at 2049 to 2080
right after kernels that L2 bounds, for 70 ms at least, and at 1974 to 1994 after 0.3 s of rest."""
_SPIN_CYCLES = (2**25, 2**26, 2**27, 2**28)
"""The next, longer one (17 to 140 ms) is tried where the clock was changing during the last."""
_READ_AFTER_S = 5e-3


def require_told_clock() -> None:
    """Raises IncorrectError where NVML is not what is installed, or tells a clock that the GPU does not have.

    Nothing is checked where there is no NVML: then no clock is on record.
    """
    found = nvml.device()
    if found is None:
        return
    module, handle = found
    require_installed(module)
    limits = nvml.limits()

    def told_mhz() -> int:
        return int(module.nvmlDeviceGetClockInfo(handle, module.NVML_CLOCK_SM))

    try:
        told_mhz()
    except module.NVMLError:
        return
    readings = (counted_and_told(cycles, told_mhz) for cycles in _SPIN_CYCLES)
    require_agreement(readings, None if limits is None else limits.max_sm_mhz)


def counted_and_told(cycles: int, told_mhz: Callable[[], int]) -> tuple[float, int]:
    """(MHz that the GPU counts over so many cycles, MHz that NVML tells meanwhile)."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    torch.cuda._sleep(cycles)
    end.record()
    time.sleep(_READ_AFTER_S)
    told = told_mhz()
    end.synchronize()
    return cycles / float(begin.elapsed_time(end)) / 1e3, told


def require_agreement(readings: Iterable[tuple[float, int]], max_mhz: int | None) -> None:
    """Raises IncorrectError unless one of the (counted, told) readings agrees, and is within the highest clock."""
    counted = told = 0.0
    for counted, told in readings:
        if abs(counted - told) <= _SHARE * counted:
            break
    else:
        raise IncorrectError(
            f"NVML tells an SM clock of {told:.0f} MHz where the GPU counts {counted:.0f} MHz: the clocks on record are"
            " not the GPU's"
        )
    if max_mhz is not None and counted > _ABOVE_LIMIT * max_mhz:
        raise IncorrectError(
            f"the GPU counts {counted:.0f} MHz, above the highest SM clock of the fingerprint, {max_mhz} MHz: the clock"
            " limits on record are not the GPU's"
        )


def require_installed(module: Any) -> None:
    """Raises IncorrectError where the module that stands for pynvml is not the one that an import would find."""
    name = "pynvml"
    spec = importlib.machinery.PathFinder.find_spec(name, sys.path)
    origin = None if spec is None else spec.origin
    if getattr(module, "__file__", None) != origin:
        raise IncorrectError(f"NVML is read through {module!r}, which is not the pynvml that is installed: {origin}")
