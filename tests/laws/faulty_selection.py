"""Faulty ways to choose blocks: one choice over dense scores, in which one step is done wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from nsa import geometry
from nsa.geometry import Layout
from tests.laws.faults import ORIGINAL, dense_scores

Weigh = Callable[[int, int, Layout], float]


def overlap(c: int, j: int, layout: Layout) -> float:
    return geometry.overlap_tokens(c, j, layout.config) / layout.config.d


def printed_minus_sign(c: int, j: int, layout: Layout) -> float:
    """Eq. 9 to the letter: c = j·l'/d − m − n, which reaches backwards only."""
    config = layout.config
    reached = [
        j * config.l_sel // config.d - m - n
        for m in range(config.l_sel // config.d)
        for n in range(config.l // config.d)
    ]
    return float(reached.count(c))


@dataclass(frozen=True)
class Choice:
    """`select_blocks` over dense scores; right as it stands, faulty with a field changed."""

    weigh: Weigh = overlap
    dtype: torch.dtype = torch.float32
    """Of the summed scores."""
    normalise_over_all: bool = False
    """Invisible blocks are in the softmax, and zeroed after it."""
    first_head_decides: bool = False
    force_current: bool = True
    forced_outside_n: bool = False
    jitter: bool = False
    """Ties are broken by 1e-8 · index, the order of equal scores left to the sort."""

    def __call__(self, q: Tensor, k_cmp: Tensor, layout: Layout, scale: float, lse: Tensor | None = None) -> Tensor:
        score = self._block_scores(q, k_cmp, layout, scale)
        config = layout.config
        block = torch.arange(score.shape[-1], device=q.device)
        current = (layout.positions // config.l_sel)[:, None, None]  # [S, 1, 1] against [B, S, Hkv, blocks]
        candidate, forced = block <= current, geometry.is_forced(block, current, config)
        if not self.force_current:
            candidate = candidate & (block < current)
        if self.jitter:
            score = (score - 1e-8 * block).flip(-1)
            candidate, forced = candidate.flip(-1), forced.flip(-1)
        if self.forced_outside_n:
            best = self._best(score.masked_fill(forced | ~candidate, -torch.inf), config.n_sel)
            return torch.cat([best, self._best(score.masked_fill(~forced, -torch.inf), config.local_blocks)], -1)
        score = score.masked_fill(forced, torch.inf).masked_fill(~candidate, -torch.inf)
        chosen = self._best(score, config.n_sel)
        if self.jitter:
            chosen = torch.where(chosen < 0, -1, score.shape[-1] - 1 - chosen)
        return _padded_at_the_end(chosen)

    def _block_scores(self, q: Tensor, k_cmp: Tensor, layout: Layout, scale: float) -> Tensor:
        """[B, S, Hkv, blocks]."""
        s = dense_scores(q.detach(), k_cmp, scale)
        seen = geometry.num_visible_compressed(layout.positions, layout.config)
        visible = torch.arange(s.shape[-1], device=q.device) < seen[:, None]
        shown = s if self.normalise_over_all else s.masked_fill(~visible, -torch.inf)
        p = shown.softmax(-1).masked_fill(~visible, 0).nan_to_num(0.0)
        heads = p.unflatten(1, (k_cmp.shape[2], -1))
        group = heads[:, :, 0] if self.first_head_decides else heads.sum(2)
        blocks = geometry.num_selection_blocks(layout.num_keys, layout.config)
        weights = torch.tensor([[self.weigh(c, j, layout) for j in range(blocks)] for c in range(s.shape[-1])])
        weights = weights.view(s.shape[-1], blocks).to(q.device)
        return (group.to(self.dtype).float() @ weights).to(self.dtype).float().transpose(1, 2)

    @staticmethod
    def _best(score: Tensor, n: int) -> Tensor:
        order = score.sort(dim=-1, descending=True, stable=True)
        best = torch.where(order.values == -torch.inf, -1, order.indices)[..., :n]
        return torch.nn.functional.pad(best, (0, n - best.shape[-1]), value=-1).int()


def _padded_at_the_end(chosen: Tensor) -> Tensor:
    beyond = torch.iinfo(torch.int32).max
    ordered = torch.where(chosen < 0, beyond, chosen).sort(-1).values
    return torch.where(ordered == beyond, -1, ordered).int()


def slices_made_unique(q: Tensor, k_cmp: Tensor, layout: Layout, scale: float, lse: Tensor | None = None) -> Tensor:
    """Forced blocks are listed beside the best ones; `unique_consecutive(dim=-1)` drops only columns that agree in
    every row, so rows keep duplicates, and what a row keeps depends on the others."""
    chosen = ORIGINAL.select_blocks(q, k_cmp, layout, scale, lse)
    current = (layout.positions // layout.config.l_sel).int()[None, :, None, None].expand_as(chosen[..., :1])
    listed = torch.cat([chosen[..., :-1], current], -1)
    return torch.unique_consecutive(_padded_at_the_end(listed), dim=-1)


def decode_forgets_the_forced(
    q: Tensor, k_cmp: Tensor, layout: Layout, scale: float, lse: Tensor | None = None
) -> Tensor:
    """Prefill and decode choose in different code."""
    if layout.num_queries != 1:
        return ORIGINAL.select_blocks(q, k_cmp, layout, scale, lse)
    return Choice(force_current=False)(q, k_cmp, layout, scale)
