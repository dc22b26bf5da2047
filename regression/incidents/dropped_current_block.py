"""dropped-current-block. Reported: all-inf mask rows in early steps, cured by a guard for empty rows.

Really: batched selection kept only blocks that had ended, and so removed the block that holds t after it had been
forced: the first l' - 1 rows had nothing to attend to. Sequential selection did not.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from nsa.geometry import Layout
from nsa.torch_backend.scores import select_blocks as healthy
from regression.contract import Evidence, Incident, ReproVerdict
from regression.detectors import selection
from regression.detectors.backends import COMPILING_S, each_backend, in_every_backend, interpreted, proofs
from regression.detectors.calls import Call, draw

INCIDENT = Incident(
    id="dropped-current-block",
    symptom="all-inf mask rows in the first tokens",
    cause="batched selection removed the block that holds t, though forced",
    detector="forced blocks in every row; batched selection equals one token at a time",
    expects=ReproVerdict.WRONG,
    floor_s=COMPILING_S,
)


def _ended_blocks_only(q: Tensor, k_cmp: Tensor, layout: Layout, scale: float, lse: Tensor | None = None) -> Tensor:
    """Batched: forced first, and then whatever has not ended at t is taken out. One query: as it should be."""
    if layout.num_queries == 1:
        return healthy(q, k_cmp, layout, scale, lse)
    config, forced = layout.config, selection.candidates(layout)[1]
    score = selection.block_scores(q, k_cmp, layout, scale).masked_fill(forced, torch.inf)
    ends = (torch.arange(score.shape[-1], device=q.device) + 1) * config.l_sel - 1
    ended = ends <= layout.positions[:, None, None]
    return selection.best(score.masked_fill(~ended, -torch.inf), config.n_sel)


def _broken(call: Call, backend: str, alone: Sequence[int]) -> list[str]:
    """Rows without a forced block, rows without any, and rows that choose otherwise `alone`."""
    chosen, size = call.select(backend), call.config.l_sel
    found = []
    for t in range(chosen.shape[1]):
        current, row = t // size, chosen[:, t]
        local = range(max(current - call.config.local_blocks + 1, 0), current + 1)
        forced = {*range(min(call.config.init_blocks, current + 1)), *local}
        missing = [j for j in sorted(forced) if not bool((row == j).any(-1).all())]
        if missing:
            found.append(f"{backend}: row {t} lacks the forced blocks {missing}")
    empty = int((chosen < 0).all(-1).sum())
    if empty:
        found.append(f"{backend}: {empty} rows have no block at all")
    split = [t for t in alone if not torch.equal(call.rows(t, t + 1).select(backend), chosen[:, t : t + 1])]
    if split:
        found.append(f"{backend}: rows {split} choose otherwise when alone")
    return found


def _detect(backend: str, device: str) -> Evidence:
    alone = (0, 22) if interpreted(backend, device) else tuple(range(24))
    return Evidence(wrong=tuple(_broken(draw(24, device), backend, alone)))


def inject() -> AbstractContextManager[None]:
    """Put it into the product."""
    return in_every_backend("select_blocks", _ended_blocks_only)


faulty, product = proofs(each_backend(_detect), inject)
