"""What kernels of `hopper/` see in `gluon_on_cpu.py`: integers, tensors, shared memory, barriers and TMA's tiles."""

from __future__ import annotations

import math
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor


class KernelError(Exception):
    """A kernel did what a GPU would answer with a wrong result, a hang or an illegal address."""


_ARITHMETIC = ("add", "sub", "mul", "floordiv", "mod", "and", "or", "xor", "lshift", "rshift")
_COMPARISONS = ("lt", "le", "eq", "ne", "ge", "gt")


class Integer(int):
    """A single integer of a kernel, as a tensor without dimensions; beside a tensor it takes the tensor's type.

    Python's operations take a tenth of a tensor's time. It has no width: that it needs more than 32 bits only shows
    where a kernel makes it a number of 32.
    """

    def to(self, dtype: torch.dtype) -> Any:
        if dtype.is_floating_point:
            return torch.tensor(int(self), dtype=dtype)
        if not torch.iinfo(dtype).min <= self <= torch.iinfo(dtype).max:
            raise KernelError(f"{int(self)} is no {dtype}")
        return self


def _arithmetic(name: str) -> Callable[[int, Any], Any]:
    plain = getattr(int, name)

    def operation(self: int, other: Any) -> Any:
        found = plain(self, other)
        return found if found is NotImplemented else Integer(found)

    return operation


def _comparison(name: str) -> Callable[[int, Any], Any]:
    """A mask, for `&` with those of tensors."""
    plain = getattr(int, name)

    def operation(self: int, other: Any) -> Any:
        found = plain(self, other)
        return found if found is NotImplemented else torch.tensor(found)

    return operation


for _name in _ARITHMETIC:
    setattr(Integer, f"__{_name}__", _arithmetic(f"__{_name}__"))
    setattr(Integer, f"__r{_name}__", _arithmetic(f"__r{_name}__"))
for _name in _COMPARISONS:
    setattr(Integer, f"__{_name}__", _comparison(f"__{_name}__"))


def single(x: Any) -> Any:
    """x, as an `Integer` where it is one integer."""
    one = isinstance(x, torch.Tensor) and not x.ndim and not x.is_floating_point() and x.dtype != torch.bool
    return Integer(x) if one else x


@dataclass(frozen=True)
class Pointer:
    memory: Tensor
    """From the tensor's first element to its last, flat."""
    at: Tensor | int = 0

    @property
    def dtype(self) -> Any:
        return types.SimpleNamespace(element_ty=self.memory.dtype)

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.memory, self.at + offset)

    def inside(self, mask: Any) -> tuple[Tensor, Tensor]:
        """(addresses, mask), broadcast; addresses that the mask leaves out are 0."""
        at, in_mask = torch.broadcast_tensors(torch.as_tensor(self.at), torch.as_tensor(True if mask is None else mask))
        at = torch.where(in_mask, at, 0)
        least, greatest = at.aminmax()
        self.require_inside(int(least), int(greatest))
        return at, in_mask

    def require_inside(self, least: int, greatest: int) -> None:
        if least < 0 or greatest >= self.memory.shape[0]:
            raise KernelError("an address outside the tensor")


@dataclass
class Unfenced:
    """Addresses of shared memory that threads have accessed since the last fence."""

    stored: set[int] = field(default_factory=set)
    """Of allocations."""
    loaded: set[int] = field(default_factory=set)
    """Of tiles."""

    def clear(self) -> None:
        self.stored.clear()
        self.loaded.clear()


@dataclass(eq=False)
class Shared:
    """Shared memory, or a view of it."""

    x: Tensor
    unfenced: Unfenced

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.x.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.x.dtype

    def index(self, slot: Any) -> Shared:
        return Shared(self.x[int(slot)], self.unfenced)

    def reshape(self, shape: Sequence[int]) -> Shared:
        return Shared(self.x.view(list(shape)), self.unfenced)

    def permute(self, order: Sequence[int]) -> Shared:
        return Shared(self.x.permute(*order), self.unfenced)

    def slice(self, start: int, length: int, dim: int) -> Shared:
        return Shared(self.x.narrow(dim, start, length), self.unfenced)

    def load(self, _: object) -> Tensor:
        self.unfenced.loaded.add(self.x.data_ptr())
        return self.x.clone()

    def store(self, x: Tensor) -> None:
        self.x.copy_(x)
        self.unfenced.stored.add(self.x.untyped_storage().data_ptr())

    def operand(self) -> Tensor:
        if self.x.untyped_storage().data_ptr() in self.unfenced.stored:
            raise KernelError("a product reads what threads stored, without fence_async_shared between")
        return self.x

    def begin_copy(self) -> None:
        """TMA writes here from now on, at a time that nobody knows."""
        if self.x.data_ptr() in self.unfenced.loaded:
            raise KernelError("TMA overwrites what threads may still read, without fence_async_shared between")
        self.x.fill_(math.nan)


@dataclass(eq=False)
class Barrier:
    """Ends a phase once `count` threads have arrived and all announced bytes are there."""

    count: int = 0
    arrived: int = 0
    bytes_missing: int = 0
    phases: int = 0
    """Completed."""
    pending_copies: list[Callable[[], int]] = field(default_factory=list)
    """Copies that will tell it how many bytes they brought."""

    def arrive(self, expected: int = 0) -> None:
        self.arrived, self.bytes_missing = self.arrived + 1, self.bytes_missing + expected
        self._end_phase()

    def passed(self, parity: int) -> bool:
        """Whether a wait for the phase of this parity is over; copies arrive no sooner than somebody waits for them."""
        if self.count == 0:
            raise KernelError("a wait that never ends: for a barrier that was not made, or is given back")
        if self.phases & 1 != parity:
            return True
        self.bytes_missing -= sum(copy() for copy in self.pending_copies)
        self.pending_copies.clear()
        return self._end_phase()

    def _end_phase(self) -> bool:
        ended = self.arrived == self.count and not self.bytes_missing and not self.pending_copies
        if ended:
            self.arrived, self.phases = 0, self.phases + 1
        return ended


@dataclass
class Barriers:
    of: list[Barrier]

    def index(self, slot: Any) -> Barrier:
        return self.of[int(slot)]


@dataclass(frozen=True)
class Descriptor:
    host: TensorDescriptor

    @property
    def dtype(self) -> torch.dtype:
        return self.host.base.dtype

    layout = None

    @cached_property
    def block_type(self) -> Any:
        shape = list(self.host.block_shape)
        return types.SimpleNamespace(shape=shape, nbytes=math.prod(shape) * self.dtype.itemsize)

    @cached_property
    def source(self) -> Tensor:
        return self.host.base.as_strided(self.host.shape, self.host.strides)

    def tile(self, start: Sequence[Any]) -> Tensor:
        """The box that begins there; what lies outside the tensor is 0."""
        source, sizes = self.source, self.host.block_shape
        begins = [int(at) for at in start]
        ends = [at + size for at, size in zip(begins, sizes, strict=True)]
        kept = [slice(max(a, 0), min(b, size)) for a, b, size in zip(begins, ends, source.shape, strict=True)]
        if all(part.stop - part.start == size for part, size in zip(kept, sizes, strict=True)):
            return source[tuple(kept)].clone()
        box = torch.zeros(sizes, dtype=self.dtype)
        if all(part.start < part.stop for part in kept):
            target = [slice(part.start - at, part.stop - at) for part, at in zip(kept, begins, strict=True)]
            box[tuple(target)] = source[tuple(kept)]
        return box


def init(barrier: Barrier, count: int) -> None:
    barrier.count = count


def expect(barrier: Barrier, size: int, wanted: Any = True) -> None:
    if bool(wanted):
        barrier.arrive(size)


def load(pointer: Pointer, mask: Any = None, other: Any = 0) -> Any:
    if mask is None and isinstance(pointer.at, int):
        pointer.require_inside(pointer.at, pointer.at)
        return single(pointer.memory[pointer.at].clone())
    at, in_mask = pointer.inside(mask)
    return torch.where(in_mask, pointer.memory[at.long()], torch.as_tensor(other, dtype=pointer.memory.dtype))


def store(pointer: Pointer, x: Any, mask: Any = None) -> None:
    at, in_mask = pointer.inside(mask)
    value = torch.as_tensor(x).to(pointer.memory.dtype).expand(at.shape)
    pointer.memory[at[in_mask].long()] = value[in_mask]
