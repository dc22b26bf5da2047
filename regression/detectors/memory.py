"""Memory: its growth with the tokens, and NaN in what nobody wrote and in what lies beside a tensor.

`peak_growth` and `largest_growth` measure one call at S and at 2·S, forward and backward. `poisoned_allocations` and
`surrounded_by_nan` make a read of memory that is not the caller's visible.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import psutil
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from nsa import NSAConfig
from regression.contract import Bound
from regression.detectors.backends import interpreted
from regression.detectors.calls import SMALL, Call, draw

MIB = 2**20
TIMES = 2
SLACK = 1.25
"""What is made in steps (chunks, tiles) does not grow evenly."""
GROWING = NSAConfig(l=32, d=16, l_sel=64, n_sel=4, w=64)
LENGTHS = {"reference": (64, SMALL), "torch": (512, GROWING), "triton": (4096, GROWING)}
"""S, and a config whose blocks and window are short next to it. The reference takes a millisecond per token; triton
keeps the probabilities of 4096 queries at a time, so that its memory is linear from there on and not before."""
INTERPRETED = (16, SMALL)


class Allocations(TorchDispatchMode):
    """Follows every tensor that operators make while it is entered, on any device."""

    def __init__(self) -> None:
        super().__init__()
        self.largest_bytes = 0
        self.peak_bytes = 0
        """Of all that was made and not yet freed."""
        self._live_bytes = 0
        self._known: weakref.WeakValueDictionary[int, torch.UntypedStorage] = weakref.WeakValueDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for x in tree_leaves(made):
            if isinstance(x, Tensor):
                self._made(x.untyped_storage())
        return made

    def _made(self, storage: torch.UntypedStorage) -> None:
        if self._known.get(id(storage)) is storage:
            return
        size = storage.nbytes()
        self._known[id(storage)] = storage
        weakref.finalize(storage, self._freed, size)
        self._live_bytes += size
        self.peak_bytes = max(self.peak_bytes, self._live_bytes)
        self.largest_bytes = max(self.largest_bytes, size)

    def _freed(self, size: int) -> None:
        self._live_bytes -= size


def peak_growth(branch: str, backend: str, device: str) -> Bound:
    """How many times the peak of one branch is at 2·S what it is at S."""
    return _growth("peak", [peak for peak, _ in _short_and_long(branch, backend, device)])


def largest_growth(branch: str, backend: str, device: str) -> Bound:
    """The same of the largest tensor."""
    return _growth("largest tensor", [largest for _, largest in _short_and_long(branch, backend, device)])


def _growth(what: str, sizes: list[int]) -> Bound:
    return Bound(sizes[1] / max(sizes[0], 1), SLACK * TIMES, f"times the {what} for {TIMES} times the tokens")


def _short_and_long(branch: str, backend: str, device: str) -> list[tuple[int, int]]:
    tokens, config = INTERPRETED if interpreted(backend, device) else LENGTHS[backend]
    calls = [draw(length, device, config=config).leaves() for length in (tokens, TIMES * tokens)]
    return [_measured(call, branch, backend) for call in calls]


def _measured(call: Call, branch: str, backend: str) -> tuple[int, int]:
    """(peak, largest tensor) in bytes of one forward and backward, above the inputs."""
    on_gpu = call.q.is_cuda
    gc.collect()  # what earlier calls left must not be freed during this one
    before = _reset_peak() if on_gpu else 0
    with Allocations() as allocations:
        call.attend(branch, backend).sum().backward()
    peak = torch.cuda.max_memory_allocated() - before if on_gpu else allocations.peak_bytes
    return peak, allocations.largest_bytes


def _reset_peak() -> int:
    """Bytes in use on the GPU, from which its next peak is counted."""
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def memory_mib(device: str) -> float:
    """Allocated on the current GPU, or resident of this process, in MiB."""
    if device == "cuda":
        return torch.cuda.memory_allocated() / MIB
    return float(psutil.Process().memory_info().rss) / MIB


def _filled(allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def allocate_garbage(*args: Any, **kwargs: Any) -> Tensor:
        x = allocate(*args, **kwargs)
        if x.dtype == torch.bool:
            return x.fill_(True)
        return x.fill_(torch.nan if x.dtype.is_floating_point else torch.iinfo(x.dtype).max)

    return allocate_garbage


@contextmanager
def poisoned_allocations() -> Iterator[None]:
    """What Python allocates and does not write holds NaN, or the greatest integer."""
    with (
        mock.patch.object(torch, "empty", _filled(torch.empty)),
        mock.patch.object(torch, "empty_like", _filled(torch.empty_like)),
        mock.patch.object(torch, "empty_strided", _filled(torch.empty_strided)),
        mock.patch.object(torch.Tensor, "new_empty", _filled(torch.Tensor.new_empty)),
    ):
        yield


def surrounded_by_nan(x: Tensor, *, tokens: int = 2, heads: int = 20) -> tuple[Tensor, Tensor]:
    """(x [B, S, H, D] inside a larger tensor of NaN, that tensor): so many more tokens and heads on every side."""
    batch, length, num_heads, channels = x.shape
    around = x.new_full((batch + 2, length + 2 * tokens, num_heads + 2 * heads, channels), torch.nan)
    inside = around[1:-1, tokens : tokens + length, heads : heads + num_heads]
    inside.copy_(x)
    return inside, around
