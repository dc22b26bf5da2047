"""tie-break. Not reported; found beside the others.

What happened: ties were to be broken by taking 1e-8 · index from each score, which float32 cannot hold next to 1: the
choice was whatever the sort left, and differed from batch to batch.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import replace

import torch
from torch import Tensor

import nsa
from nsa import NSAConfig
from nsa.geometry import Layout
from regression.contract import Evidence, Incident, ReproVerdict
from regression.detectors import selection
from regression.detectors.backends import COMPILING_S, each_backend, in_every_backend, interpreted, proofs
from regression.detectors.calls import draw

INCIDENT = Incident(
    id="tie-break",
    symptom="none was reported",
    cause="1e-8 · index is lost in float32",
    detector="equal scores choose the lowest index, on every backend and batch shape",
    expects=ReproVerdict.WRONG,
    floor_s=COMPILING_S,
)
TIED = NSAConfig(l=4, d=4, l_sel=4, n_sel=4, w=8, init_blocks=0, local_blocks=1)
"""One compressed block per selection block, so that equal keys give equal scores."""


SHAPES = (1, 1, 64), (2, 1, 40), (3, 2, 64), (1, 1, 152)
"""B, Hkv, T; of 16, 10 and 38 blocks, as a CPU may add those behind a multiple of its vectors in another order."""


def _jittered(q: Tensor, k_cmp: Tensor, layout: Layout, scale: float, lse: Tensor | None = None) -> Tensor:
    """topk promises no order among equals; from the last to the first is one that it may take."""
    begun, forced = selection.candidates(layout)
    score = selection.block_scores(q, k_cmp, layout, scale)
    score = score - 1e-8 * torch.arange(score.shape[-1], device=q.device)
    score = score.masked_fill(forced, torch.inf).masked_fill(~begun, -torch.inf)
    order = score.flip(-1).sort(dim=-1, descending=True, stable=True)
    index = torch.where(order.values == -torch.inf, -1, score.shape[-1] - 1 - order.indices)
    return selection.ascending(index[..., : layout.config.n_sel], layout.config.n_sel)


def _lowest(t: int) -> list[int]:
    """What the token at t takes of equal blocks: its own, and of those that have ended the first."""
    current = t // TIED.l_sel
    ended = (t + 1) // TIED.l_sel
    first = [j for j in range(ended) if j != current][: TIED.n_sel - 1]
    rest = [j for j in range(ended, current) if j not in first]
    chosen = sorted([*first, current, *rest])[: TIED.n_sel]
    return chosen + [-1] * (TIED.n_sel - len(chosen))


def _detect(backend: str, device: str) -> Evidence:
    wrong: list[str] = []
    for batch, kv_heads, tokens in ((1, 1, 24),) if interpreted(backend, device) else SHAPES:
        call = draw(tokens, device, config=TIED, batch=batch, kv_heads=kv_heads, group=16)
        equal = torch.zeros_like(call.compressed_keys(backend))
        lowest = torch.tensor([_lowest(t) for t in range(tokens)], device=device)[:, None]
        chosen = {
            "all rows": nsa.select_blocks(call.q, equal, TIED, tokens, backend=backend),
            "the last row": nsa.select_blocks(call.q[:, -1:], equal, TIED, tokens, backend=backend),
            "nsa_attention": replace(call, k=torch.zeros_like(call.k)).whole(backend)[1].block_indices,
        }
        for name, indices in chosen.items():
            other = int((indices != lowest[-indices.shape[1] :]).any(-1).sum())
            if other:
                shape = f"B {batch}, Hkv {kv_heads}, T {tokens}"
                wrong.append(f"{backend}, {shape}, {name}: {other} do not take the lowest of equal blocks")
    return Evidence(wrong=tuple(wrong))


def inject() -> AbstractContextManager[None]:
    """Put it into the product."""
    return in_every_backend("select_blocks", _jittered)


faulty, product = proofs(each_backend(_detect), inject)
