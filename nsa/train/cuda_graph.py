"""Forward, loss and backward of a batch as one CUDA graph: thousands of launches from Python become one.

A graph reads and writes the addresses with which it was captured. So a batch is copied into static tensors, its
documents are padded with empty ones to a fixed number, and gradients are set to zero, never to None.

With several ranks each has a graph of its own, without communication; one all-reduce of all gradients follows the
replay. So ranks need not capture at the same time.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from nsa.graphed_step import stream_aside
from nsa.train.data import packing
from nsa.train.data.packing import Batch

WARM_UP_PASSES = 3
"""Passes before a capture, as in PyTorch's documentation: they compile kernels and warm up libraries."""
_ALIGNMENT = 128
"""Elements, 256 bytes of bf16: each gradient begins aligned for vectorised loads."""


@dataclass(frozen=True)
class CapturedGraph:
    """A graph, the batch that it reads, and the loss that it writes; it also adds to the gradients."""

    graph: torch.cuda.CUDAGraph
    batch: Batch
    loss: Tensor
    """float32 []."""


class GraphedPass:
    """The loss of a batch, whose gradients are added to those that the parameters have.

    Captured at the first batch, and again for another shape or for more documents than there is room for. The
    parameters are of one type and device.
    """

    gradients: Tensor
    """[n]: those of all parameters, contiguous."""

    def __init__(self, loss: Callable[[Batch], Tensor], parameters: Iterable[nn.Parameter]) -> None:
        self._loss = loss
        self.gradients = _flat_gradients([parameter for parameter in parameters if parameter.requires_grad])
        self._weight = torch.zeros((), device=self.gradients.device)
        self._captured: CapturedGraph | None = None

    def __call__(self, batch: Batch, weight: Tensor) -> Tensor:
        """float32 []; the gradients are those of the loss times `weight`, float32 []."""
        captured = self._captured
        if captured is None or not _fits(batch, captured.batch):
            held = _held(batch, None if captured is None else captured.batch)
            captured = None  # or the older graph would keep its memory while another takes as much
            captured = self._captured = self._capture(held)
        _copy(batch, captured.batch)
        self._weight.copy_(weight)
        captured.graph.replay()
        return captured.loss.clone()

    def _capture(self, batch: Batch) -> CapturedGraph:
        """Warmed up with a weight of 0, which adds nothing to the gradients.

        A node that adds to a gradient stays on the stream on which it was made. So it is made anew on the stream of the
        capture: no pass on another one may be left, not even as garbage.
        """
        torch.cuda.synchronize()  # the last replay of an older graph has ended, which gives its memory back
        self._captured = None
        gc.collect()
        self._weight.zero_()
        graph, aside = torch.cuda.CUDAGraph(), stream_aside(batch.tokens.device)
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(WARM_UP_PASSES):
                self._pass(batch)
        torch.cuda.current_stream().wait_stream(aside)
        # thread_local: the thread that makes batches pins their memory meanwhile
        with torch.cuda.graph(graph, stream=aside, capture_error_mode="thread_local"):
            loss = self._pass(batch)
        return CapturedGraph(graph, batch, loss)

    def _pass(self, batch: Batch) -> Tensor:
        loss = self._loss(batch)
        (loss * self._weight).backward()
        return loss.detach()


def _flat_gradients(parameters: Sequence[nn.Parameter]) -> Tensor:
    """Zeros [n] of which each parameter's gradient is a part, so that one all-reduce serves all."""
    sizes = [-(-parameter.numel() // _ALIGNMENT) * _ALIGNMENT for parameter in parameters]
    flat = parameters[0].new_zeros(sum(sizes))
    for parameter, part in zip(parameters, flat.split(sizes), strict=True):
        parameter.grad = part[: parameter.numel()].view_as(parameter)
    return flat


def _documents(batch: Batch) -> int:
    return 0 if batch.cu_seqlens is None else batch.cu_seqlens.numel() - 1


def _fits(batch: Batch, held: Batch) -> bool:
    """Whether it can be copied there."""
    alike = batch.tokens.shape == held.tokens.shape and (batch.cu_seqlens is None) == (held.cu_seqlens is None)
    return alike and _documents(batch) <= _documents(held)


def _held(batch: Batch, before: Batch | None) -> Batch:
    """A copy with room for more documents where it packs any: as before, doubled until those of `batch` fit."""
    room = (before and _documents(before)) or _documents(batch)
    while room < _documents(batch):
        room *= 2
    bounds = None if batch.cu_seqlens is None else packing.with_empty_documents(batch.cu_seqlens, room)
    return Batch(batch.tokens.clone(), batch.targets.clone(), batch.num_targets, bounds)


def _copy(batch: Batch, held: Batch) -> None:
    held.tokens.copy_(batch.tokens)
    held.targets.copy_(batch.targets)
    if batch.cu_seqlens is not None and held.cu_seqlens is not None:
        held.cu_seqlens.copy_(packing.with_empty_documents(batch.cu_seqlens, _documents(held)))
