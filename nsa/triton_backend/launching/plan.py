"""A repeated call without its Python: what a function launched is launched again, for other tensors.

Which kernels a call launches, with which grids, numbers and constants, follows from the shapes, strides, dtypes and
alignment of its tensors and from its configuration. `recording.py` makes a `Plan` of one call, and `plans.py` keeps it
under these. A plan makes two allocations and the results, and hands Triton's launcher addresses in place of tensors,
which it takes and need not ask for theirs.

While a CUDA graph is captured, launches of different lanes (`lanes.py`) go to side streams.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import add
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.runtime import driver

from nsa.triton_backend.launching.lanes import Wait, side_stream
from nsa.triton_backend.launching.relaunch import on_device

Tensors = Sequence[Tensor | None]


class View(NamedTuple):
    """A contiguous tensor in the allocation that is kept for the backward pass."""

    first_byte: int
    shape: torch.Size
    dtype: torch.dtype

    def of(self, kept: Tensor) -> Tensor:
        """The tensor, of `shape`, out of uint8 [bytes]."""
        num_bytes = math.prod(self.shape) * self.dtype.itemsize
        return kept[self.first_byte : self.first_byte + num_bytes].view(self.dtype).view(self.shape)


class Result(NamedTuple):
    """A contiguous tensor with an allocation of its own."""

    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype


class Launch(NamedTuple):
    """One launch of a compiled kernel."""

    lane: int
    waits: tuple[Wait, ...]
    """Before it, of its lane and others."""
    launch: Callable[..., object]
    fixed: tuple[Any, ...]
    grid: tuple[int, int, int]
    pick: Callable[[tuple[Any, ...]], tuple[Any, ...]]
    """Its arguments, as `launch` wants them (`relaunch.Start`), out of all numbers and addresses of a plan."""


@dataclass(frozen=True, eq=False)
class Plan:
    """The launches of a function, for tensors of one key."""

    launches: list[Launch]
    numbers: tuple[Any, ...]
    """Arguments that are no tensors."""
    sources: tuple[int, ...]
    """Of each address: which of the given tensors, then of (workspace, kept, *results), it counts from."""
    offsets: tuple[int, ...]
    """Of each address, bytes from there."""
    workspace_bytes: int
    """Of the allocation that ends with the call."""
    kept_bytes: int
    """Of the allocation that is kept for the backward pass."""
    results: list[Result | None]
    """None where the function gives none."""
    views: list[View]
    """The tensors that are kept, in the order in which the function gave them."""
    num_lanes: int
    waits_at_end: tuple[Wait, ...]
    """Behind the last launch."""

    def __call__(self, given: Tensors) -> tuple[list[Tensor | None], Tensor]:
        """(the results, uint8 [kept_bytes] that holds what is kept)."""
        tensors = [x for x in given if x is not None]
        first = tensors[0]
        device = first.device
        workspace = torch.empty(self.workspace_bytes, dtype=torch.uint8, device=device)
        kept = torch.empty(self.kept_bytes, dtype=torch.uint8, device=device)
        # `torch.empty` takes the host twice as long
        results = [
            made and torch.empty_strided(made.shape, made.strides, dtype=made.dtype, device=device)
            for made in self.results
        ]
        bases = [x.data_ptr() for x in (*tensors, workspace, kept, *results) if x is not None]
        addresses = map(add, map(bases.__getitem__, self.sources), self.offsets)
        values = (*self.numbers, *addresses)
        with on_device(first):
            if self.num_lanes > 1 and _capturing(device):
                self._launch_in_lanes(values, device)
                return results, kept
            active = driver.active
            stream = active.get_current_stream(active.get_current_device())
            for _, _, launch, fixed, (x, y, z), pick in self.launches:
                launch(x, y, z, stream, *fixed, *pick(values))
        return results, kept

    def _launch_in_lanes(self, values: tuple[Any, ...], device: torch.device) -> None:
        current = torch.cuda.current_stream(device)
        of_lanes = (side_stream(device, current.cuda_stream, lane) for lane in range(1, self.num_lanes))
        streams = [current, *of_lanes]
        for lane, waits, launch, fixed, (x, y, z), pick in self.launches:
            for waiting, awaited in waits:
                streams[waiting].wait_stream(streams[awaited])
            stream = streams[lane].cuda_stream
            launch(x, y, z, stream, *fixed, *pick(values))
        for waiting, awaited in self.waits_at_end:
            streams[waiting].wait_stream(streams[awaited])

    def copied(self, tensors: Sequence[Tensor], device: torch.device) -> Tensor:
        """uint8 [kept_bytes] that holds these, which are to be kept."""
        kept = torch.empty(self.kept_bytes, dtype=torch.uint8, device=device)
        for view, x in zip(self.views, tensors, strict=True):
            view.of(kept).copy_(x)
        return kept


def _capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
