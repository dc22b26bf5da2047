"""The selected branch from the inverted index: for each key block, the queries that chose it.

A query reads n blocks of l' keys; gathering those per query would move l'/G times more than gathering queries per
block does. So (query, block) pairs are grouped by block into tiles (`grouping`), each tile is one small attention,
and a query's n partial results are merged.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nsa.geometry import Layout
from nsa.gradients import without_second_gradient
from nsa.torch_backend.grouping import add_rows, batches, merge, steps, sum_over_blocks
from nsa.torch_backend.rows import compute_dtype, from_key_rows, from_query_rows, key_rows, query_rows, without_views
from nsa.torch_backend.tile import attend, attend_backward, finite, mark, without_autocast

MANY = 256  # (query, block) pairs from which on it pays to prepare every key once


class _Keys:
    """Keys, marked, and values, finite, tile by tile; those of a few queries without a pass over all T."""

    def __init__(self, k: Tensor, v: Tensor, *, few: bool) -> None:
        self.k, self.v, self.few, self.num_keys = k.transpose(1, 2), v.transpose(1, 2), few, k.shape[1]
        if not few:
            keys, vals = key_rows(k), key_rows(v)
            self.k, self.v = mark(keys, keys, vals).flatten(0, 1), finite(vals).flatten(0, 1)

    def tiles(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """index [tiles, l'] of the flattened keys [kv rows · T] -> ([tiles, l', Dk], [tiles, l', Dv])."""
        if not self.few:
            return self.k[index], self.v[index]
        kv_row, token = index // self.num_keys, index % self.num_keys
        place = (kv_row // self.k.shape[1], kv_row % self.k.shape[1], token)
        keys, vals = self.k[place].to(compute_dtype(self.k)), self.v[place].to(compute_dtype(self.v))
        return mark(keys, keys, vals), finite(vals)


def forward(
    q: Tensor,  # [B, S, Hq, Dk]
    k: Tensor,  # [B, T, Hkv, Dk]
    v: Tensor,  # [B, T, Hkv, Dv]
    block_indices: Tensor,  # int32 [B, S, Hkv, n], distinct, -1 for none
    layout: Layout,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """(o, lse, keys read) over the tokens of each query's blocks at positions <= its own."""
    num_kv_heads, group = k.shape[2], q.shape[2] // k.shape[2]
    rows, keys = query_rows(q, num_kv_heads) * scale, _Keys(k, v, few=q.shape[1] * block_indices.shape[3] < MANY)
    rows = mark(rows, rows)
    o_rows = rows.new_empty(*rows.shape[:2], v.shape[3])
    lse_rows = rows.new_empty(rows.shape[:2])
    read = block_indices.new_empty(rows.shape[0], q.shape[1])
    for step in steps(block_indices, layout, group):
        part = slice(step.first * group, step.last * group)
        tiles, width = step.queries.shape
        o_tiles = rows.new_empty(tiles, width * group, v.shape[3])
        m_tiles, l_tiles = rows.new_empty(tiles, width * group), rows.new_empty(tiles, width * group)
        read_tiles = read.new_empty(tiles, width)
        for batch in batches(tiles, layout.config.l_sel * max(width * group, k.shape[3], v.shape[3])):
            visible, q_tiles = step.visible(batch), step.gather(rows[:, part], batch)
            m_tiles[batch], l_tiles[batch] = attend(q_tiles, *keys.tiles(step.keys[batch]), visible, o_tiles[batch])
            read_tiles[batch] = visible.sum(-1, dtype=read.dtype)
        o, lse = merge(o_tiles, m_tiles, l_tiles, step)
        o_rows[:, part], lse_rows[:, part] = o.view_as(o_rows[:, part]), lse.view_as(lse_rows[:, part])
        read[:, step.first : step.last] = (
            read_tiles.view(-1)[step.places].sum(-1).view(rows.shape[0], step.last - step.first)
        )
    o, lse = without_views(
        from_query_rows(o_rows, q.shape, num_kv_heads).to(q.dtype),
        from_query_rows(lse_rows[..., None], q.shape, num_kv_heads)[..., 0],
    )
    keys_read = read.view(q.shape[0], num_kv_heads, q.shape[1]).transpose(1, 2)
    return o, lse, keys_read


def backward(
    do: Tensor, dlse: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, block_indices: Tensor,
    layout: Layout, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(dq, dk, dv), from what `forward` was given and gave; dk and dv in at least float32, for sums over ranks."""
    num_kv_heads, group = k.shape[2], q.shape[2] // k.shape[2]
    rows, keys, vals = finite(query_rows(q, num_kv_heads) * scale), finite(key_rows(k)), finite(key_rows(v))
    keys_flat, vals_flat = keys.flatten(0, 1), vals.flatten(0, 1)
    delta = (do.to(rows.dtype) * o).sum(-1) - dlse
    do_rows, delta_rows = query_rows(do, num_kv_heads), query_rows(delta[..., None], num_kv_heads)
    lse_rows = mark(query_rows(lse[..., None], num_kv_heads), do_rows)
    do_rows = finite(do_rows)
    dq, dk, dv = torch.empty_like(rows), torch.zeros_like(keys), torch.zeros_like(vals)
    for step in steps(block_indices, layout, group):
        part = slice(step.first * group, step.last * group)
        tiles, width = step.queries.shape
        dq_tiles = rows.new_empty(tiles, width * group, q.shape[3])
        for batch in batches(tiles, layout.config.l_sel * max(width * group, k.shape[3], v.shape[3])):
            index = step.keys[batch]
            dk_tiles, dv_tiles = attend_backward(
                step.gather(rows[:, part], batch),
                keys_flat[index],
                vals_flat[index],
                step.gather(do_rows[:, part], batch),
                step.gather(lse_rows[:, part], batch)[..., 0],
                step.gather(delta_rows[:, part], batch)[..., 0],
                step.visible(batch),
                dq_tiles[batch],
            )
            add_rows(dk.view_as(keys_flat), index, dk_tiles)
            add_rows(dv.view_as(vals_flat), index, dv_tiles)
        dq[:, part] = sum_over_blocks(dq_tiles, None, step).view_as(dq[:, part])
    dq = from_query_rows(dq * scale, q.shape, num_kv_heads).to(q.dtype)
    return dq, from_key_rows(dk, k.shape), from_key_rows(dv, v.shape)


class SelectedAttention(torch.autograd.Function):
    """`forward` for autograd."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, block_indices: Tensor, layout: Layout, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        o, lse, keys_read = forward(q, k, v, block_indices, layout, scale)
        ctx.save_for_backward(q, k, v, o, lse, block_indices)
        ctx.more = layout, scale
        ctx.mark_non_differentiable(keys_read)
        return o, lse, keys_read

    @staticmethod
    @without_second_gradient
    @without_autocast
    def backward(ctx: Any, do: Tensor, dlse: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        gradients = backward(do, dlse, *ctx.saved_tensors, *ctx.more)
        return *(g.to(do.dtype) for g in gradients), None, None, None
