"""Attention of each query over one interval of keys: the compressed branch (visible blocks) and the window.

Tiles of tokens × heads of a group share each key they load. Both ends of the intervals ascend with the queries, so
the keys of a tile are an interval too, and so are the queries of a tile of keys in the backward pass. Each loop has
three stretches: keys (queries) that only some rows see, those that all see and that need no mask, and again some.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from nsa.triton_backend import tuning
from nsa.triton_backend.launch import LOG2E, backward_rows, on_device, strides, unit_stride
from nsa.triton_backend.tile import (
    dot,
    finish,
    finite,
    load_rows,
    mark,
    online_softmax,
    product,
    rows_of,
    store_rows,
)


@triton.jit
def _stretches(first, last, all_from, all_to, STEP: tl.constexpr):
    """Ends of the first two of three stretches of `first` … `last`; the second, in whole steps, lies inside
    `all_from` … `all_to`."""
    some = first + tl.cdiv(tl.maximum(all_from - first, 0), STEP) * STEP
    return some, some + tl.maximum(tl.minimum(all_to, last) - some, 0) // STEP * STEP


@triton.jit
def _keys(k_base, k_s, v_base, v_s, first, end, DK: tl.constexpr, DKP: tl.constexpr,
          DV: tl.constexpr, DVP: tl.constexpr, BN: tl.constexpr):  # fmt: skip
    """(key index, k, v) of the keys first <= key < first + BN, 0 from `end` on (None: all are before it)."""
    key = (first + tl.arange(0, BN)).to(tl.int64)
    inside = None if end is None else key < end
    k = load_rows(k_base, key * k_s, inside, DK, DKP)
    return key, k, load_rows(v_base, key * v_s, inside, DV, DVP)


@triton.jit
def _forward(
    Q, K, V, LO, HI, O, LSE, READ, q_b, q_s, q_h, k_b, k_s, k_h, v_b, v_s, v_h, S, HQ, HKV, G, to_base_2,
    DK: tl.constexpr, DV: tl.constexpr, DKP: tl.constexpr, DVP: tl.constexpr,
    BT: tl.constexpr, GP: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    first_token, h, b = tl.program_id(0) * BT, tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    last_token = tl.minimum(first_token + BT, S) - 1
    token, g, real = rows_of(first_token, S, G, BT, GP)
    lo, hi = tl.load(LO + token, mask=real, other=0), tl.load(HI + token, mask=real, other=0)
    q = load_rows(Q + b * q_b, token * q_s + (h * G + g) * q_h, real, DK, DKP)
    q = mark(q, q)
    k_base, v_base = K + b * k_b + h * k_h, V + b * v_b + h * v_h
    first, end = tl.load(LO + first_token), tl.load(HI + last_token)
    some, most = _stretches(first, end, tl.load(LO + last_token), tl.load(HI + first_token), BN)

    top = tl.full([BT * GP], float("-inf"), tl.float32)
    total, read = tl.zeros([BT * GP], tl.float32), tl.zeros([BT * GP], tl.int32)
    acc = tl.zeros([BT * GP, DVP], tl.float32)
    for stretch in tl.static_range(3):
        if stretch == 1:
            for at in range(some, most, BN):
                _, k, v = _keys(k_base, k_s, v_base, v_s, at, None, DK, DKP, DV, DVP, BN)
                top, total, acc = online_softmax(product(q, k), v, top, total, acc, to_base_2)
                read += BN
        else:
            begin = first if stretch == 0 else most
            stop = tl.minimum(some, end) if stretch == 0 else end
            for at in range(begin, stop, BN):
                key, k, v = _keys(k_base, k_s, v_base, v_s, at, end, DK, DKP, DV, DVP, BN)
                visible = (key[None, :] >= lo[:, None]) & (key[None, :] < hi[:, None])
                s = tl.where(visible, product(q, mark(mark(k, v), k)), float("-inf"))
                top, total, acc = online_softmax(s, finite(v), top, total, acc, to_base_2)
                read += tl.sum(visible.to(tl.int32), axis=1)
    o, lse = finish(top, total, acc, to_base_2)
    row = (b * S + token) * HQ + h * G + g
    store_rows(O, row * DV, real, o, DV, DVP)
    tl.store(LSE + row, lse, mask=real)
    tl.store(READ + (b * S + token) * HKV + h, read, mask=real & (g == 0))


@triton.jit
def _backward_q(
    Q, K, V, DO, LO, HI, LSE, DELTA, DQ, q_b, q_s, q_h, k_b, k_s, k_h, v_b, v_s, v_h, S, HQ, G, scale, to_base_2,
    DK: tl.constexpr, DV: tl.constexpr, DKP: tl.constexpr, DVP: tl.constexpr,
    BT: tl.constexpr, GP: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    first_token, h, b = tl.program_id(0) * BT, tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    last_token = tl.minimum(first_token + BT, S) - 1
    token, g, real = rows_of(first_token, S, G, BT, GP)
    lo, hi = tl.load(LO + token, mask=real, other=0), tl.load(HI + token, mask=real, other=0)
    row = (b * S + token) * HQ + h * G + g
    q = load_rows(Q + b * q_b, token * q_s + (h * G + g) * q_h, real, DK, DKP)
    do = load_rows(DO, row * DV, real, DV, DVP)
    lse, delta = tl.load(LSE + row, mask=real, other=0.0), tl.load(DELTA + row, mask=real, other=0.0)
    k_base, v_base = K + b * k_b + h * k_h, V + b * v_b + h * v_h
    first, end = tl.load(LO + first_token), tl.load(HI + last_token)
    some, most = _stretches(first, end, tl.load(LO + last_token), tl.load(HI + first_token), BN)

    dq = tl.zeros([BT * GP, DKP], tl.float32)
    for stretch in tl.static_range(3):
        if stretch == 1:
            for at in range(some, most, BN):
                _, k, v = _keys(k_base, k_s, v_base, v_s, at, None, DK, DKP, DV, DVP, BN)
                p = tl.exp2(product(q, k) * to_base_2 - lse[:, None])
                ds = p * (product(do, v) - delta[:, None])
                dq = dot(ds.to(k.dtype), k, dq)
        else:
            begin = first if stretch == 0 else most
            stop = tl.minimum(some, end) if stretch == 0 else end
            for at in range(begin, stop, BN):
                key, k, v = _keys(k_base, k_s, v_base, v_s, at, end, DK, DKP, DV, DVP, BN)
                k, v = finite(k), finite(v)
                p = tl.exp2(product(q, k) * to_base_2 - lse[:, None])
                ds = p * (product(do, v) - delta[:, None])
                visible = (key[None, :] >= lo[:, None]) & (key[None, :] < hi[:, None])
                dq = dot(tl.where(visible, ds, 0.0).to(k.dtype), k, dq)
    store_rows(DQ, row * DK, real, dq * scale, DK, DKP)


@triton.jit
def _backward_kv(
    Q, K, V, DO, LO, HI, LSE, DELTA, SEEN_FROM, SEEN_TO, DK_OUT, DV_OUT,
    q_b, q_s, q_h, k_b, k_s, k_h, v_b, v_s, v_h, S, T, HQ, HKV, G, scale, to_base_2, SPLITS: tl.constexpr,
    DK: tl.constexpr, DV: tl.constexpr, DKP: tl.constexpr, DVP: tl.constexpr,
    BT: tl.constexpr, GP: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    first_key, h, b = tl.program_id(0) // SPLITS * BN, tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    last_key = tl.minimum(first_key + BN, T) - 1
    key, k, v = _keys(K + b * k_b + h * k_h, k_s, V + b * v_b + h * v_h, v_s, first_key, T, DK, DKP, DV, DVP, BN)
    k, v = finite(k), finite(v)
    first, end = tl.load(SEEN_FROM + first_key), tl.load(SEEN_TO + last_key)
    share = tl.cdiv(end - first, BT * SPLITS) * BT
    first += tl.program_id(0) % SPLITS * share
    end = tl.minimum(end, first + share)
    some, most = _stretches(first, end, tl.load(SEEN_FROM + last_key), tl.load(SEEN_TO + first_key), BT)

    dk, dv = tl.zeros([BN, DKP], tl.float32), tl.zeros([BN, DVP], tl.float32)
    for stretch in tl.static_range(3):
        begin = first if stretch == 0 else (some if stretch == 1 else most)
        stop = tl.minimum(some, end) if stretch == 0 else (most if stretch == 1 else end)
        for at in range(begin, stop, BT):
            token, g, real = rows_of(at, S, G, BT, GP)
            row = (b * S + token) * HQ + h * G + g
            q = load_rows(Q + b * q_b, token * q_s + (h * G + g) * q_h, real, DK, DKP)
            do = load_rows(DO, row * DV, real, DV, DVP)
            lse, delta = tl.load(LSE + row, mask=real, other=0.0), tl.load(DELTA + row, mask=real, other=0.0)
            if stretch != 1:
                q, do = finite(q), finite(do)
            p = tl.exp2(product(k, q) * to_base_2 - lse[None, :])  # [keys, rows]
            ds = p * (product(v, do) - delta[None, :])
            if stretch != 1:
                lo, hi = tl.load(LO + token, mask=real, other=0), tl.load(HI + token, mask=real, other=0)
                visible = (key[:, None] >= lo[None, :]) & (key[:, None] < hi[None, :])
                p, ds = tl.where(visible, p, 0.0), tl.where(visible, ds, 0.0)
            dv = dot(p.to(do.dtype), do, dv)
            dk = dot(ds.to(q.dtype), q, dk)
    out = ((tl.program_id(0) % SPLITS * tl.num_programs(2) + b) * T + key) * HKV + h
    store_rows(DK_OUT, out * DK, key < T, dk * scale, DK, DKP)
    store_rows(DV_OUT, out * DV, key < T, dv, DV, DVP)


class IntervalAttention(torch.autograd.Function):
    """(o, lse, keys read) of query i over the keys lo[i] <= key < hi[i]."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,  # [B, S, Hq, Dk]
        k: Tensor,  # [B, T, Hkv, Dk]
        v: Tensor,  # [B, T, Hkv, Dv]
        lo: Tensor,  # int32 [S], ascending
        hi: Tensor,  # int32 [S], ascending
        splits: int,  # programs that share the queries of one tile of keys in the backward pass
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = unit_stride(q), unit_stride(k), unit_stride(v)
        (batch, length, heads, dk), (kv_heads, dv) = q.shape, v.shape[2:]
        o, lse = q.new_empty(batch, length, heads, dv), q.new_empty(batch, length, heads, dtype=torch.float32)
        read = q.new_empty(batch, length, kv_heads, dtype=torch.int32)
        shape = tuning.shape("interval_forward", q, v)
        if o.numel():
            with on_device(q):
                _forward[triton.cdiv(length, shape.tokens), kv_heads, batch](
                    q, k, v, lo, hi, o, lse, read, *strides(q), *strides(k), *strides(v),
                    length, heads, kv_heads, heads // kv_heads, scale * LOG2E,
                    *shape.sizes(dk, dv), **shape.launch,
                )  # fmt: skip
        ctx.save_for_backward(q, k, v, o, lse, lo, hi)
        ctx.splits, ctx.scale = splits, scale
        ctx.mark_non_differentiable(read)
        ctx.set_materialize_grads(False)
        return o, lse, read

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor | None, dlse: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        q, k, v, o, lse, lo, hi = ctx.saved_tensors
        (batch, length, heads, dk), (num_keys, kv_heads, dv) = q.shape, v.shape[1:]
        dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        do = torch.zeros_like(o) if do is None else do.contiguous()
        lse, delta = backward_rows(do, o, lse, dlse)
        key = torch.arange(num_keys, dtype=torch.int32, device=q.device)
        seen_from = torch.searchsorted(hi, key, right=True, out_int32=True)
        seen_to = torch.searchsorted(lo, key, right=True, out_int32=True)
        steps = (*strides(q), *strides(k), *strides(v))
        with on_device(q):
            shape = tuning.shape("interval_backward_q", q, v)
            if dq.numel():
                _backward_q[triton.cdiv(length, shape.tokens), kv_heads, batch](
                    q, k, v, do, lo, hi, lse, delta, dq, *steps,
                    length, heads, heads // kv_heads, ctx.scale, ctx.scale * LOG2E,
                    *shape.sizes(dk, dv), **shape.launch,
                )  # fmt: skip
            shape = tuning.shape("interval_backward_kv", q, v)
            splits, dtype = ctx.splits, q.dtype if ctx.splits == 1 else torch.float32
            dk_parts = k.new_empty(splits, *k.shape, dtype=dtype)
            dv_parts = v.new_empty(splits, *v.shape, dtype=dtype)
            if dk_parts.numel():
                _backward_kv[triton.cdiv(num_keys, shape.keys) * splits, kv_heads, batch](
                    q, k, v, do, lo, hi, lse, delta, seen_from, seen_to, dk_parts, dv_parts, *steps,
                    length, num_keys, heads, kv_heads, heads // kv_heads, ctx.scale, ctx.scale * LOG2E, splits,
                    *shape.sizes(dk, dv), **shape.launch,
                )  # fmt: skip
        return dq, *(parts.sum(0).to(q.dtype) for parts in (dk_parts, dv_parts)), None, None, None, None
