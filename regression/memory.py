"""The detector of memory that grows faster than the tokens: one call at S and at 2·S, forward and backward."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from nsa import NSAConfig
from regression.calls import SMALL, Call, draw, interpreted
from regression.evidence import Bound

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
