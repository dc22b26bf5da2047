"""The compressed branch and the window: attention of each query over one interval of keys, forward and backward.

Tiles of tokens × heads of a group share each key they load. Both ends of the intervals ascend with the queries, so
the keys of a tile are an interval too, and so are the queries of a tile of keys in the backward pass. Each loop has
three stretches: keys (queries) that only some rows see, those that all see and that need no mask, and again some.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa.triton_backend import hopper, tuning
from nsa.triton_backend.dispatch import Variant, variant
from nsa.triton_backend.launch import (
    ENOUGH_PROGRAMS,
    LOG2E,
    backward_rows,
    finite_keys,
    on_device,
    strides,
    unit_stride,
)
from nsa.triton_backend.tile import (
    dot,
    finish,
    kernel,
    load_rows,
    nonfinite,
    online_softmax,
    product,
    rows_of,
    store_rows,
)
from nsa.triton_backend.tuning import cdiv

KEYS_PER_PROGRAM = 64  # roughly
MIN_TOKENS_PER_SPLIT = 256


@triton.jit
def _stretches(first, last, all_from, all_to, STEP: tl.constexpr):
    """Ends of the first two of three stretches of `first` … `last`; the second, in whole steps, lies inside
    `all_from` … `all_to`."""
    some = first + tl.cdiv(tl.maximum(all_from - first, 0), STEP) * STEP
    return some, some + tl.maximum(tl.minimum(all_to, last) - some, 0) // STEP * STEP


@triton.jit
def _finite(finite_base, HKV, first, end, BN: tl.constexpr):
    """Whether each of the keys first <= key < first + BN is finite and before `end`."""
    key = first + tl.arange(0, BN)
    return tl.load(finite_base + key.to(tl.int64) * HKV, mask=key < end, other=0) != 0


@triton.jit
def _keys(k_base, k_s, v_base, v_s, first, loaded, DK: tl.constexpr, DKP: tl.constexpr,
          DV: tl.constexpr, DVP: tl.constexpr, BN: tl.constexpr):  # fmt: skip
    """(k, v) of the keys first <= key < first + BN, 0 where not `loaded` (None: all are)."""
    place, at = tl.arange(0, BN), tl.cast(first, tl.int64)
    k = load_rows(k_base + at * k_s, place * k_s, loaded, DK, DKP)
    return k, load_rows(v_base + at * v_s, place * v_s, loaded, DV, DVP)


@triton.jit
def _visible(first, lo, hi, BN: tl.constexpr):
    """[rows, keys]: which of the keys first <= key < first + BN each row sees."""
    key = first + tl.arange(0, BN)[None, :]
    return (key >= lo[:, None]) & (key < hi[:, None])


@kernel
def _forward(
    Q, K, V, FINITE, LO, HI, O, LSE, READ, q_b, q_s, q_h, k_b, k_s, k_h, v_b, v_s, v_h,
    S, T, HQ, HKV, G, to_base_2,
    DK: tl.constexpr, DV: tl.constexpr, DKP: tl.constexpr, DVP: tl.constexpr,
    BT: tl.constexpr, GP: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    # the last queries see the most keys, so they start first
    first_token = (tl.num_programs(0) - 1 - tl.program_id(0)) * BT
    h, b = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    last_token = tl.minimum(first_token + BT, S) - 1
    token, g, real = rows_of(first_token, S, G, BT, GP)
    lo, hi = tl.load(LO + token, mask=real, other=0), tl.load(HI + token, mask=real, other=0)
    q = load_rows(Q + b * q_b, token * q_s + (h * G + g) * q_h, real, DK, DKP)
    k_base, v_base, finite_base = K + b * k_b + h * k_h, V + b * v_b + h * v_h, FINITE + b * T * HKV + h
    first, end = tl.load(LO + first_token), tl.load(HI + last_token)
    some, most = _stretches(first, end, tl.load(LO + last_token), tl.load(HI + first_token), BN)

    m = tl.full([BT * GP], float("-inf"), tl.float32)
    l, read = tl.zeros([BT * GP], tl.float32), tl.zeros([BT * GP], tl.int32)
    acc = tl.zeros([BT * GP, DVP], tl.float32)
    for stretch in tl.static_range(3):
        if stretch == 1:
            for at in range(some, most, BN):
                k, v = _keys(k_base, k_s, v_base, v_s, at, None, DK, DKP, DV, DVP, BN)
                m, l, acc = online_softmax(product(q, k), v, m, l, acc, to_base_2)
                read += BN
        else:
            begin = first if stretch == 0 else most
            stop = tl.minimum(some, end) if stretch == 0 else end
            for at in range(begin, stop, BN):
                finite, visible = _finite(finite_base, HKV, at, end, BN), _visible(at, lo, hi, BN)
                k, v = _keys(k_base, k_s, v_base, v_s, at, finite, DK, DKP, DV, DVP, BN)
                # in this order: a key that is not finite makes the rows NaN that see it, and no others
                s = tl.where(finite[None, :], product(q, k), float("nan"))
                s = tl.where(visible, s, float("-inf"))
                m, l, acc = online_softmax(s, v, m, l, acc, to_base_2)
                read += tl.maximum(tl.minimum(hi, at + BN) - tl.maximum(lo, at), 0)
    o, lse = finish(m, l, acc, nonfinite(q) & (hi > lo))
    row = (b * S + token) * HQ + h * G + g
    store_rows(O, row * DV, real, o, DV, DVP)
    tl.store(LSE + row, lse, mask=real)
    tl.store(READ + (b * S + token) * HKV + h, read, mask=real & (g == 0))


@kernel
def _backward_q(
    Q, K, V, FINITE, DO, LO, HI, LSE, DELTA, DQ, q_b, q_s, q_h, k_b, k_s, k_h, v_b, v_s, v_h,
    S, T, HQ, HKV, G, scale, to_base_2,
    DK: tl.constexpr, DV: tl.constexpr, DKP: tl.constexpr, DVP: tl.constexpr,
    BT: tl.constexpr, GP: tl.constexpr, BN: tl.constexpr, STRETCHES: tl.constexpr,
):  # fmt: skip
    # the last queries see the most keys, so they start first
    first_token = (tl.num_programs(0) - 1 - tl.program_id(0)) * BT
    h, b = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    last_token = tl.minimum(first_token + BT, S) - 1
    token, g, real = rows_of(first_token, S, G, BT, GP)
    lo, hi = tl.load(LO + token, mask=real, other=0), tl.load(HI + token, mask=real, other=0)
    row = (b * S + token) * HQ + h * G + g
    q = load_rows(Q + b * q_b, token * q_s + (h * G + g) * q_h, real, DK, DKP)
    do = load_rows(DO, row * DV, real, DV, DVP)
    lse, delta = tl.load(LSE + row, mask=real, other=0.0), tl.load(DELTA + row, mask=real, other=0.0)
    k_base, v_base, finite_base = K + b * k_b + h * k_h, V + b * v_b + h * v_h, FINITE + b * T * HKV + h
    first, end = tl.load(LO + first_token), tl.load(HI + last_token)
    some, most = _stretches(first, end, tl.load(LO + last_token), tl.load(HI + first_token), BN)

    dq = tl.zeros([BT * GP, DKP], tl.float32)
    # With one stretch every tile takes the masked loop: q and do then stand once in shared memory (`tuning.fit`).
    for stretch in tl.static_range(STRETCHES):
        if stretch == 1:
            for at in range(some, most, BN):
                k, v = _keys(k_base, k_s, v_base, v_s, at, None, DK, DKP, DV, DVP, BN)
                p = tl.exp2(product(q, k) * to_base_2 - lse[:, None])
                ds = p * (product(do, v) - delta[:, None])
                dq = dot(ds.to(k.dtype), k, dq)
        else:
            begin = first if stretch == 0 else most
            stop = tl.minimum(some, end) if stretch + 1 < STRETCHES else end
            for at in range(begin, stop, BN):
                finite, visible = _finite(finite_base, HKV, at, end, BN), _visible(at, lo, hi, BN)
                k, v = _keys(k_base, k_s, v_base, v_s, at, finite, DK, DKP, DV, DVP, BN)
                p = tl.exp2(product(q, k) * to_base_2 - lse[:, None])
                ds = p * (product(do, v) - delta[:, None])
                dq = dot(tl.where(visible, ds, 0.0).to(k.dtype), k, dq)
    store_rows(DQ, row * DK, real, dq * scale, DK, DKP)


@kernel
def _backward_kv(
    Q, K, V, DO, LO, HI, LSE, DELTA, SEEN_FROM, SEEN_TO, DK_OUT, DV_OUT,
    q_b, q_s, q_h, k_b, k_s, k_h, v_b, v_s, v_h, S, num_keys, HQ, HKV, G, scale, to_base_2, parts,
    DK: tl.constexpr, DV: tl.constexpr, DKP: tl.constexpr, DVP: tl.constexpr,
    BT: tl.constexpr, GP: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    # `num_keys` and `parts` are no LENGTHS: not to know that they are multiples of 16, or 1, costs 100 bytes more of
    # spilled registers (192/128 on Hopper)
    first_key, h, b = tl.program_id(0) // parts * BN, tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    last_key = tl.minimum(first_key + BN, num_keys) - 1
    key = first_key + tl.arange(0, BN)
    k, v = _keys(
        K + b * k_b + h * k_h, k_s, V + b * v_b + h * v_h, v_s, first_key, key < num_keys, DK, DKP, DV, DVP, BN
    )
    first, end = tl.load(SEEN_FROM + first_key), tl.load(SEEN_TO + last_key)
    per_split = tl.cdiv(end - first, BT * parts) * BT
    first += tl.program_id(0) % parts * per_split
    end = tl.minimum(end, first + per_split)
    some, most = _stretches(first, end, tl.load(SEEN_FROM + last_key), tl.load(SEEN_TO + first_key), BT)

    dk, dv = tl.zeros([BN, DKP], tl.float32), tl.zeros([BN, DVP], tl.float32)
    for stretch in tl.static_range(3):
        begin = first if stretch == 0 else (some if stretch == 1 else most)
        stop = tl.minimum(some, end) if stretch == 0 else (most if stretch == 1 else end)
        for at in range(begin, stop, BT):
            token, g, real = rows_of(at, S, G, BT, GP)
            row = (b * S + token) * HQ + h * G + g
            lse, delta = tl.load(LSE + row, mask=real, other=0.0), tl.load(DELTA + row, mask=real, other=0.0)
            loaded = real if stretch == 1 else real & (lse == lse)  # an lse of NaN: `launch.backward_rows`
            q = load_rows(Q + b * q_b, token * q_s + (h * G + g) * q_h, loaded, DK, DKP)
            do = load_rows(DO, row * DV, loaded, DV, DVP)
            # [keys, rows], as dv and dk take p and ds: no operand is transposed through shared memory
            p = tl.exp2(product(k, q) * to_base_2 - lse[None, :])
            ds = p * (product(v, do) - delta[None, :])
            if stretch != 1:
                lo, hi = tl.load(LO + token, mask=real, other=0), tl.load(HI + token, mask=real, other=0)
                visible = (key[:, None] >= lo[None, :]) & (key[:, None] < hi[None, :])
                # after the exponential: that of a pair that is not seen may overflow, since lse does not bound it
                p, ds = tl.where(visible, p, 0.0), tl.where(visible, ds, 0.0)
            dv = dot(p.to(do.dtype), do, dv)
            dk = dot(ds.to(q.dtype), q, dk)
    out = ((tl.program_id(0) % parts * tl.num_programs(2) + b) * num_keys + key.to(tl.int64)) * HKV + h
    store_rows(DK_OUT, out * DK, key < num_keys, dk * scale, DK, DKP)
    store_rows(DV_OUT, out * DV, key < num_keys, dv, DV, DVP)


def forward(
    q: Tensor,  # [B, S, Hq, Dk]
    k: Tensor,  # [B, T, Hkv, Dk]
    v: Tensor,  # [B, T, Hkv, Dv]
    lo: Tensor,  # int32 [S], ascending
    hi: Tensor,  # int32 [S], ascending
    finite: Tensor,  # bool [B, T, Hkv], of the keys that some interval holds
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """(o, lse, keys read) of query i over the keys lo[i] <= key < hi[i]."""
    q, k, v = unit_stride(q), unit_stride(k), unit_stride(v)
    (batch, length, heads, dk), (num_kv_heads, dv) = q.shape, v.shape[2:]
    o, lse = q.new_empty(batch, length, heads, dv), q.new_empty(batch, length, heads, dtype=torch.float32)
    read = q.new_empty(batch, length, num_kv_heads, dtype=torch.int32)
    if o.numel() and variant("compressed_window_forward", q, k, v) is Variant.HOPPER:
        with on_device(q):
            hopper.compressed_window.forward(q, k, v, finite, lo, hi, o, lse, read, scale)
    elif o.numel():
        shape = tuning.shape("compressed_window_forward", q, v)
        with on_device(q):
            _forward[cdiv(length, shape.tokens), num_kv_heads, batch](
                q, k, v, finite, lo, hi, o, lse, read, *strides(q), *strides(k), *strides(v),
                length, k.shape[1], heads, num_kv_heads, heads // num_kv_heads, scale * LOG2E,
                *shape.sizes(dk, dv), **shape.launch,
            )  # fmt: skip
    return o, lse, read


def attend(
    q: Tensor, k: Tensor, v: Tensor, lo: Tensor, hi: Tensor, seen_from: Tensor, seen_to: Tensor, first_key: int,
    max_splits: int, scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """`forward` and which keys are finite; no interval begins before `first_key`. The rest is for the backward pass."""
    finite = finite_keys(unit_stride(k), unit_stride(v), first_key)
    return *forward(q, k, v, lo, hi, finite, scale), finite


def gradients(
    q: Tensor, k: Tensor, v: Tensor, finite: Tensor, do: Tensor, lse: Tensor, delta: Tensor, lo: Tensor, hi: Tensor,
    seen_from: Tensor, seen_to: Tensor, max_splits: int, scale: float, wide: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(dq, dk, dv), the last two as parts [splits, B, T, Hkv, D] that add up to them.

    lse (base 2) and delta are those of `launch.backward_rows`; the queries seen_from <= i < seen_to, int32 [T] each,
    see a key; at most `max_splits` programs share the queries of a tile of keys. do is contiguous.
    """
    q, k, v = unit_stride(q), unit_stride(k), unit_stride(v)
    dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    with on_device(q):
        _gradient_of_queries(q, k, v, finite, do, lo, hi, lse, delta, dq, scale)
        parts = _parts_of_keys(q, k, v, do, lo, hi, lse, delta, seen_from, seen_to, max_splits, scale, wide)
    return dq, *parts


def backward(
    do: Tensor | None, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, finite: Tensor, o: Tensor, lse: Tensor,
    lo: Tensor, hi: Tensor, seen_from: Tensor, seen_to: Tensor, max_splits: int, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(dq, dk, dv), from what `forward` was given and gave; None is a gradient of 0."""
    do = torch.zeros_like(o) if do is None else do.contiguous()
    rows = backward_rows(do, o, lse, dlse)
    dq, *parts = gradients(q, k, v, finite, do, *rows, lo, hi, seen_from, seen_to, max_splits, scale)
    dk, dv = (part[0] if len(part) == 1 else part.sum(0).to(q.dtype) for part in parts)
    return dq, dk, dv


def _gradient_of_queries(
    q: Tensor, k: Tensor, v: Tensor, finite: Tensor, do: Tensor, lo: Tensor, hi: Tensor, lse: Tensor, delta: Tensor,
    dq: Tensor, scale: float,
) -> None:  # fmt: skip
    """Write dq."""
    (batch, length, heads, dk), (num_keys, num_kv_heads, dv) = q.shape, v.shape[1:]
    if dq.numel() == 0:
        return
    if variant("compressed_window_backward_q", q, k, v) is Variant.HOPPER:
        hopper.compressed_window.backward_q(q, k, v, finite, do, lo, hi, lse, delta, dq, scale)
        return
    shape = tuning.shape("compressed_window_backward_q", q, v)
    _backward_q[cdiv(length, shape.tokens), num_kv_heads, batch](
        q, k, v, finite, do, lo, hi, lse, delta, dq, *strides(q), *strides(k), *strides(v),
        length, num_keys, heads, num_kv_heads, heads // num_kv_heads, scale, scale * LOG2E,
        *shape.sizes(dk, dv), shape.stretches, **shape.launch,
    )  # fmt: skip


def _parts_of_keys(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, lo: Tensor, hi: Tensor, lse: Tensor, delta: Tensor,
    seen_from: Tensor, seen_to: Tensor, max_splits: int, scale: float, wide: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """[splits, B, T, Hkv, D] of dk and of dv."""
    (batch, length, heads, dk), (num_keys, num_kv_heads, dv) = q.shape, v.shape[1:]
    splits = _splits(k, length, max_splits)
    of_k, of_v = (x.new_empty(splits, *x.shape, dtype=torch.float32 if wide or splits > 1 else q.dtype) for x in (k, v))
    shape = tuning.shape("compressed_window_backward_kv", q, v)
    if of_k.numel():
        _backward_kv[cdiv(num_keys, shape.keys) * splits, num_kv_heads, batch](
            q, k, v, do, lo, hi, lse, delta, seen_from, seen_to, of_k, of_v, *strides(q), *strides(k), *strides(v),
            length, num_keys, heads, num_kv_heads, heads // num_kv_heads, scale, scale * LOG2E, splits,
            *shape.sizes(dk, dv), **shape.launch,
        )  # fmt: skip
    return of_k, of_v


def _splits(k: Tensor, num_queries: int, most: int) -> int:
    """How many programs share the queries of one tile of keys: as many as keep the GPU busy."""
    tiles = cdiv(k.shape[1], KEYS_PER_PROGRAM) * k.shape[2] * k.shape[0]
    return max(min(cdiv(ENOUGH_PROGRAMS, max(tiles, 1)), num_queries // MIN_TOKENS_PER_SPLIT, most), 1)
