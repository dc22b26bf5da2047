"""What a choice of blocks is like: overlaps, unions, distances, popularity, and the scores that it holds.

Plain functions over block indices [rows, H, n] (int, ascending, -1 for none) of H key/value heads, in the order of the
rows; results are float64 [H]. `record.HeadCurves` says what each figure means. No tensor here grows with the square of
the rows: a row is compared with one other, or sorted with its neighbours.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nsa.config import NSAConfig
from nsa.geometry import is_forced, num_visible_compressed
from nsa.torch_backend.scores import block_scores


def jaccard(a: Tensor, b: Tensor) -> Tensor:
    """a, b [..., n] of distinct indices -> float64 [...]: blocks in both over blocks in either; 1 if both are empty."""
    both = ((a[..., :, None] == b[..., None, :]) & (a[..., :, None] >= 0)).sum((-1, -2))
    either = (a >= 0).sum(-1) + (b >= 0).sum(-1) - both
    return torch.where(either > 0, both.double() / either.clamp(min=1), 1.0)


def at_lag(indices: Tensor, lag: int) -> Tensor:
    """Mean Jaccard index of rows t and t + lag -> [H]."""
    return jaccard(indices[:-lag], indices[lag:]).mean(0)


def union_size(indices: Tensor, count: int) -> Tensor:
    """Mean number of distinct blocks in full tiles of `count` rows side by side -> [H]."""
    tiles = indices.shape[0] // count
    together = indices[: tiles * count].unflatten(0, (tiles, count)).transpose(1, 2).flatten(2)  # [tiles, H, count * n]
    ordered = together.sort(-1).values
    first = torch.ones_like(ordered, dtype=torch.bool)
    first[..., 1:] = ordered[..., 1:] != ordered[..., :-1]
    return (first & (ordered >= 0)).sum(-1).double().mean(0)


def without_forced(indices: Tensor, positions: Tensor, config: NSAConfig) -> Tensor:
    """The indices with -1 in place of the blocks that a row at these positions (int [rows]) is forced to take."""
    forced = is_forced(indices, (positions // config.l_sel)[:, None, None], config)
    return torch.where(forced, -1, indices)


def distance_edges(num_blocks: int) -> list[int]:
    """1, 2, 4, ...: the last one is above every distance among so many blocks."""
    return [1 << i for i in range(max(num_blocks - 1, 0).bit_length() + 1)]


def distances(indices: Tensor, positions: Tensor, l_sel: int, num_blocks: int) -> Tensor:
    """Share of the chosen blocks in each bin of `distance_edges` -> [H, bins]; in blocks, from the row's own."""
    edges = torch.tensor(distance_edges(num_blocks), device=indices.device)
    far = ((positions // l_sel)[:, None, None] - indices).contiguous()
    bins = torch.bucketize(far, edges, right=True).masked_fill(indices < 0, len(edges))
    counts = torch.stack([bins[:, head].flatten().bincount(minlength=len(edges) + 1) for head in range(bins.shape[1])])
    chosen = counts[:, : len(edges)].double()
    return chosen / chosen.sum(-1, keepdim=True).clamp(min=1)


def popularity(indices: Tensor, positions: Tensor, config: NSAConfig) -> Tensor:
    """Maximum over mean of how often a block is chosen -> [H].

    `indices` are free choices; the mean is over the blocks that the last row may choose freely, which are those that
    any row may.
    """
    last = int(positions.max()) // config.l_sel
    blocks = torch.arange(last + 1, device=indices.device)
    could = ~is_forced(blocks, last, config)
    counts = [(indices[:, head].flatten() + 1).bincount(minlength=last + 2)[1:] for head in range(indices.shape[1])]
    chosen = torch.stack(counts).double()[:, could]
    return chosen.amax(-1) / chosen.mean(-1).clamp(min=torch.finfo(torch.float64).tiny)


def most_alike(earlier: Tensor, later: Tensor) -> float:
    """Of each head of the later layer the mean Jaccard index with the earlier layer's head most like it; their mean."""
    heads = range(earlier.shape[1])
    alike = torch.stack([jaccard(earlier[:, head, None], later).mean(0) for head in heads])  # [earlier H, later H]
    return float(alike.amax(0).mean())


def scores(q: Tensor, k_cmp: Tensor, positions: Tensor, num_tokens: int, config: NSAConfig) -> Tensor:
    """Eq. 8 to 10: q [rows, Hq, Dk] at these positions, k_cmp [slots, H, Dk] -> float32 [rows, H, blocks].

    Of one sequence of `num_tokens` tokens. What the backends choose by, written without their chunks.
    """
    group = q.shape[1] // k_cmp.shape[1]
    s = torch.einsum("rhgd,chd->rhgc", q.float().unflatten(1, (-1, group)), k_cmp.float()) * q.shape[-1] ** -0.5
    visible = torch.arange(k_cmp.shape[0], device=q.device) < num_visible_compressed(positions, config)[:, None]
    p = s.masked_fill(~visible[:, None, None], -torch.inf).softmax(-1).nan_to_num(0.0).sum(2)
    return block_scores(p, num_tokens, config)


def held(score: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """(mass [H], sink [H]): mean share of the scores [rows, H, blocks] in the chosen blocks, and in the first block."""
    total = score.sum(-1).clamp(min=torch.finfo(torch.float32).tiny)
    chosen = score.gather(-1, indices.clamp(min=0).long()).masked_fill(indices < 0, 0).sum(-1)
    return (chosen / total).double().mean(0), (score[..., 0] / total).double().mean(0)
