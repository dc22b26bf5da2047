"""The executable specification: each query looks at exactly the keys it may see, one query at a time.

Plain PyTorch, any floating type up to float64, no speed. A key that a query may not see never meets it in
a product, so neither its value nor its NaN can reach the query, forward or backward.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from nsa import geometry
from nsa.config import NSAConfig
from nsa.geometry import Layout


def _attend(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Softmax attention of one query per head: q [B,H,G,Dk], k [B,H,L,Dk], v [B,H,L,Dv], visible [B,H,L] bool.

    Returns (o [B,H,G,Dv], lse [B,H,G], p [B,H,G,L]); a query that sees nothing gives 0, -inf, 0.
    """
    k, v = (x.masked_fill(~visible[..., None], 0) for x in (k, v))
    s = (q @ k.mT * scale).masked_fill(~visible[:, :, None], -torch.inf)
    lse = s.logsumexp(-1)
    p = (s - lse.masked_fill(lse == -torch.inf, 0)[..., None]).exp()
    return p @ v, lse, p


def _rows(layout: Layout) -> list[tuple[int, int, int]]:
    """(query, first token of its document, position in it) for each query."""
    if layout.cu_seqlens is None:
        offset = layout.num_keys - layout.num_queries
        return [(i, 0, offset + i) for i in range(layout.num_queries)]
    bounds = layout.cu_seqlens.tolist()
    return [(i, a, i - a) for a, b in pairwise(bounds) for i in range(a, b)]


def _first_slots(layout: Layout) -> dict[int, int]:
    """Where each document's compressed blocks begin: first token -> first slot."""
    bounds = [0, layout.num_keys] if layout.cu_seqlens is None else layout.cu_seqlens.tolist()
    first, slots = 0, {}
    for a, b in pairwise(bounds):
        slots[a] = first
        first += geometry.num_compressed_blocks(b - a, layout.config)
    return slots


def _grouped(q: Tensor, i: int, num_kv_heads: int) -> Tensor:
    """Query i as [B, Hkv, G, Dk] in at least float32."""
    row = q[:, i].to(torch.promote_types(q.dtype, torch.float32))
    return row.view(row.shape[0], num_kv_heads, row.shape[1] // num_kv_heads, row.shape[2])


def _heads_first(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32)).transpose(1, 2)  # [B, H, T, D]


def _stack(rows: list[tuple[Tensor, Tensor, Tensor]], q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of (o, lse, visible) -> o [B,S,Hq,Dv], lse [B,S,Hq], keys read int32 [B,S,Hkv]."""
    batch, _, heads, _ = q.shape
    if not rows:
        # of all three, so that each has a gradient: 0
        empty = (q.sum() + k.sum() + v.sum()).to(q.dtype).expand(batch, 0, heads, v.shape[-1])
        return (
            empty,
            empty.new_empty(batch, 0, heads, dtype=torch.float32),
            empty.new_empty(batch, 0, v.shape[2], dtype=torch.int32),
        )
    o, lse, visible = (torch.stack(column, 1) for column in zip(*rows, strict=True))
    return o.flatten(2, 3).to(q.dtype), lse.flatten(2, 3), visible.sum(-1, dtype=torch.int32)


def compress(x: Tensor, layout: Layout) -> Tensor:
    """phi = avg (Eq. 7): the mean of each block. x [B,T,H,D] -> [B,slots,H,D]."""
    config, wide = layout.config, x.to(torch.promote_types(x.dtype, torch.float32))
    bounds = [0, layout.num_keys] if layout.cu_seqlens is None else layout.cu_seqlens.tolist()
    blocks = [
        wide[:, first : first + config.l].mean(1)
        for a, b in pairwise(bounds)
        for first in range(a, b - config.l + 1, config.d)
    ]
    blocks += [wide.new_zeros(wide.shape[0], *wide.shape[2:])] * (layout.num_slots - len(blocks))
    return (torch.stack(blocks, 1) if blocks else wide[:, :0]).to(x.dtype)


def compressed_attention(
    q: Tensor, k_cmp: Tensor, v_cmp: Tensor, layout: Layout, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Eq. 7 with Eq. 5's attention: token t sees the blocks that end at or before it."""
    k, v, first_slots, rows = _heads_first(k_cmp), _heads_first(v_cmp), _first_slots(layout), []
    for i, start, t in _rows(layout):
        first, seen = first_slots[start], geometry.num_visible_compressed(t, layout.config)
        blocks = slice(first, first + seen)
        visible = torch.ones(k[:, :, blocks].shape[:3], dtype=torch.bool, device=q.device)
        o, lse, _ = _attend(_grouped(q, i, k.shape[1]), k[:, :, blocks], v[:, :, blocks], visible, scale)
        rows.append((o, lse, visible.sum(-1, keepdim=True)))
    return _stack(rows, q, k_cmp, v_cmp)


def select_blocks(q: Tensor, k_cmp: Tensor, layout: Layout, scale: float, lse: Tensor | None = None) -> Tensor:
    """Eq. 8 to 12: each group's best n blocks, forced ones first, ties to the lower index.

    The scores that are ranked are float32; what they are made of is float64, so that the order in which a sum was
    taken does not show in them, and equal scores are equal.
    """
    config, k, first_slots = layout.config, _heads_first(k_cmp.detach()).double(), _first_slots(layout)
    chosen = torch.full((*q.shape[:2], k.shape[1], config.n_sel), -1, dtype=torch.int32, device=q.device)
    for i, start, t in _rows(layout):
        first, seen, current = first_slots[start], geometry.num_visible_compressed(t, config), t // config.l_sel
        visible = torch.ones(*k.shape[:2], seen, dtype=torch.bool, device=q.device)
        keys = k[:, :, first : first + seen]
        p = _attend(_grouped(q.detach(), i, k.shape[1]).double(), keys, keys, visible, scale)[2]
        overlap = [[geometry.overlap_tokens(c, j, config) for j in range(current + 1)] for c in range(seen)]
        weights = torch.tensor(overlap, dtype=p.dtype, device=q.device).view(seen, current + 1) / config.d
        score = (p.sum(2) @ weights).float().nan_to_num(nan=0.0)  # [B, Hkv, blocks]; ranked in float32
        forced = [bool(geometry.is_forced(j, current, config)) for j in range(current + 1)]
        score[:, :, torch.tensor(forced, device=q.device)] = torch.inf
        best = score.sort(dim=-1, descending=True, stable=True).indices[..., : config.n_sel]
        chosen[:, i, :, : best.shape[-1]] = best.sort(-1).values.int()
    return chosen


def selected_attention(
    q: Tensor, k: Tensor, v: Tensor, block_indices: Tensor, layout: Layout, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Attention over the tokens of the chosen blocks at positions <= t, each once."""
    num_kv_heads, size = k.shape[2], layout.config.l_sel
    k, v_heads, rows = _heads_first(k), _heads_first(v), []
    for i, start, t in _rows(layout):
        blocks = torch.arange(t + 1, device=q.device) // size
        visible = (block_indices[:, i, :, :, None] == blocks).any(2)  # [B, Hkv, t+1]
        seen = slice(start, start + t + 1)
        o, lse, _ = _attend(_grouped(q, i, num_kv_heads), k[:, :, seen], v_heads[:, :, seen], visible, scale)
        rows.append((o, lse, visible.sum(-1, keepdim=True)))
    return _stack(rows, q, k, v)


def window_attention(q: Tensor, k: Tensor, v: Tensor, layout: Layout, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Attention over the w tokens t−w+1 … t."""
    k, v_heads, rows = _heads_first(k), _heads_first(v), []
    for i, start, t in _rows(layout):
        seen = slice(start + max(t - layout.config.w + 1, 0), start + t + 1)
        visible = torch.ones(k[:, :, seen].shape[:3], dtype=torch.bool, device=q.device)
        o, lse, _ = _attend(_grouped(q, i, k.shape[1]), k[:, :, seen], v_heads[:, :, seen], visible, scale)
        rows.append((o, lse, visible.sum(-1, keepdim=True)))
    return _stack(rows, q, k, v)


def combine(outputs: tuple[Tensor, Tensor, Tensor], gates: Tensor) -> Tensor:
    """Eq. 5: the gated sum of the branches. outputs 3 × [B,S,Hq,Dv], gates [B,S,Hq,3] -> [B,S,Hq,Dv]."""
    wide = torch.promote_types(outputs[0].dtype, torch.float32)
    weighted = [gate.to(wide)[..., None] * o.to(wide) for gate, o in zip(gates.unbind(-1), outputs, strict=True)]
    return torch.stack(weighted).sum(0).to(outputs[0].dtype)


def nsa_attention(q: Tensor, k: Tensor, v: Tensor, gates: Tensor, config: NSAConfig) -> Tensor:
    """The whole of NSA with phi = avg, for reading; q [B,S,Hq,Dk], k [B,T,Hkv,Dk], v [B,T,Hkv,Dv]."""
    layout, scale = Layout(q.shape[1], k.shape[1], config, q.device), q.shape[-1] ** -0.5
    k_cmp, v_cmp = compress(k, layout), compress(v, layout)
    o_compressed, _, _ = compressed_attention(q, k_cmp, v_cmp, layout, scale)
    block_indices = select_blocks(q, k_cmp, layout, scale)
    o_selected, _, _ = selected_attention(q, k, v, block_indices, layout, scale)
    o_window, _, _ = window_attention(q, k, v, layout, scale)
    return combine((o_compressed, o_selected, o_window), gates)
