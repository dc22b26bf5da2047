"""unwritten-gradients. Read in the source of a public context-parallel NSA, in its fastest setting.

What happens: the backward pass takes one stride of key/value heads for all, so that dk and dv of some heads are
allocated empty and never written. What they hold is what was in memory: often zeros, and then nothing shows.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from nsa.geometry import Layout
from nsa.torch_backend import window_attention as healthy
from regression.contract import Evidence, Incident, ReproVerdict
from regression.detectors import memory
from regression.detectors.backends import COMPILING_S, each_backend, in_every_backend, interpreted, nonfinite, proofs
from regression.detectors.calls import BRANCHES, Call, draw

INCIDENT = Incident(
    id="unwritten-gradients",
    symptom="dk and dv of some heads are what was in memory",
    cause="with one stride for all heads, some gradients are allocated empty and never written",
    detector="allocations poisoned with NaN: every gradient is finite, and the same as without",
    expects=ReproVerdict.NONFINITE,
    fires=("nonfinite", "wrong"),
    floor_s=COMPILING_S,
)
HEADS = (2, 1), (3, 2), (1, 4), (5, 1)
"""Hkv and G."""
INTERPRETED_HEADS = HEADS[1:2]


class _OneStride(torch.autograd.Function):
    """The window branch, with gradients of every other key/value head."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, layout: Layout, scale: float) -> tuple[Tensor, ...]:
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        with torch.enable_grad():
            o, lse, read = healthy(leaves[0], leaves[1], leaves[2], layout, scale)
        ctx.graph = leaves, (o, lse)
        ctx.mark_non_differentiable(read)
        return o.detach(), lse.detach(), read

    @staticmethod
    def backward(ctx: Any, do: Tensor, dlse: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        leaves, outputs = ctx.graph
        dq, *of_keys = torch.autograd.grad(outputs, leaves, (do, dlse), retain_graph=True)
        given = [torch.empty_like(x) for x in of_keys]
        for empty, written in zip(given, of_keys, strict=True):
            empty[:, :, ::2] = written[:, :, ::2]
        return dq, *given, None, None


def _one_stride(q: Tensor, k: Tensor, v: Tensor, layout: Layout, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    o, lse, read = _OneStride.apply(q, k, v, layout, scale)
    return o, lse, read


def _run(call: Call, branch: str, backend: str) -> dict[str, Tensor]:
    """Output and gradients by name."""
    leaves = call.leaves()
    o = leaves.attend(branch, backend)
    return {"o": o.detach(), **leaves.gradients(o)}


def _detect(backend: str, device: str) -> Evidence:
    bad, wrong = [], []
    few = interpreted(backend, device)
    for kv_heads, group in INTERPRETED_HEADS if few else HEADS:
        call = draw(6 if few else 20, device, batch=1 if few else 2, kv_heads=kv_heads, group=group)
        for branch in BRANCHES[-1:] if few else BRANCHES:  # the whole has all of them
            with memory.poisoned_allocations():
                found = _run(call, branch, backend)
            shape = f"{backend}, {branch}, Hkv {kv_heads}, G {group}"
            bad += nonfinite(shape, found)
            clean = {} if few else _run(call, branch, backend)
            wrong += [f"{shape}: {name} differs" for name, x in clean.items() if not torch.equal(x, found[name])]
    return Evidence(nonfinite=tuple(bad), wrong=tuple(wrong))


def inject() -> AbstractContextManager[None]:
    """Put it into the product."""
    return in_every_backend("window_attention", _one_stride)


faulty, product = proofs(each_backend(_detect), inject)
