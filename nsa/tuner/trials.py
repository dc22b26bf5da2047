"""One candidate of the tuner: whether it fits, whether it is right, how long it takes. Needs Triton, mostly a GPU."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from unittest import mock

import torch
import triton
from torch import Tensor

from nsa import (
    NSAConfig,
    compress,
    compressed_attention,
    select_blocks,
    selected_attention,
    window_attention,
)
from nsa.triton_backend import ahead_of_time, dispatch, tuning
from nsa.triton_backend.ahead_of_time import Heads
from nsa.triton_backend.architecture import shared_kib
from nsa.triton_backend.tuning import LaunchConfig, Table
from nsa.tuner import candidates
from nsa.tuner.candidates import Trial

PARTS = {
    "compressed_window_forward": ("compressed", "window"),
    "compressed_window_backward_q": ("compressed", "window"),
    "compressed_window_backward_kv": ("compressed", "window"),
    "scores": ("choice",),
    "selected_forward": ("selected",),
    "selected_backward_q": ("selected",),
    "selected_backward_kv": ("selected",),
    "selected_kv_major": ("selected",),
    "hopper.compressed_window_forward": ("compressed", "window"),
    "hopper.compressed_window_backward_q": ("compressed", "window"),
    "hopper.compressed_window_backward_kv": ("compressed", "window"),
    "hopper.scores": ("choice",),
    "hopper.selected_forward": ("selected",),
    "hopper.selected_backward_q": ("selected",),
    "hopper.selected_backward_kv": ("selected",),
    "hopper.selected_kv_major": ("selected",),
    "hopper.shared_blocks_forward": ("selected",),
    "hopper.shared_blocks_backward_q": ("selected",),
}
"""What a kernel is part of."""
HOPPER = "hopper."
SHARED = "hopper.shared_blocks_"
JIT_NAMES = {
    "hopper.compressed_window_backward_kv": "hopper.keys_and_values._backward",
    "hopper.scores": "hopper.scores._group_probabilities",
    "hopper.selected_backward_kv": "hopper.selected_keys_and_values._backward",
    "hopper.shared_blocks_backward_q": "hopper.shared_blocks_dq._backward",
    "hopper.selected_kv_major": "hopper.selected_kv_major._forward",
    "scores": "scores._group_probabilities",
    "selected_kv_major": "selected_kv_major._forward",
    "selected_backward_kv": "selected_kv_major._backward",
}
BY_BLOCK = {
    "selected_kv_major": True,
    "selected_forward": False,
    "selected_backward_q": False,
    "shared_blocks_forward": False,
    "shared_blocks_backward_q": False,
}
"""Kernels of the selected branch that serve some calls only: whether they loop over blocks of keys."""
SAME_BLOCKS = 0.999
"""Of the chosen blocks: a sum in another order may turn a tie in the last bit."""


@dataclass(frozen=True)
class Timed:
    """How long a call takes."""

    latency_ms: float
    """The median."""
    interval_ms: tuple[float, float] | None
    """Where the median lies; None for too few samples."""


Timer = Callable[[Callable[[], object]], Timed]


@contextmanager
def using(kernel: str, tuned: LaunchConfig, table: Table, workload: Workload) -> Iterator[None]:
    """Launch one kernel in another way; one that another kernel would stand in for is launched itself."""
    launches = {table.name(kernel, workload.width, workload.group): tuned}
    other = candidates.changed(table, workload.width, launches, table.how)
    if not kernel.startswith(HOPPER):
        other = _without(HOPPER, other)
    elif kernel.startswith("hopper.selected_"):
        other = _without(SHARED, other)
    with contextlib.ExitStack() as patches:
        patches.enter_context(mock.patch.object(tuning, "table", return_value=other))
        if kernel.startswith(HOPPER):  # which neither plans launch nor masked calls
            patches.enter_context(mock.patch.object(dispatch, "MOST_PLANNED_BYTES", 0))
            patches.enter_context(mock.patch.object(dispatch, "MASKED_MIN_QUERIES", sys.maxsize))
        if (by_block := BY_BLOCK.get(kernel.removeprefix(HOPPER))) is not None:
            patches.enter_context(mock.patch.object(dispatch, "sooner_by_block", return_value=by_block))
        yield


def _without(prefix: str, table: Table) -> Table:
    """The table without the launches whose names begin so."""

    def others(launches: Mapping[str, LaunchConfig]) -> dict[str, LaunchConfig]:
        return {name: launch for name, launch in launches.items() if not name.startswith(prefix)}

    return dataclasses.replace(table, slim=others(table.slim), narrow=others(table.narrow), wide=others(table.wide))


def fits(kernel: str, tuned: LaunchConfig, table: Table, workload: Workload) -> bool:
    """Whether every version of the kernel compiles and fits the shared memory of the workload's architecture.

    A kernel of `hopper/` does not where it would not be launched, or its compiler takes no such tile.
    """
    if kernel.startswith(HOPPER) and kernel not in getattr(table, workload.width):
        return False  # nobody has shown that it is the better kernel for such rows
    name = JIT_NAMES.get(kernel, re.sub("_(?=forward|backward)", "._", kernel, count=1))
    heads, length = Heads(workload.group, workload.dk, workload.dv, 1), dispatch.KV_MAJOR_MIN_QUERIES
    with using(kernel, tuned, table, workload), ahead_of_time.recorded(workload.architecture) as launches:
        ahead_of_time.call(heads, length, length, backward="backward" in kernel)
    limit_kib = shared_kib(workload.architecture)
    asked = [launch for launch in launches if launch.name == name]
    try:
        needs = [launch.needs() for launch in asked]
    except (triton.CompilationError, RuntimeError):  # a layout, or a pass of the compiler, that takes no such tile
        if kernel.startswith(HOPPER):
            return False
        raise
    launched = bool(asked) or not kernel.startswith(HOPPER)
    return launched and all(need.shared_bytes <= limit_kib * 1024 for need in needs)


@dataclass(frozen=True)
class Workload:
    """What is timed."""

    architecture: int
    width: str
    group: int
    dk: int
    dv: int
    kv_heads: int
    tokens: int
    dtype: torch.dtype = torch.bfloat16
    device: str = "cuda"
    batch: int = 1
    config: NSAConfig = field(default_factory=NSAConfig)
    given: tuple[Tensor, Tensor, Tensor] | None = field(default=None, compare=False)
    """q, k and v to time it on; random ones if None."""

    def trial(self, kernel: str, tuned: LaunchConfig, table: Table, timer: Timer) -> Trial:
        """Run it with the candidate, hold it to the table's own launch, and time it."""
        work = self._work(kernel)
        wanted = work()
        try:
            with using(kernel, tuned, table, self):
                if (wrong := difference(work(), wanted)) is not None:
                    return Trial(kernel, tuned, "wrong", detail=wrong)
                taken = timer(work)
        except (RuntimeError, ValueError) as error:  # what ptxas or the driver refuses
            return Trial(kernel, tuned, "failed", detail=f"{type(error).__name__}: {error}")
        return Trial(kernel, tuned, "measured", taken.latency_ms, taken.interval_ms)

    @cached_property
    def inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v."""
        heads = (self.group * self.kv_heads, self.dk), (self.kv_heads, self.dk), (self.kv_heads, self.dv)
        generator = torch.Generator(self.device).manual_seed(0)
        q, k, v = self.given or (
            torch.randn(self.batch, self.tokens, *size, generator=generator, device=self.device).to(self.dtype)
            for size in heads
        )
        return q.requires_grad_(), k.requires_grad_(), v.requires_grad_()

    def _work(self, kernel: str) -> Callable[[], list[Tensor]]:
        """The parts that the kernel belongs to, forward or backward."""
        forwards = [self._part(part) for part in PARTS[kernel]]
        if "backward" not in kernel:
            return lambda: [x for forward in forwards for x in forward()]
        outputs = [forward()[0] for forward in forwards]
        upstream = [torch.ones_like(o) for o in outputs]
        return lambda: [
            x
            for o, do in zip(outputs, upstream, strict=True)
            for x in torch.autograd.grad(o, self.inputs, do, retain_graph=True, allow_unused=True)
            if x is not None
        ]

    def _part(self, part: str) -> Callable[[], tuple[Tensor, ...]]:
        config, (q, k, v) = self.config, self.inputs
        if part == "window":
            return lambda: window_attention(q, k, v, config, backend="triton")
        k_cmp, v_cmp = compress(k, config), compress(v, config)
        if part == "compressed":
            return lambda: compressed_attention(q, k_cmp, v_cmp, config, backend="triton")
        _, lse = compressed_attention(q.detach(), k_cmp.detach(), v_cmp.detach(), config, backend="triton")
        if part == "choice":
            return lambda: (select_blocks(q, k_cmp, config, lse=lse, backend="triton"),)
        blocks = select_blocks(q, k_cmp, config, lse=lse, backend="triton")
        return lambda: selected_attention(q, k, v, blocks, config, backend="triton")


def difference(found: list[Tensor], wanted: list[Tensor]) -> str | None:
    """How one result differs from another more than rounding makes it, or None."""
    for number, (one, other) in enumerate(zip(found, wanted, strict=True)):
        if not one.is_floating_point():
            same = (one == other).double().mean().item()
            if same < SAME_BLOCKS:
                return f"result {number}: {same:.4%} of the blocks are the same"
            continue
        rounding = 2 * torch.finfo(one.dtype).eps * other.double().norm().item()
        off = (one.double() - other.double()).norm().item()
        if not off <= max(rounding, torch.finfo(torch.float32).eps):
            return f"result {number}: off by {off:.3g}, rounding makes {rounding:.3g}"
    return None
