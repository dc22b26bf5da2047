"""step2-stall. Reported: "infinite loop in `r.tolist()` at step 2", from a stack dump of the watchdog.

Really (inferred): micro-steps of some 170 s against that watchdog. The loop over chosen ranges ended every time; a dump
always shows the line that waits for the GPU, which is where the host reads a tensor.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from nsa.geometry import Layout
from nsa.torch_backend import selected_attention as healthy
from regression.contract import Evidence, Incident, ReproVerdict, Step
from regression.detectors import host_cost
from regression.detectors.backends import COMPILING_S, in_every_backend
from regression.detectors.calls import draw

INCIDENT = Incident(
    id="step2-stall",
    symptom="infinite loop in r.tolist() at step 2",
    cause="steps of 170 s against a watchdog of 180 s; the dump shows the line that waits for the GPU",
    detector="no host sync (CUDA's own debug mode on a GPU); the forward can be captured as a CUDA graph",
    expects=ReproVerdict.SLOW,
    fires=("host_syncs",),
    floor_s=COMPILING_S,
)


def by_ranges(
    q: Tensor, k: Tensor, v: Tensor, block_indices: Tensor, layout: Layout, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The selected branch, gathered row by row from ranges that the host reads."""
    o, lse, read = healthy(q, k, v, block_indices, layout, scale)
    return (
        torch.stack([_row(t, q, k, v, block_indices, layout, scale) for t in range(q.shape[1])], 1) + 0 * o,
        lse,
        read,
    )


def _row(t: int, q: Tensor, k: Tensor, v: Tensor, block_indices: Tensor, layout: Layout, scale: float) -> Tensor:
    """o [B, Hq, Dv] of query t, with as many keys as queries."""
    group = q.shape[2] // k.shape[2]
    out = torch.zeros(q.shape[0], q.shape[2], v.shape[-1], device=q.device, dtype=q.dtype)
    for b, head in _pairs(q.shape[0], k.shape[2]):
        chosen = [i for i in block_indices[b, t, head].tolist() if i >= 0]
        tokens = [s for i in chosen for s in range(i * layout.config.l_sel, (i + 1) * layout.config.l_sel) if s <= t]
        heads = slice(head * group, (head + 1) * group)
        p = (q[b, t, heads] @ k[b, tokens, head].T * scale).softmax(-1)
        out[b, heads] = p @ v[b, tokens, head]
    return out


def _pairs(rows: int, heads: int) -> Iterator[tuple[int, int]]:
    return ((b, head) for b in range(rows) for head in range(heads))


def faulty(step: Step) -> Evidence:
    """The loop over ranges in the selected branch."""
    with inject():
        return product(step)


def product(step: Step) -> Evidence:
    """A layer's step; on a GPU also a graph of the forward, unless a host sync was found, which no graph can hold."""
    found = dataclasses.replace(host_cost.examine(step), ops=None)  # operators are step5-stall's
    waits = found.host_syncs is not None and found.host_syncs.exceeded
    if waits or step.device != "cuda":
        return found
    wrong = [why for backend in host_cost.fast_backends(step) if (why := _captured(backend))]
    return dataclasses.replace(found, wrong=tuple(wrong))


def _captured(backend: str) -> str | None:
    """Why a CUDA graph of the forward cannot be captured or gives other numbers; None where all is well."""
    call = draw(256, "cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # a capture wants a stream of its own, and kernels that are compiled
        expected = call.whole(backend)[0]
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            o = call.whole(backend)[0]
        graph.replay()
    except RuntimeError as error:
        return f"{backend}: no CUDA graph: {error}"
    return None if torch.equal(o, expected) else f"{backend}: the graph's output differs"


def inject() -> AbstractContextManager[None]:
    """Put it into every backend."""
    return in_every_backend("selected_attention", by_ranges)
