"""The compressed branch and the window: attention of each query over one interval of keys, forward and backward.

Queries go chunk by chunk against the span of keys that any of them may see, so memory grows with S, not S².
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from nsa.gradients import without_second_gradient
from nsa.torch_backend.rows import from_key_rows, from_query_rows, key_rows, query_rows, without_views
from nsa.torch_backend.tile import attend, attend_backward, finite, log_sum_exp, mark, without_autocast

Span = Callable[[int, int], tuple[int, int]]


def forward(
    q: Tensor,  # [B, S, Hq, Dk]
    k: Tensor,  # [B, T, Hkv, Dk]
    v: Tensor,  # [B, T, Hkv, Dv]
    lo: Tensor,  # int32 [S], ascending
    hi: Tensor,  # int32 [S], ascending
    span: Span,  # bounds on the keys of a range of queries, known on the host
    chunk: int,  # tokens per step
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """(o, lse, keys read) of query i over the keys lo[i] <= key < hi[i]."""
    batch, length, heads = q.shape[:3]
    num_kv_heads, group = k.shape[2], heads // k.shape[2]
    start, end = span(0, length)
    rows, keys, vals = query_rows(q, num_kv_heads) * scale, key_rows(k[:, start:end]), key_rows(v[:, start:end])
    rows, keys, vals = mark(rows, rows), mark(keys, keys, vals), finite(vals)
    o_rows = rows.new_zeros(*rows.shape[:2], v.shape[3])
    lse_rows = rows.new_full(rows.shape[:2], -torch.inf)
    read = torch.zeros(length, dtype=torch.int32, device=q.device)
    for first, last, k0, k1 in chunks(length, chunk, span):
        if k0 == k1:
            continue
        part = slice(first * group, last * group)
        visible = seen_keys(lo, hi, first, last, k0, k1)
        own = slice(k0 - start, k1 - start)
        m, l = attend(rows[:, part], keys[:, own], vals[:, own], visible, o_rows[:, part])
        lse_rows[:, part] = log_sum_exp(m, l)
        read[first:last] = visible[0].sum(-1, dtype=torch.int32)
    o, lse = without_views(
        from_query_rows(o_rows, q.shape, num_kv_heads).to(q.dtype),
        from_query_rows(lse_rows[..., None], q.shape, num_kv_heads)[..., 0],
    )
    return o, lse, read[:, None].expand(batch, length, num_kv_heads)


def backward(
    do: Tensor, dlse: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, lo: Tensor, hi: Tensor,
    span: Span, chunk: int, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(dq, dk, dv), from what `forward` was given and gave; dk and dv in at least float32, for sums over ranks."""
    num_kv_heads, group = k.shape[2], q.shape[2] // k.shape[2]
    rows, keys, vals = finite(query_rows(q, num_kv_heads) * scale), finite(key_rows(k)), finite(key_rows(v))
    delta = (do.to(rows.dtype) * o).sum(-1) - dlse
    do_rows, delta_rows = query_rows(do, num_kv_heads), query_rows(delta[..., None], num_kv_heads)[..., 0]
    lse_rows = mark(query_rows(lse[..., None], num_kv_heads), do_rows)[..., 0]
    do_rows = finite(do_rows)
    dq, dk, dv = torch.zeros_like(rows), torch.zeros_like(keys), torch.zeros_like(vals)
    for first, last, k0, k1 in chunks(q.shape[1], chunk, span):
        if k0 == k1:
            continue
        part = slice(first * group, last * group)
        visible = seen_keys(lo, hi, first, last, k0, k1)
        dk_part, dv_part = attend_backward(
            rows[:, part],
            keys[:, k0:k1],
            vals[:, k0:k1],
            do_rows[:, part],
            lse_rows[:, part],
            delta_rows[:, part],
            visible,
            dq[:, part],
        )
        dk[:, k0:k1] += dk_part
        dv[:, k0:k1] += dv_part
    dq = from_query_rows(dq * scale, q.shape, num_kv_heads).to(q.dtype)
    return dq, from_key_rows(dk, k.shape), from_key_rows(dv, v.shape)


class CompressedWindowAttention(torch.autograd.Function):
    """`forward` for autograd."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, lo: Tensor, hi: Tensor, span: Span, chunk: int, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        o, lse, keys_read = forward(q, k, v, lo, hi, span, chunk, scale)
        ctx.save_for_backward(q, k, v, o, lse, lo, hi)
        ctx.more = span, chunk, scale
        ctx.mark_non_differentiable(keys_read)
        return o, lse, keys_read

    @staticmethod
    @without_second_gradient
    @without_autocast
    def backward(ctx: Any, do: Tensor, dlse: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        gradients = backward(do, dlse, *ctx.saved_tensors, *ctx.more)
        return *(g.to(do.dtype) for g in gradients), None, None, None, None, None


def chunks(length: int, chunk: int, span: Span) -> list[tuple[int, int, int, int]]:
    """(first query, last query, first key, last key) of each step."""
    firsts = range(0, length, chunk)
    return [(first, min(first + chunk, length), *span(first, min(first + chunk, length))) for first in firsts]


def seen_keys(lo: Tensor, hi: Tensor, first: int, last: int, k0: int, k1: int) -> Tensor:
    """bool [1, queries, keys]."""
    keys = torch.arange(k0, k1, device=lo.device)
    return ((keys >= lo[first:last, None]) & (keys < hi[first:last, None]))[None]
