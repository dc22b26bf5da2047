"""What faulty ways to choose blocks share: healthy scores before the fault, and the form of the indices after it."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from nsa import geometry
from nsa.geometry import Layout
from nsa.torch_backend import scores
from regression.detectors import dense


def compressed_p(q: Tensor, k_cmp: Tensor, layout: Layout, scale: float) -> Tensor:
    """Eq. 8 summed over each group (Eq. 10): p [B, S, Hkv, compressed blocks]."""
    seen = geometry.num_visible_compressed(layout.positions, layout.config)
    visible = torch.arange(k_cmp.shape[1], device=q.device) < seen[:, None]
    s = dense.scores(q.detach(), k_cmp.detach(), scale).float().masked_fill(~visible, -torch.inf)
    p = (s - s.logsumexp(-1, keepdim=True).masked_fill(~visible.any(-1, keepdim=True), 0)).exp()
    return p.unflatten(1, (k_cmp.shape[2], -1)).sum(2).transpose(1, 2)


def block_scores(q: Tensor, k_cmp: Tensor, layout: Layout, scale: float) -> Tensor:
    """Eq. 9 of them: [B, S, Hkv, selection blocks]."""
    return scores.block_scores(compressed_p(q, k_cmp, layout, scale), layout.num_keys, layout.config)


def candidates(layout: Layout) -> tuple[Tensor, Tensor]:
    """(begun, forced), bool [S, 1, selection blocks]: what each query may choose, and what it must."""
    block = torch.arange(layout.max_blocks, device=layout.device)
    current = (layout.positions // layout.config.l_sel)[:, None, None]
    return block <= current, geometry.is_forced(block, current, layout.config)


def best(score: Tensor, n: int) -> Tensor:
    """The n best of [B, S, Hkv, blocks], ascending, padded with -1; a block of score -inf is none."""
    top = score.topk(min(n, score.shape[-1]))
    return ascending(torch.where(top.values == -torch.inf, -1, top.indices), n)


def ascending(chosen: Tensor, n: int) -> Tensor:
    """Indices in ascending order, those that are negative turned into -1 at the end; n columns."""
    beyond = torch.iinfo(torch.int32).max
    ordered = torch.where(chosen < 0, beyond, chosen).sort(-1).values
    return pad(torch.where(ordered == beyond, -1, ordered), (0, n - ordered.shape[-1]), value=-1).int()
