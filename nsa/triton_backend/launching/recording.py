"""A plan of one call of a function: its kernels tell each launch (`relaunch.thread`), and addresses are traced to where
they come from.

A function can be planned if all that it does on the device are launches of `relaunch.Kernel`; any operation of PyTorch
but a view or an allocation, and any other kernel of this package, makes a recording incomplete.

Launches stand in lanes (`lanes.py`).
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from nsa.triton_backend.launching import lanes, relaunch
from nsa.triton_backend.launching.lanes import Lanes, RecordedLanes, Wait
from nsa.triton_backend.launching.plan import Launch, Plan, Result, Tensors, View

ALIGNMENT = 256
"""Bytes, of each tensor inside an allocation: as much as a kernel can make use of."""
_ALLOCATIONS = ("empty", "new_empty")
_NOTHING_DONE = ("alias", "detach", "_unsafe_view", "_reshape_alias")


class Memory(enum.Enum):
    """Where a tensor that a function makes is to lie."""

    RESULT = "an allocation of its own"
    KEPT = "in the allocation that is kept for the backward pass"
    WORKSPACE = "in the allocation that ends with the call"


class RecordedLaunch(NamedTuple):
    """A launch with its arguments."""

    compiled: Any
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    lane: int
    waits: tuple[Wait, ...]


class Recording(TorchDispatchMode):
    """What is launched inside a `with` block of this thread; `complete` is false where something else was done, too.

    It holds all arguments, so that no memory of the call is given to a second tensor meanwhile.
    """

    def __init__(self) -> None:
        super().__init__()
        self.launches: list[RecordedLaunch] = []
        self.complete = True
        self.lanes = RecordedLanes()
        self._outer_recorder: relaunch.Recorder | None = None
        self._outer_lanes: Lanes | None = None

    def __enter__(self) -> Recording:
        self._outer_recorder, self._outer_lanes = relaunch.thread.recorder, lanes.thread.lanes
        if self._outer_recorder is not None:  # it does not hear of what is launched here
            self._outer_recorder.launched(None, (), None)
        relaunch.thread.recorder, lanes.thread.lanes = self, self.lanes
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        relaunch.thread.recorder, lanes.thread.lanes = self._outer_recorder, self._outer_lanes

    def launched(self, compiled: Any, grid: tuple[int, ...], arguments: tuple[Any, ...] | None) -> None:
        """Called by kernels; no arguments where these do not suffice to launch it again."""
        if arguments is None:
            self.complete = False
        else:
            waits = self.lanes.taken()
            self.launches.append(RecordedLaunch(compiled, grid, arguments, self.lanes.current, waits))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if not (func.is_view or name.startswith(_ALLOCATIONS) or name in _NOTHING_DONE):
            self.complete = False
        return func(*args, **(kwargs or {}))


class _Addresses:
    """Where each address of a call comes from: (which of the given tensors, workspace, kept, results; bytes)."""

    def __init__(self, given: Sequence[Tensor], outcome: Tensors, memories: Sequence[Memory]) -> None:
        self._given, self.known = given, True
        """`known` is false where it cannot be told of one."""
        self._workspace, self._kept = len(given), len(given) + 1
        self._allocated: dict[int, tuple[int, int]] = {}
        """By address of a storage: what its addresses count from, and the byte there."""
        self.bytes = {self._workspace: 0, self._kept: 0}
        self.results: list[Result | None] = []
        self.views: list[View] = []
        self._own = {x.untyped_storage().data_ptr() for x in given}
        for x, memory in zip(outcome, memories, strict=True):
            if memory is Memory.RESULT:
                self._add_result(x)
            elif memory is Memory.KEPT and x is not None:
                begin = self._allocate(self._kept, x.untyped_storage().nbytes())
                self.views.append(View(begin, x.shape, x.dtype))
                self._add(x, (self._kept, begin))

    @property
    def workspace_bytes(self) -> int:
        return self.bytes[self._workspace]

    @property
    def kept_bytes(self) -> int:
        return self.bytes[self._kept]

    def _add_result(self, x: Tensor | None) -> None:
        self.results.append(None if x is None else Result(x.shape, x.stride(), x.dtype))
        if x is not None:
            self._add(x, (self._kept + sum(made is not None for made in self.results), 0))

    def _add(self, x: Tensor, place: tuple[int, int]) -> None:
        """Note what the function gave, which must be all of a new allocation."""
        storage = x.untyped_storage()
        self.known &= x.numel() * x.itemsize == storage.nbytes() and x.is_contiguous()
        if storage.nbytes():
            begin = storage.data_ptr()
            self.known &= begin not in self._own and begin not in self._allocated
            self._allocated[begin] = place

    def _allocate(self, which: int, num_bytes: int) -> int:
        first = self.bytes[which]
        self.bytes[which] += -(-num_bytes // ALIGNMENT) * ALIGNMENT
        return first

    def of(self, x: Tensor) -> tuple[int, int] | None:
        """Where x begins; None where it has no elements and so no address."""
        if x.numel() == 0:
            return None
        storage = x.untyped_storage()
        begin, address = storage.data_ptr(), x.data_ptr()
        if begin in self._own:
            return self._of_given(x)
        if begin not in self._allocated:
            self._allocated[begin] = self._workspace, self._allocate(self._workspace, storage.nbytes())
        source, first = self._allocated[begin]
        return source, first + address - begin

    def _of_given(self, x: Tensor) -> tuple[int, int]:
        """Of several tensors of one storage x must be one: whose part it is, and so where it will be, is not known."""
        begin = x.untyped_storage().data_ptr()
        inside = [i for i, one in enumerate(self._given) if one.untyped_storage().data_ptr() == begin]
        same = [i for i in inside if _is_same(self._given[i], x)]
        if not same and len(inside) != 1:
            self.known = False
        index = (same or inside)[0]
        return index, x.data_ptr() - self._given[index].data_ptr()


def _is_same(a: Tensor, b: Tensor) -> bool:
    return a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.stride() == b.stride()


def _in_a_tuple(pick: Callable[[Any], Any]) -> Callable[[Any], tuple[Any]]:
    return lambda values: (pick(values),)


def plan_of(recording: Recording, given: Tensors, outcome: Tensors, memories: Sequence[Memory]) -> Plan | None:
    """The plan of a function that gave `outcome`; None where launches are not all that it did, or an address is not
    known."""
    if not recording.complete:
        return None
    found = _Addresses([x for x in given if x is not None], outcome, memories)
    numbers: list[Any] = []
    addresses: dict[tuple[int, int], int] = {}
    picks: list[list[tuple[bool, int]]] = []
    for recorded in recording.launches:
        pick = []
        for x in recorded.arguments:
            place = found.of(x) if isinstance(x, Tensor) else None
            if place is None:
                pick.append((False, len(numbers)))
                numbers.append(0 if isinstance(x, Tensor) else x)
            else:
                pick.append((True, addresses.setdefault(place, len(addresses))))
        picks.append(pick)
    if not found.known:
        return None
    launches = []
    for recorded, pick in zip(recording.launches, picks, strict=True):
        (x, y, z), (launch, fixed, packed) = (*recorded.grid, 1, 1)[:3], relaunch.start(recorded.compiled)
        chosen = itemgetter(*[place + len(numbers) * is_address for is_address, place in pick])
        arguments = _in_a_tuple(chosen) if packed else chosen
        launches.append(Launch(recorded.lane, recorded.waits, launch, fixed, (x, y, z), arguments))
    return Plan(
        launches=launches,
        numbers=tuple(numbers),
        sources=tuple([source for source, _ in addresses]),
        offsets=tuple([offset for _, offset in addresses]),
        workspace_bytes=found.workspace_bytes,
        kept_bytes=found.kept_bytes,
        results=found.results,
        views=found.views,
        num_lanes=recording.lanes.number,
        waits_at_end=recording.lanes.taken(),
    )
