"""Peak memory as a figure: when it grew or shrank, and what is known where it did not suffice.

It is deterministic up to how the allocator rounds. PyTorch's hands out a block of a cached segment whole where less
than 1 MiB of it would be left, so that a peak depends a little on what ran before: over the runs of an H200 by at most
0.5 %, or 1 MiB. A child's resident set is counted in pages, and libraries load some of theirs late. A graph's pool is
counted in segments, most of them 20 MiB. Hence `RULES`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

CUDA, RSS, GRAPH = "cuda_allocator", "rss_high_water", "cuda_graph_pool"
RULES = {CUDA: (0.01, 1.0), RSS: (0.03, 4.0), GRAPH: (0.01, 20.0)}
"""By how a peak was read: it has changed where it differs by more than this share and by more than so many MiB."""


class MemoryVerdict(str, Enum):
    """A peak beside an earlier one."""

    GREW = "memory grew"
    SHRANK = "memory shrank"
    SAME = "memory is the same"
    FIRST = "first peak"
    """There is nothing that it could be beside."""


def judge(before_mib: float, now_mib: float, source: str | None = CUDA) -> MemoryVerdict:
    """One peak suffices for either side; `source` is that of both."""
    share, least_mib = RULES[source or CUDA]
    change_mib = now_mib - before_mib
    if abs(change_mib) <= max(share * before_mib, least_mib):
        return MemoryVerdict.SAME
    return MemoryVerdict.GREW if change_mib > 0 else MemoryVerdict.SHRANK


def message(before_mib: float, now_mib: float) -> str:
    """512 -> 640 MiB (+25.0 %)."""
    change = f" ({now_mib / before_mib - 1:+.1%})" if before_mib else ""
    return f"{before_mib:.4g} -> {now_mib:.4g} MiB{change}"


@dataclass(frozen=True)
class OutOfMemory:
    """What an allocator said as it gave up. None where it did not say."""

    asked_mib: float | None
    """Of the allocation that failed, or of the whole case where it was not tried."""
    free_mib: float | None
    """On the device, then."""
    in_use_mib: float | None
    """By the process that asked."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value is not None and not value >= 0:
                raise ValueError(f"out_of_memory.{name} must be at least 0; got {value}")


@dataclass(frozen=True)
class MemoryNeed:
    """What a case takes by its shapes, MiB."""

    inputs_mib: float
    """What stands before the call, once; a recorded peak is what the call takes beside it."""
    tensors_mib: float
    """All tensors at the peak: copies of the inputs and the oracle's too."""
    reserve_mib: float
    """What the process needs beside them."""

    @property
    def whole_mib(self) -> float:
        """Of a device on which nothing else is."""
        return self.tensors_mib + self.reserve_mib

    def lacking(self, total_mib: float, free_mib: float) -> str | None:
        """Why a device of this memory has no room for it; None where it has.

        The reserve counts of the whole alone: of what is free a process has taken its own already.
        """
        if self.whole_mib > total_mib:
            return f"it takes about {gib(self.whole_mib)}, and the device has {gib(total_mib)}"
        if self.tensors_mib > free_mib:
            return f"it takes about {gib(self.whole_mib)}, and {free_of(free_mib, total_mib)}"
        return None


def free_of(free_mib: float, total_mib: float) -> str:
    """20.1 GiB of the device's 24.0 GiB are free."""
    return f"{gib(free_mib)} of the device's {gib(total_mib)} are free"


def gib(mib: float) -> str:
    """24.0 GiB."""
    return f"{mib / 1024:.1f} GiB"


_SIZE = r"(\d+(?:\.\d+)?) (bytes|KiB|MiB|GiB)"
_ASKED = re.compile(rf"(?:[Tt]ried to allocate|takes about) {_SIZE}")
_FREE = re.compile(rf"of which {_SIZE} (?:is|are) free|the device has {_SIZE}|{_SIZE} of the device's")
_IN_USE = re.compile(rf"this process has {_SIZE} memory in use")
_ALLOWED = re.compile(rf"{_SIZE} allowed")
_HELD = re.compile(rf"{_SIZE} is (?:allocated|reserved) by PyTorch")
_MIB = {"bytes": 2.0**-20, "KiB": 2.0**-10, "MiB": 1.0, "GiB": 1024.0}


def out_of_memory(reason: str) -> OutOfMemory:
    """From the words of PyTorch's error (CUDA or CPU), or of a case that was not tried.

    Under a cap (`torch.cuda.set_per_process_memory_fraction`) only what is left of it is free, whatever the device has.
    """
    asked_mib, free_mib, in_use_mib = (_mib(pattern, reason) for pattern in (_ASKED, _FREE, _IN_USE))
    if (allowed_mib := _mib(_ALLOWED, reason)) is not None:
        left_mib = max(allowed_mib - sum(float(number) * _MIB[unit] for number, unit in _HELD.findall(reason)), 0.0)
        free_mib = left_mib if free_mib is None else min(free_mib, left_mib)
    return OutOfMemory(asked_mib, free_mib, in_use_mib)


def _mib(pattern: re.Pattern[str], reason: str) -> float | None:
    found = pattern.search(reason)
    if found is None:
        return None
    number, unit = (part for part in found.groups() if part is not None)
    return float(number) * _MIB[unit]
