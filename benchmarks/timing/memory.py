"""Peak memory above what stood before the call: by PyTorch's allocator on a GPU, by the resident set on the CPU.

The kernel's high-water mark of the resident set is reset after the inputs are made, so that the peak is exact, however
short. A child process that measures tells glibc to return freed memory at once (`benchmarks.memory_worker`): what the
call frees and takes again counts once.

The replay of a CUDA graph asks the allocator for nothing: what it needs lies in the pool that was filled when the graph
was captured, and counts as that pool's size.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.cases.work import Work
from benchmarks.peak_memory import CUDA, GRAPH, RSS
from harness.peak import MIB

_CLEAR_REFS, _STATUS = Path("/proc/self/clear_refs"), Path("/proc/self/status")
_RESET_HIGH_WATER = "5"
_NO_POOL = (0, 0)
"""The id of what the allocator holds for no CUDA graph."""


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
    return PeakMemory((torch.cuda.max_memory_allocated() - before) / MIB, CUDA)


def of_work(work: Work) -> PeakMemory | None:
    """Of the work's call on the current GPU; None where it replays a graph whose pool cannot be read."""
    return of_replay(work.call) if work.replays else of_cuda(work.call)


def of_replay(call: Callable[[], object]) -> PeakMemory | None:
    """Of a call that replays a CUDA graph of its own: the pools of all graphs, and what it allocates beside them.

    A pool is reserved for its graph alone and as large as the peak of the capture. None where there is none to be seen:
    the graph then lies elsewhere, and the call's own allocations are no peak.
    """
    beside = of_cuda(call)  # first: the call may capture
    gc.collect()
    torch.cuda.empty_cache()  # pools of graphs that are gone; one in use stays
    pools = [segment for segment in torch.cuda.memory_snapshot() if _pool(segment) != _NO_POOL]
    if not pools:
        return None
    return PeakMemory(sum(segment["total_size"] for segment in pools) / MIB + beside.mib, GRAPH)


def _pool(segment: Mapping[str, Any]) -> tuple[int, ...]:
    return tuple(segment.get("segment_pool_id", _NO_POOL))


def of_this_process(call: Callable[[], object]) -> PeakMemory:
    """The growth of the resident set by a call on the CPU. OSError where it is not Linux.

    Call once before, on something small: what libraries load, and buffers that they keep, would count.
    """
    gc.collect()  # or memory of dead cycles, freed during the call, would be taken off
    _return_free_pages()
    _CLEAR_REFS.write_text(_RESET_HIGH_WATER)
    before = _high_water_mib()
    call()
    return PeakMemory(_high_water_mib() - before, RSS)


def _return_free_pages() -> None:
    """glibc keeps freed memory resident, and a call that takes it again would seem to need nothing."""
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)


def _high_water_mib() -> float:
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1024  # the kernel's "kB" are KiB
