"""Peak memory above what stood before the call: PyTorch's allocator on a GPU, a fresh child process on the CPU.

On Linux the child resets the kernel's high-water mark of its resident set after the inputs are made, so that the
peak is exact, however short; with glibc told to give freed memory back, what the call frees counts once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from harness.peak import MIB

_CLEAR_REFS, _STATUS = Path("/proc/self/clear_refs"), Path("/proc/self/status")
_RESET_HIGH_WATER = "5"


@dataclass(frozen=True)
class PeakMemory:
    """What one call needed, and how that was read."""

    mib: float
    source: str


def of_cuda(call: Callable[[], object]) -> PeakMemory:
    """Outputs, saved tensors and scratch of one call on the current GPU."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return PeakMemory((torch.cuda.max_memory_allocated() - before) / MIB, "cuda_allocator")


def of_this_process(call: Callable[[], object]) -> PeakMemory:
    """The same on the CPU, for a process that has done nothing large before. OSError where it is not Linux."""
    _CLEAR_REFS.write_text(_RESET_HIGH_WATER)
    before = _high_water_mib()
    call()
    return PeakMemory(_high_water_mib() - before, "rss_high_water")


def _high_water_mib() -> float:
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1024  # the kernel's "kB" are KiB
