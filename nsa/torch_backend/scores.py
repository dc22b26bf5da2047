"""Scores of the selection blocks and the n best of them (Eq. 8 to 12), chunk by chunk."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from nsa import geometry
from nsa.config import NSAConfig
from nsa.geometry import Layout
from nsa.torch_backend.compressed_window import chunks, seen_keys
from nsa.torch_backend.rows import key_rows, query_rows

CHUNK = 512
_LAST = 2**31 - 1  # above any block index


def select_blocks(q: Tensor, k_cmp: Tensor, layout: Layout, scale: float, lse: Tensor | None = None) -> Tensor:
    """int32 [B, S, Hkv, n]; see `nsa.select_blocks`."""
    batch, length, heads = q.shape[:3]
    num_kv_heads, group = k_cmp.shape[2], heads // k_cmp.shape[2]
    rows, keys = query_rows(q, num_kv_heads), key_rows(k_cmp)
    lse_rows = None if lse is None else query_rows(lse[..., None], num_kv_heads)[..., 0]
    lo, hi = layout.compressed_interval
    chosen = torch.empty(rows.shape[0], length, layout.config.n_sel, dtype=torch.int32, device=q.device)
    for first, last, k0, k1 in chunks(length, CHUNK, layout.compressed_span):
        part = slice(first * group, last * group)
        visible = seen_keys(lo, hi, first, last, k0, k1)[:, :, None]
        s = (rows[:, part] @ keys[:, k0:k1].mT * scale).unflatten(1, (-1, group)).masked_fill_(~visible, -torch.inf)
        row_lse = s.logsumexp(-1) if lse_rows is None else lse_rows[:, part].unflatten(1, (-1, group))
        row_lse = row_lse.masked_fill(row_lse == -torch.inf, 0)
        p = _added_heads(s.sub_(row_lse[..., None]).exp_().float())
        if layout.cu_seqlens is not None:
            p = _in_document(p, lo[first:last])
        num_tokens = layout.num_keys - length + last  # no later token matters to these queries
        chosen[:, first:last] = _best(block_scores(p, num_tokens, layout.config), layout.positions[first:last], layout)
    return chosen.view(batch, num_kv_heads, length, layout.config.n_sel).transpose(1, 2)


def _added_heads(p: Tensor) -> Tensor:
    """Eq. 10: p [kv rows, queries, G, slots], overwritten, summed over the heads: [kv rows, queries, slots].

    Half after half, because `sum` adds the last columns in another order than the others: equal scores would differ
    in the last bit, and the tie would not go to the lower index (seen with AVX-512, 16 heads and 37 columns).
    """
    while (heads := p.shape[2]) > 1:
        p[:, :, : heads // 2] += p[:, :, heads - heads // 2 :]
        p = p[:, :, : heads - heads // 2]
    return p[:, :, 0]


def _in_document(p: Tensor, lo: Tensor) -> Tensor:
    """Shift each row so that column c is block c of the query's own document; 0 behind the last visible block."""
    own = lo[:, None] + torch.arange(p.shape[-1], device=p.device)
    beyond = own >= p.shape[-1]
    return p.gather(-1, own.masked_fill(beyond, 0).expand(p.shape)).masked_fill_(beyond, 0)


def _best(score: Tensor, positions: Tensor, layout: Layout) -> Tensor:
    """score float32 [kv rows, queries, blocks] -> int32 [kv rows, queries, n] ascending, -1 padded."""
    config = layout.config
    blocks = torch.arange(score.shape[-1], device=score.device)
    current = (positions // config.l_sel)[:, None]
    forced = geometry.is_forced(blocks, current, config)
    score = torch.where(forced, torch.inf, score.nan_to_num(nan=0.0))
    # One integer holds the float32 score, whose bits order like the number where it is not negative, and, for
    # ties, the lower index: exact, where adding a small multiple of the index to the score is not.
    ranking = ((score.view(torch.int32).long() << 32) | (_LAST - blocks)).masked_fill_(blocks > current, -1)
    best = ranking.topk(min(config.n_sel, ranking.shape[-1]), sorted=False).values
    indices = torch.where(best < 0, _LAST, _LAST - (best & _LAST)).sort(-1).values
    indices = indices.masked_fill_(indices == _LAST, -1)
    return pad(indices, (0, config.n_sel - indices.shape[-1]), value=-1).int()


def block_scores(p: Tensor, num_tokens: int, config: NSAConfig) -> Tensor:
    """Eq. 9: p [..., blocks c] -> [..., blocks j of num_tokens]: each p by the tokens it shares with j, over d."""
    num_blocks, step = geometry.num_selection_blocks(num_tokens, config), config.l_sel // config.d
    offsets = geometry.overlap_offsets(config)
    missing = (num_blocks - 1) * step + offsets.stop - p.shape[-1]
    p = pad(p, (-offsets.start, max(missing, 0)))
    score = torch.zeros_like(p[..., :num_blocks])
    for i, weight in enumerate(geometry.overlap_weights(config)):
        score += weight * p[..., i : i + (num_blocks - 1) * step + 1 : step]
    return score
