"""A repeated call without its Python: what a function launches is recorded once, and launched again for other tensors.

Which kernels a call launches, with which grids, numbers and constants, follows from the shapes, strides, dtypes and
alignment of its tensors and from its configuration: `Plans` keeps it under these. A `Plan` then makes two allocations
and the results, and hands Triton's launcher addresses in place of tensors, which it takes and need not ask for theirs.

While a CUDA graph is captured, launches of different lanes go to streams of their own (`recording.py`): short kernels
leave most of a GPU idle, and a graph runs them side by side for nothing. Elsewhere to fork and join would cost the host
more than it saves.

A function can be planned if all that it does on the device are launches of `relaunch.Kernel`; `recording.py` sees any
other operation, and the function is then called each time as it is.
"""

from __future__ import annotations

import enum
import functools
import math
import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from operator import add, itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.runtime import driver

from nsa.triton_backend import architecture, relaunch, tuning
from nsa.triton_backend.launch import on_device
from nsa.triton_backend.recording import Recording

Tensors = Sequence[Tensor | None]
MOST_PLANS = 256
"""Of a function: then all are dropped, since most are of lengths gone by."""
ALIGNMENT = 256
"""Bytes, of each tensor inside an allocation: as much as a kernel can make use of."""


class Place(enum.Enum):
    """Where a tensor that a function makes is to lie."""

    RESULT = "a tensor of its own"
    KEPT = "in the allocation that is kept for the backward pass"
    SCRATCH = "in the allocation that ends with the call"


class View(NamedTuple):
    """A contiguous tensor in the allocation that is kept."""

    first_byte: int
    shape: torch.Size
    dtype: torch.dtype

    def of(self, kept: Tensor) -> Tensor:
        num_bytes = math.prod(self.shape) * self.dtype.itemsize
        return kept[self.first_byte : self.first_byte + num_bytes].view(self.dtype).view(self.shape)


class Result(NamedTuple):
    """A contiguous tensor of its own."""

    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype


class _Launch(NamedTuple):
    """One of a compiled kernel."""

    lane: int
    waits_for: tuple[int, ...]
    """Lanes whose launches so far must have ended."""

    run: Callable[..., object]
    function: int
    metadata: object
    grid: tuple[int, int, int]
    pick: Callable[[tuple[Any, ...]], tuple[Any, ...]]
    """Its arguments, out of all numbers and addresses of a plan."""


@dataclass(frozen=True, eq=False)
class Plan:
    """The launches of a function, for tensors of one key."""

    launches: list[_Launch]
    numbers: tuple[Any, ...]
    """Arguments that are no tensors."""
    sources: tuple[int, ...]
    """Of each address: which of the given tensors, then of (scratch, kept, *results), it counts from."""
    offsets: tuple[int, ...]
    """Bytes."""
    scratch_bytes: int
    kept_bytes: int
    results: list[Result | None]
    """None where the function gives none."""
    views: list[View]
    """The tensors that are kept, in the order in which the function gave them."""
    num_lanes: int
    waits_at_end: tuple[int, ...]
    """Lanes that lane 0 waits for behind the last launch."""

    def __call__(self, given: Tensors) -> tuple[list[Tensor | None], Tensor]:
        """(the results, bytes that hold what is kept)."""
        tensors = [x for x in given if x is not None]
        first = tensors[0]
        device = first.device
        scratch = torch.empty(self.scratch_bytes, dtype=torch.uint8, device=device)
        kept = torch.empty(self.kept_bytes, dtype=torch.uint8, device=device)
        # `torch.empty` takes the host twice as long
        results = [
            made and torch.empty_strided(made.shape, made.strides, dtype=made.dtype, device=device)
            for made in self.results
        ]
        bases = [x.data_ptr() for x in (*tensors, scratch, kept, *results) if x is not None]
        addresses = map(add, map(bases.__getitem__, self.sources), self.offsets)
        values = (*self.numbers, *addresses)
        with on_device(first):
            active = driver.active
            if self.num_lanes > 1 and _capturing(device):
                self._launch_in_lanes(values, device)
                return results, kept
            stream = active.get_current_stream(active.get_current_device())
            for _, _, run, function, metadata, (x, y, z), pick in self.launches:
                run(x, y, z, stream, function, metadata, None, None, None, *pick(values))
        return results, kept

    def _launch_in_lanes(self, values: tuple[Any, ...], device: torch.device) -> None:
        streams = [torch.cuda.current_stream(device), *(_side_stream(device, i) for i in range(1, self.num_lanes))]
        for lane, waits_for, run, function, metadata, (x, y, z), pick in self.launches:
            for other in waits_for:
                streams[lane].wait_stream(streams[other])
            stream = streams[lane].cuda_stream
            run(x, y, z, stream, function, metadata, None, None, None, *pick(values))
        for other in self.waits_at_end:
            streams[0].wait_stream(streams[other])

    def copied(self, tensors: Sequence[Tensor], device: torch.device) -> Tensor:
        """Bytes that hold these, which are to be kept."""
        kept = torch.empty(self.kept_bytes, dtype=torch.uint8, device=device)
        for view, x in zip(self.views, tensors, strict=True):
            view.of(kept).copy_(x)
        return kept


def _capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


@functools.cache
def _side_stream(device: torch.device, lane: int) -> torch.cuda.Stream:
    del lane
    return torch.cuda.Stream(device)


class _Sources:
    """Where each address of a plan comes from."""

    def __init__(self, given: Sequence[Tensor], outcome: Tensors, places: Sequence[Place]) -> None:
        self._given, self.whole = given, True
        self._allocated: dict[int, tuple[int, int]] = {}
        """By address of a storage: what its addresses count from, and the byte there."""
        self.sizes = [0, 0]
        """Bytes of scratch and of what is kept."""
        self.results: list[Result | None] = []
        self._num_results = 0
        self.views: list[View] = []
        self._own = {x.untyped_storage().data_ptr() for x in given}
        for x, place in zip(outcome, places, strict=True):
            if place is Place.RESULT and x is None:
                self.results.append(None)
            elif place is not Place.SCRATCH and x is not None:
                self._made(x, place)

    def _made(self, x: Tensor, place: Place) -> None:
        """Give a tensor that the function gave its place."""
        storage = x.untyped_storage()
        if x.numel() * x.itemsize != storage.nbytes() or not x.is_contiguous():
            self.whole = False  # it is not all of an allocation
        if place is Place.KEPT:
            first = self._allocate(1, storage.nbytes())
            self.views.append(View(first, x.shape, x.dtype))
            found = len(self._given) + 1, first
        else:
            self.results.append(Result(x.shape, x.stride(), x.dtype))
            self._num_results += 1
            found = len(self._given) + 1 + self._num_results, 0
        if storage.nbytes():
            begin = storage.data_ptr()
            self.whole &= begin not in self._own and begin not in self._allocated
            self._allocated[begin] = found

    def _allocate(self, which: int, num_bytes: int) -> int:
        first = self.sizes[which]
        self.sizes[which] += -(-num_bytes // ALIGNMENT) * ALIGNMENT
        return first

    def of(self, x: Tensor) -> tuple[int, int] | None:
        """(what its address counts from, bytes behind that), None where it has no elements and so no address."""
        if x.numel() == 0:
            return None
        storage = x.untyped_storage()
        begin, address = storage.data_ptr(), x.data_ptr()
        if begin in self._own:
            found = [i for i, one in enumerate(self._given) if one.data_ptr() == address]
            inside = [i for i, one in enumerate(self._given) if one.untyped_storage().data_ptr() == begin]
            if not found and len(inside) != 1:
                self.whole = False  # whose part it is cannot be told
            index = (found or inside)[0]
            return index, address - self._given[index].data_ptr()
        if begin not in self._allocated:
            self._allocated[begin] = len(self._given), self._allocate(0, storage.nbytes())
        source, first = self._allocated[begin]
        return source, first + address - begin


class Plans:
    """The plans of one function: of tensors, and of what else its launches depend on, which can be hashed.

    `places` says where each tensor that it gives is to lie.
    """

    def __init__(self, function: Callable[..., Tensors], places: Sequence[Place]) -> None:
        self.function, self.places = function, places
        _ALL.add(self)
        self._known: dict[Hashable, Plan | None] = {}
        """None where the function cannot be planned."""

    def forget(self) -> None:
        """Drop all."""
        self._known.clear()

    def keeping(self, given: Tensors, *more: Hashable) -> tuple[list[Tensor | None], Tensor, Plan] | None:
        """(the results, bytes that hold what is kept, the plan that tells where); None where there is no plan.

        A call that finds no plan runs the function to make one.
        """
        key = self._key(given, more)
        plan = self._known.get(key)
        if plan is not None and not relaunch.observed():
            return *plan(given), plan
        if plan is None and key in self._known:
            return None
        outcome, recorded = self._recorded(key, given, more)
        plan = plan or recorded
        if plan is None:
            return None
        results = [x for x, place in zip(outcome, self.places, strict=True) if place is Place.RESULT]
        kept = [x for x, place in zip(outcome, self.places, strict=True) if place is Place.KEPT and x is not None]
        return results, plan.copied(kept, _device(given)), plan

    def __call__(self, given: Tensors, *more: Hashable) -> Tensors:
        """What the function gives, all of it results."""
        key = self._key(given, more)
        plan = self._known.get(key)
        if plan is not None and not relaunch.observed():
            return plan(given)[0]
        if key in self._known:
            return self.function(given, *more)
        return self._recorded(key, given, more)[0]

    def _key(self, given: Tensors, more: tuple[Hashable, ...]) -> Hashable:
        tensors = [x for x in given if x is not None]
        first = tensors[0]
        addresses = [x.data_ptr() for x in tensors]
        return (
            tuple([x if x is None else (x.shape, x.stride(), x.dtype) for x in given]),
            tuple([address % relaunch.ALIGNMENT == 0 for address in addresses]),
            tuple(map(addresses.index, addresses)),  # which are the same
            first.get_device(),
            driver.active.get_current_device(),
            id(tuning.table(architecture.of(first.device))),
            more,
        )

    def _recorded(self, key: Hashable, given: Tensors, more: tuple[Hashable, ...]) -> tuple[Tensors, Plan | None]:
        """What the function gives, and its plan; unless launches are observed, it is known from here on."""
        with Recording() as recording:
            outcome = self.function(given, *more)
        plan = _plan(recording, given, outcome, self.places)
        if not relaunch.observed():
            if len(self._known) >= MOST_PLANS:
                self.forget()
            self._known[key] = plan
        return outcome, plan


_ALL: weakref.WeakSet[Plans] = weakref.WeakSet()


def forget_all() -> None:
    """Drop every plan: for tests, which change what a function does."""
    for plans in _ALL:
        plans.forget()


def _device(given: Tensors) -> torch.device:
    return next(x.device for x in given if x is not None)


def _plan(recording: Recording, given: Tensors, outcome: Tensors, places: Sequence[Place]) -> Plan | None:
    """None where launches are not all that was done, or the place of a tensor is not known."""
    if not recording.whole:
        return None
    sources = _Sources([x for x in given if x is not None], outcome, places)
    numbers: list[Any] = []
    addresses: dict[tuple[int, int], int] = {}
    picks: list[list[tuple[bool, int]]] = []
    for recorded in recording.launches:
        pick = []
        for x in recorded.arguments:
            found = sources.of(x) if isinstance(x, Tensor) else None
            if found is None:
                pick.append((False, len(numbers)))
                numbers.append(0 if isinstance(x, Tensor) else x)
            else:
                pick.append((True, addresses.setdefault(found, len(addresses))))
        picks.append(pick)
    if not sources.whole:
        return None
    launches = []
    for recorded, pick in zip(recording.launches, picks, strict=True):
        compiled, (x, y, z) = recorded.compiled, (*recorded.grid, 1, 1)[:3]
        chosen = itemgetter(*[place + len(numbers) * is_address for is_address, place in pick])
        kernel = compiled.run, compiled.function, compiled.packed_metadata
        launches.append(_Launch(recorded.lane, recorded.waits_for, *kernel, (x, y, z), chosen))
    return Plan(
        launches=launches,
        numbers=tuple(numbers),
        sources=tuple([source for source, _ in addresses]),
        offsets=tuple([offset for _, offset in addresses]),
        scratch_bytes=sources.sizes[0],
        kept_bytes=sources.sizes[1],
        results=sources.results,
        views=sources.views,
        num_lanes=recording.lanes.number,
        waits_at_end=recording.lanes.left(),
    )
