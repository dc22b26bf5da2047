"""The lower bound of every part of a prefill on a board: kernel after kernel, each by its scarcest resource."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.estimates import bounds, work
from benchmarks.estimates.bounds import Target
from benchmarks.estimates.kernel_table import KernelTable
from benchmarks.estimates.work import PrefillShape, Work
from nsa.triton_backend import traffic, tuning

BY_QUERY, BY_BLOCK = "selected by query", "selected by block"
BACKWARD_BY_QUERY, BACKWARD_BY_BLOCK = "backward, dq by query", "backward, dq by block"
_BOTH = (1, 1)
"""Products over Dk and over Dv per pair: forward."""
_DQ, _DKDV, _ALL = (2, 1), (2, 2), (3, 2)


@dataclass(frozen=True)
class KernelBound:
    """One kernel of a part."""

    kernel: str
    by_resource_ms: dict[str, float]

    @property
    def resource(self) -> str:
        """The scarcest."""
        return max(self.by_resource_ms, key=lambda name: self.by_resource_ms[name])

    @property
    def least_ms(self) -> float:
        return self.by_resource_ms[self.resource]


@dataclass(frozen=True)
class PartBound:
    """One part of a prefill."""

    part: str
    """"compressed", "scores", "window", "gated sum", or one of those above."""
    kernels: tuple[KernelBound, ...]

    @property
    def least_ms(self) -> float:
        return sum(one.least_ms for one in self.kernels)

    @property
    def resource(self) -> str:
        """That of the kernel that takes longest."""
        return max(self.kernels, key=lambda one: one.least_ms).resource


@dataclass(frozen=True)
class Launches:
    """Which kernels a call launches on a target."""

    table: KernelTable
    target: Target
    hopper: bool = False
    """Whether those of `hopper/` serve where they can."""

    def bound(self, shape: PrefillShape, name: str, done: Work, *, by_block: bool = False) -> KernelBound:
        """Of one kernel, which `hopper/` may have too."""
        heads, architecture = shape.compiled_heads, self.target.architecture
        if self.hopper:
            try:
                found = self.table.find(architecture, heads, f"hopper.{name}")
            except KeyError:
                pass
            else:
                return KernelBound(found.name, bounds.of_kernel(found, done, self.target))
        return KernelBound(
            name, bounds.of_kernel(self.table.find(architecture, heads, name, by_block), done, self.target)
        )

    def moved(self, shape: PrefillShape, *names: str) -> tuple[KernelBound, ...]:
        """Of kernels that only move bytes."""
        amounts = work.moved_bytes(shape)
        return tuple(KernelBound(name, bounds.of_bytes(amounts[name], self.target)) for name in names)


def forward(shape: PrefillShape, on: Launches) -> list[PartBound]:
    """Every part of the forward pass, in its order."""
    architecture = on.target.architecture

    def interval(branch: str) -> PartBound:
        done = work.interval(shape, branch, "compressed_window_forward", architecture, _BOTH)
        return PartBound(branch, (on.bound(shape, "compressed_window._forward", done),))

    scores = work.interval(shape, "compressed", "scores", architecture, (1, 0))
    return [
        interval("compressed"),
        PartBound(
            "scores",
            (on.bound(shape, "scores._group_probabilities", scores), on.bound(shape, "topk._topk", work.topk(shape))),
        ),
        _selected(shape, on),
        interval("window"),
        PartBound("gated sum", on.moved(shape, "gated sum")),
    ]


def _selected(shape: PrefillShape, on: Launches) -> PartBound:
    call, memory = work.selected_call(shape), on.target.memory
    if not traffic.sooner_by_block(call, memory, backward=False):
        done = work.selected_by_query(shape, memory, _BOTH)
        return PartBound(BY_QUERY, (on.bound(shape, "selected._forward", done),))
    return PartBound(BY_BLOCK, _by_block(shape, on, "_forward", _BOTH, shape.dk, shape.dv, partial=shape.dv))


def _by_block(
    shape: PrefillShape, on: Launches, kernel: str, products: tuple[int, int], read: int, written: int, *, partial: int,
    gives_dq: bool = True,
) -> tuple[KernelBound, ...]:  # fmt: skip
    """The kernel that loops over blocks, and the one that adds up its `partial` channels per choice."""
    done = work.selected_by_block(shape, products, read, written)
    kernels = [on.bound(shape, f"selected_kv_major.{kernel}", done, by_block=gives_dq)]
    if partial:
        added = work.selected_by_block(shape, (0, 0), partial, 0)
        kernels.append(KernelBound("the sum of its parts", bounds.of_bytes(added.dram_bytes, on.target)))
    return tuple(kernels)


def backward(shape: PrefillShape, on: Launches) -> PartBound:
    """The backward pass of all branches."""
    architecture, memory = on.target.architecture, on.target.memory
    kernels: list[KernelBound] = []
    for branch in ("compressed", "window"):
        for suffix, products in (("q", _DQ), ("kv", _DKDV)):
            done = work.interval(shape, branch, f"compressed_window_backward_{suffix}", architecture, products)
            kernels.append(on.bound(shape, f"compressed_window._backward_{suffix}", done))
    of_queries = shape.dk + shape.dv  # q and do
    tile = tuning.fit("selected_backward_kv", architecture, *shape.compiled_heads, work.DTYPE)
    in_one_tile = work.CONFIG.l_sel <= tile.keys  # else dispatch.py leaves dq to the kernel by query
    if in_one_tile and traffic.sooner_by_block(work.selected_call(shape), memory, backward=True):
        part = BACKWARD_BY_BLOCK
        kernels += _by_block(shape, on, "_backward", _ALL, of_queries, shape.dk, partial=shape.dk)
    else:
        part = BACKWARD_BY_QUERY
        kernels.append(on.bound(shape, "selected._backward_q", work.selected_by_query(shape, memory, _DQ)))
        kernels += _by_block(shape, on, "_backward", _DKDV, of_queries, 0, partial=0, gives_dq=False)
    return PartBound(part, (*kernels, *on.moved(shape, "gated sum, backward", "row sums", "additions")))
