"""Kernels of `hopper/` run in Python, since Triton's interpreter knows no Gluon: what they compute, not how fast.

`emulated()` replaces each kernel by a Python emulation. Programs run one after the other, and tensors are PyTorch's.
What is checked of asynchronous work:

- a tile that TMA brings is NaN from the moment it is asked for until its barrier is waited for, and one that threads
  copy until its group is;
- an asynchronous product is computed when it is waited for ("late") or at once ("early"), and both must be right;
- between a thread's store to shared memory and a product that reads it there must be `fence_async_shared`, and between
  a thread's load of a tile and TMA's next one in its place;
- partitions of warps run in turns (`gluon_partitions.py`), the second of them as late as it may ("late") or not;
- a wait that never ends, bytes that were not announced and an address outside its tensor raise `KernelError`.

Not checked: layouts (`test_compile.py` compiles the same kernels), barriers between the warps of
a partition, integers of 32 bits that overflow, divisions of negative numbers. Nothing here replaces a run on a GPU.
"""

from __future__ import annotations

import functools
import itertools
import math
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime.jit import JITFunction, KernelInterface

from nsa.triton_backend import hopper
from tests.nsa.triton_backend.gluon_memory import (
    Barrier,
    Barriers,
    Descriptor,
    Integer,
    KernelError,
    Pointer,
    Shared,
    Unfenced,
    expect,
    init,
    load,
    single,
    store,
)
from tests.nsa.triton_backend.gluon_partitions import Partitions

KERNELS = {
    hopper.compressed_window: ("_forward", "_backward_q"),
    hopper.decode: ("_step",),
    hopper.keys_and_values: ("_backward",),
    hopper.scores: ("_group_probabilities",),
    hopper.selected: ("_forward", "_backward_q"),
    hopper.selected_keys_and_values: ("_backward",),
    hopper.selected_kv_major: ("_forward",),
    hopper.shared_blocks: ("_forward",),
    hopper.shared_blocks_dq: ("_backward",),
}
ORDERS = ("late", "early")
"""When a product that runs beside other work reads its operands: as late as it may, or at once."""


class _Layout:
    """Any layout: where a value lies in registers or shared memory means nothing here."""

    def __init__(self, *_: Any) -> None:
        pass

    @classmethod
    def get_default_for(cls, *_: Any) -> _Layout:
        return cls()


class _BarrierLayout(_Layout):
    """Of barriers."""


@dataclass(eq=False)
class _Product:
    """a · b + c, computed at once or when it is waited for."""

    compute: Callable[[], Tensor]
    value: Tensor | None = None

    def finish(self) -> None:
        if self.value is None:
            self.value = self.compute()


@dataclass(eq=False)
class _Program:
    """What each program of a grid sees, one after the other, as the modules and functions that a kernel names."""

    grid: tuple[int, ...]
    warps: int
    late: bool
    ids: tuple[int, ...] = ()
    unfenced: Unfenced = field(default_factory=Unfenced)
    products: list[_Product] = field(default_factory=list)
    """In flight, in order."""
    barriers: list[Barrier] = field(default_factory=list)
    copies: list[list[Callable[[], None]]] = field(default_factory=lambda: [[]])
    """By threads, in groups; the last is open."""
    allocated: list[Tensor] = field(default_factory=list)
    partitions: Partitions | None = None
    own: threading.local = field(default_factory=threading.local)
    """What differs by partition."""

    def begin(self, ids: tuple[int, ...]) -> None:
        self.ids, self.partitions, self.copies = ids, None, [[]]
        self.unfenced.clear()
        self.barriers.clear()
        self.allocated.clear()

    def end(self) -> None:
        if self.products or any(self.copies) or any(barrier.pending_copies for barrier in self.barriers):
            raise KernelError("a product or a copy is still on its way where the program ends")

    def scope(self) -> dict[str, Any]:
        """By the name that the kernels import."""
        return {
            "gl": types.SimpleNamespace(**_LANGUAGE, **self._language()),
            "tl": types.SimpleNamespace(**_LANGUAGE),
            "mbarrier": types.SimpleNamespace(
                MBarrierLayout=_BarrierLayout,
                init=init,
                expect=expect,
                wait=self._wait,
                arrive=Barrier.arrive,
                invalidate=lambda barrier: init(barrier, 0),
            ),
            "tma": types.SimpleNamespace(async_copy_global_to_shared=self._copy),
            "async_copy": types.SimpleNamespace(
                async_copy_global_to_shared=self._copy_by_threads,
                commit_group=lambda: self.copies.append([]),
                wait_group=self._wait_for_copies,
            ),
            "fence_async_shared": self.unfenced.clear,
            "thread_barrier": lambda: None,
            "warpgroup_mma": self._multiply,
            "warpgroup_mma_wait": self._wait_for_products,
            "mma_v2": lambda a, b, c: a.float() @ b.float() + c,
        }

    def _language(self) -> dict[str, Callable[..., Any]]:
        return {
            "program_id": lambda axis: Integer(self.ids[axis]),
            "num_programs": lambda axis: Integer(self.grid[axis]),
            "num_warps": lambda: getattr(self.own, "warps", self.warps),
            "allocate_shared_memory": self._allocate,
            "warp_specialize": self._specialize,
        }

    def _allocate(self, dtype: torch.dtype, shape: Sequence[int], layout: object, x: Tensor | None = None) -> Any:
        if isinstance(layout, _BarrierLayout):
            made = [Barrier() for _ in range(shape[0])]
            self.barriers += made
            return Barriers(made)
        new = Shared(torch.full(tuple(shape), math.nan, dtype=dtype), self.unfenced)
        self.allocated.append(new.x)  # or another one might get its address
        if x is not None:
            new.store(x)
        return new

    def _specialize(
        self, parts: Sequence[tuple[Callable[..., None], tuple[Any, ...]]], warps: Sequence[int], _: Sequence[int]
    ) -> None:
        def run(function: Callable[..., None], arguments: tuple[Any, ...], own_warps: int) -> None:
            self.own.warps = own_warps
            function(*arguments)

        counts = (self.warps, *warps)
        functions = [functools.partial(run, *part, n) for part, n in zip(parts, counts, strict=True)]
        order = [0, *range(2, len(parts)), 1] if self.late else range(len(parts))  # one of them as late as it may
        self.partitions = Partitions(functions, order)
        self.partitions.run()

    def _wait(self, barrier: Barrier, parity: Any, wanted: Any = True) -> None:
        if not bool(wanted):
            return
        if self.partitions is not None:
            self.partitions.wait(lambda: barrier.passed(int(parity)))
        elif not barrier.passed(int(parity)):
            raise KernelError("a wait that never ends")

    def _copy(
        self, source: Descriptor, start: Sequence[Any], barrier: Barrier, target: Shared, wanted: Any = True
    ) -> None:
        if not bool(wanted):
            return
        box = source.tile(start)
        target.begin_copy()

        def arrive() -> int:
            target.x.copy_(box)
            return box.nbytes

        barrier.pending_copies.append(arrive)

    def _copy_by_threads(self, target: Shared, source: Pointer, mask: Tensor) -> None:
        """What the mask leaves out becomes 0."""
        x = load(source, mask)
        if target.x.shape != x.shape:
            raise KernelError("a copy of another shape than its target")
        target.x.fill_(math.nan)
        self.copies[-1].append(lambda: target.store(x))

    def _wait_for_copies(self, in_flight: int) -> None:
        """Leave so many groups on their way at most, beside the open one."""
        while len(self.copies) - 1 > in_flight:
            for arrive in self.copies.pop(0):
                arrive()

    def _multiply(self, a: Any, b: Any, c: Any, use_acc: bool = True, is_async: bool = False) -> Any:
        def compute() -> Tensor:
            left, right = (x.operand() if isinstance(x, Shared) else x for x in (a, b))
            product = left.float() @ right.float()
            before = c.value if isinstance(c, _Product) else c  # products of one sum are done in their order
            return product + before if use_acc else product

        product = _Product(compute)
        self.products.append(product)
        if not self.late:
            product.finish()
        return product if is_async else self._wait_for_products(0, [product])

    def _wait_for_products(self, in_flight: int, deps: Sequence[Any]) -> Any:
        while len(self.products) > in_flight:
            self.products.pop(0).finish()
        found = []
        for one in deps:
            if isinstance(one, _Product) and one in self.products:
                raise KernelError("a product is used that was not waited for")
            found.append(one.value if isinstance(one, _Product) else one)
        return found[0] if len(found) == 1 else tuple(found)


def _largest(x: Tensor, axis: int) -> Tensor:
    """NaN only where there is nothing else."""
    if not x.is_floating_point():
        return x.amax(axis)
    return torch.where(x.isnan().all(axis), x.amax(axis), torch.where(x.isnan(), -math.inf, x).amax(axis).to(x.dtype))


def _binary(function: Callable[[Tensor, Tensor], Tensor], of_integers: Callable[..., int]) -> Callable[[Any, Any], Any]:
    def call(a: Any, b: Any) -> Any:
        if isinstance(a, int) and isinstance(b, int):
            return Integer(of_integers(a, b))
        return function(torch.as_tensor(a), torch.as_tensor(b))

    return call


def _assert(condition: Any, why: str) -> None:
    if not condition:
        raise KernelError(why)


_LANGUAGE: dict[str, Any] = {
    **dict.fromkeys(
        (
            "NVMMADistributedLayout",
            "DotOperandLayout",
            "BlockedLayout",
            "SliceLayout",
            "NVMMASharedLayout",
            "SwizzledSharedLayout",
            "DistributedLinearLayout",
        ),
        _Layout,
    ),
    **{name: getattr(torch, name) for name in ("int32", "int64", "float32", "exp2", "log2", "abs")},
    "static_assert": _assert,
    "static_range": range,
    "cdiv": lambda a, b: (a + b - 1) // b,
    "where": lambda condition, a, b: torch.where(torch.as_tensor(condition), a, b),
    "minimum": _binary(torch.fmin, min),  # as on a GPU, a NaN gives way to a number
    "maximum": _binary(torch.fmax, max),
    "load": load,
    "store": store,
    "arange": lambda begin, end, _=None: torch.arange(begin, end, dtype=torch.int32),
    "full": lambda shape, value, dtype, _=None: torch.full(tuple(shape), value, dtype=dtype),
    "zeros": lambda shape, dtype, _=None: torch.zeros(tuple(shape), dtype=dtype),
    "zeros_like": torch.zeros_like,
    "convert_layout": lambda x, _, assert_trivial=False: x,
    "cast": lambda x, dtype, bitcast: x.view(dtype),
    "cumsum": lambda x, axis: x.cumsum(axis, dtype=x.dtype),
    "expand_dims": torch.unsqueeze,
    "split": lambda x: (x[..., 0], x[..., 1]),
    "gather": lambda x, index, axis: x.gather(axis, index.long()),
    "max": _largest,
    "min": lambda x, axis: x.amin(axis),
    "sum": lambda x, axis: single(x.sum(axis, dtype=x.dtype)),
    "fma": lambda a, b, c: torch.as_tensor(a.double() * b.double() + c.double()).float(),
}


def _bound(function: JITFunction, scope: dict[str, Any]) -> Callable[..., Any]:
    """The function and all that it calls, with these meanings of the names of Gluon's."""
    made: dict[int, Callable[..., Any]] = {}  # by identity: a function's hash reads all that it calls

    def bind(one: Any) -> Callable[..., Any]:
        if id(one) not in made:
            raw, names = one.fn, dict(one.fn.__globals__)
            made[id(one)] = types.FunctionType(raw.__code__, names, raw.__name__, raw.__defaults__)
            for name in raw.__code__.co_names:
                value = names.get(name)
                if isinstance(value, KernelInterface):
                    names[name] = bind(value)
                elif hasattr(value, "value"):  # a constant of the module
                    names[name] = value.value
            names.update(scope)
        return made[id(one)]

    return bind(function)


@dataclass(frozen=True)
class _Kernel:
    """In the place of a kernel: `kernel[grid](*arguments, num_warps=...)`."""

    function: JITFunction
    order: str
    launches: list[str]

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return functools.partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *arguments: Any, num_warps: int, **_: Any) -> None:
        self.launches.append(self.function.__name__)
        program = _Program(grid, num_warps, self.order == "late")
        run, seen = _bound(self.function, program.scope()), [_argument(x) for x in arguments]
        for ids in itertools.product(*map(range, grid)):
            program.begin(ids)
            run(*seen)
            program.end()


def _argument(x: Any) -> Any:
    if isinstance(x, TensorDescriptor):
        return Descriptor(x)
    if isinstance(x, Tensor):
        size = 1 + sum((size - 1) * step for size, step in zip(x.shape, x.stride(), strict=True)) if x.numel() else 0
        return Pointer(x.as_strided((size,), (1,)))
    return x


@contextmanager
def emulated(order: str = "late") -> Iterator[list[str]]:
    """Kernels of `hopper/` run here; yields the names of those that were launched."""
    launches: list[str] = []
    with ExitStack() as patches:
        for module, names in KERNELS.items():
            for name in names:
                stand_in = _Kernel(getattr(module, name), order, launches)
                patches.enter_context(mock.patch.object(module, name, stand_in))
        yield launches
