"""dup-blocks. Reported: `unique_consecutive(dim=-1)` makes the forced blocks distinct, and fast.

Really: with `dim` it compares whole slices. A column goes only where it equals its neighbour in every row, so rows
keep duplicates, and what a row keeps depends on its batch.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import replace

import torch
from torch import Tensor

from nsa.geometry import Layout
from nsa.torch_backend.scores import select_blocks as healthy
from regression.contract import Evidence, Incident, ReproVerdict
from regression.detectors.backends import COMPILING_S, each_backend, in_every_backend, interpreted, proofs
from regression.detectors.calls import Call, draw
from regression.detectors.selection import ascending

INCIDENT = Incident(
    id="dup-blocks",
    symptom="the fix for slow torch.unique: unique_consecutive(dim=-1)",
    cause="it compares whole slices: rows keep duplicates, and a row depends on its batch",
    detector="block sets distinct in every row; a row alone chooses what it chooses in a batch",
    expects=ReproVerdict.WRONG,
    floor_s=COMPILING_S,
)


def _unique_slices(q: Tensor, k_cmp: Tensor, layout: Layout, scale: float, lse: Tensor | None = None) -> Tensor:
    """Forced blocks listed beside the best ones, sorted, and made "unique" as in the report."""
    config, device = layout.config, q.device
    left = config.n_sel - config.init_blocks - config.local_blocks
    free = replace(config, n_sel=max(left, 1), init_blocks=0, local_blocks=0)
    best = healthy(q, k_cmp, replace(layout, config=free), scale, lse)
    local = layout.positions[:, None] // config.l_sel - torch.arange(config.local_blocks, device=device)
    first = torch.arange(config.init_blocks, device=device).expand(layout.num_queries, -1)
    forced = torch.cat([first, local.clamp(min=0)], -1)[None, :, None].expand(*best.shape[:3], -1)
    listed = torch.cat([best, forced], -1).sort(-1).values
    return ascending(torch.unique_consecutive(listed, dim=-1), config.n_sel)


def _broken(call: Call, backend: str) -> list[str]:
    """Rows that list a block twice, and rows that choose otherwise without their batch."""
    chosen = call.select(backend)
    neighbours = (chosen[..., 1:] == chosen[..., :-1]) & (chosen[..., 1:] >= 0)
    found = [f"{backend}: {twice} rows list a block twice"] if (twice := int(neighbours.any(-1).sum())) else []
    for b in range(chosen.shape[0]):
        one = replace(call, q=call.q[b : b + 1], k=call.k[b : b + 1], v=call.v[b : b + 1], gates=call.gates[b : b + 1])
        alone = one.select(backend)
        if not torch.equal(alone, chosen[b : b + 1]):
            found.append(f"{backend}: sequence {b} alone chooses otherwise than in its batch")
    return found


def _detect(backend: str, device: str) -> Evidence:
    tokens, last = (24, range(22, 24)) if interpreted(backend, device) else (48, range(32, 48))
    call = draw(tokens, device, batch=2)
    parts = (call, *(call.rows(t, t + 1) for t in last))  # prefill, and decode of some tokens
    return Evidence(wrong=tuple(found for part in parts for found in _broken(part, backend)))


def inject() -> AbstractContextManager[None]:
    """Put it into the product."""
    return in_every_backend("select_blocks", _unique_slices)


faulty, product = proofs(each_backend(_detect), inject)
