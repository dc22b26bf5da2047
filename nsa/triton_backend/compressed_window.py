"""The compressed branch and the window: attention of each query over one interval of keys, forward and backward.

Tiles of tokens × heads of a group share each key they load. Both ends of the intervals ascend with the queries, so
the keys of a tile are an interval too, and so are the queries of a tile of keys in the backward pass. Each loop has
three stretches: keys (queries) that only some rows see, those that all see and that need no mask, and again some.

The same kernels serve the selected branch of short sequences (`selected_masked.py`): a query then sees, of all keys up
to its own, those of the blocks in its bit mask CHOSEN, and every step is masked. There the longest program bounds the
kernel. So what is not finite is looked for once, ahead of the steps: a load that waits for the flags of its keys makes
each step longer, by a fifth (12/2 heads of 64, 2048 tokens, H200).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from nsa.triton_backend import hopper, partial_sums, tuning
from nsa.triton_backend.dispatch import Variant, readable_by_tma, variant
from nsa.triton_backend.gated_sum import gated
from nsa.triton_backend.intervals import (
    CHECKED,
    all_finite,
    all_loaded,
    among_chosen,
    are_finite_keys,
    interval_of,
    key_range,
    load_keys,
    masked_pair,
    stretches,
    visible_keys,
)
from nsa.triton_backend.launch import LOG2E, backward_rows, finite_keys, strides, unit_stride
from nsa.triton_backend.launching.lanes import QUERIES, lane
from nsa.triton_backend.launching.relaunch import on_device
from nsa.triton_backend.tile import (
    add_branches,
    dot,
    finish,
    kernel,
    load_rows,
    nonfinite,
    online_softmax,
    per_key,
    per_row,
    product,
    rows_of,
    rows_of_tile,
    scores_of,
    store_rows,
    transposed,
)
from nsa.triton_backend.tuning import Shape, cdiv

MIN_TOKENS_PER_SPLIT = 64
MASKED_QUERIES, MASKED_PROGRAMS = 768, 2048
"""Under a mask a program takes at most so many queries, unless that makes more programs than these. Alone, dk and dv
of 2 x 2048 tokens (12/2 heads of 64) took 144 µs with 512 queries each on an H100, and 121 with 342. In a CUDA graph dq
fills the GPU beside them: there forward and backward take 369 µs on an H200 with 768, and 387 with 384."""
ENOUGH_OF_WINDOW = 256
"""Programs: a window with so many tiles of keys is not split, since partial sums of all its keys would cost more."""


class BlockMask(NamedTuple):
    """What the queries of the selected branch see of all keys up to their own."""

    bits: Tensor
    """int64 [B, S, Hkv]: bit j for block j."""
    size: int
    """Tokens of a block."""
    ahead: int
    """Keys before the first query."""


@kernel
def _forward(
    Q, K, V, FINITE, LO, HI, CHOSEN, O, LSE, READ, O_CMP, O_WIN, GATES, SUM,
    q_b, q_s, q_h, k_b, k_s, k_h, v_b, v_s, v_h, S, T, HQ, HKV, G, ahead, to_base_2,
    SIZE: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, DKP: tl.constexpr, DVP: tl.constexpr,
    ROWS: tl.constexpr, GP: tl.constexpr, BN: tl.constexpr, STRETCHES: tl.constexpr,
):  # fmt: skip
    # the last queries see the most keys, so they start first
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    h, b = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    first_token, last_token = tile * ROWS // GP, tl.minimum((tile * ROWS + ROWS - 1) // GP, S - 1)
    token, g, real = rows_of_tile(tile, S, G, ROWS, GP)
    lo, hi = interval_of(LO, HI, token, real, ahead)
    q = load_rows(Q + b * q_b, token * q_s + (h * G + g) * q_h, real, DK, DKP)
    k_base, v_base, finite_base = K + b * k_b + h * k_h, V + b * v_b + h * v_h, FINITE + b * T * HKV + h
    first, end, some, most = key_range(LO, HI, first_token, last_token, ahead, BN)
    if CHOSEN is not None:
        bits = tl.load(CHOSEN + (b * S + token) * HKV + h, mask=real, other=0)
        clean_end = tl.where(all_finite(finite_base, HKV, first, end, CHECKED), end, first)

    m = tl.full([ROWS], float("-inf"), tl.float32)
    l, read = tl.zeros([ROWS], tl.float32), tl.zeros([ROWS], tl.int32)
    acc = tl.zeros([ROWS, DVP], tl.float32)
    for stretch in tl.static_range(STRETCHES):
        if stretch == 1:
            for at in range(some, most, BN):
                k, v = load_keys(k_base, k_s, v_base, v_s, at, None, DK, DKP, DV, DVP, BN)
                m, l, acc = online_softmax(product(q, k), v, m, l, acc, to_base_2)
                read += BN
        else:
            begin = first if stretch == 0 else most
            stop = tl.minimum(some, end) if stretch + 1 < STRETCHES else end
            for careful in tl.static_range(0 if CHOSEN is not None else 1, 2):
                if CHOSEN is not None:
                    begin, stop = (first, clean_end) if careful == 0 else (clean_end, end)
                for at in range(begin, stop, BN):
                    inside = (
                        are_finite_keys(finite_base, HKV, at, end, BN) if careful == 1 else at + tl.arange(0, BN) < end
                    )
                    seen_to = hi if CHOSEN is None else tl.where(among_chosen(bits, at, SIZE), hi, 0)
                    visible = visible_keys(at, lo, seen_to, BN)
                    k, v = load_keys(k_base, k_s, v_base, v_s, at, inside, DK, DKP, DV, DVP, BN)
                    s = product(q, k)
                    if careful == 1:  # before the mask: a key that is not finite makes the rows NaN that see it alone
                        s = tl.where(inside[None, :], s, float("nan"))
                    m, l, acc = online_softmax(tl.where(visible, s, float("-inf")), v, m, l, acc, to_base_2)
                    read += tl.maximum(tl.minimum(seen_to, at + BN) - tl.maximum(lo, at), 0)
    o, lse = finish(m, l, acc, nonfinite(q) & (read > 0))
    row = (b * S + token) * HQ + h * G + g
    store_rows(O, row * DV, real, o, DV, DVP)
    tl.store(LSE + row, lse, mask=real)
    if SUM is not None:
        o_cmp, o_win = load_rows(O_CMP, row * DV, real, DV, DVP), load_rows(O_WIN, row * DV, real, DV, DVP)
        total = gated(GATES, row, real, o_cmp, o.to(O.dtype.element_ty), o_win)
        store_rows(SUM, row * DV, real, total, DV, DVP)
    tl.store(READ + (b * S + token) * HKV + h, read, mask=real & (g == 0))


@kernel
def _backward_q(
    Q, K, V, FINITE, DO, LO, HI, CHOSEN, LSE, DELTA, DQ, DQ_CMP, DQ_WIN, q_b, q_s, q_h, k_b, k_s, k_h, v_b, v_s, v_h,
    S, T, HQ, HKV, G, ahead, scale, to_base_2,
    SIZE: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, DKP: tl.constexpr, DVP: tl.constexpr,
    ROWS: tl.constexpr, GP: tl.constexpr, BN: tl.constexpr, STRETCHES: tl.constexpr,
):  # fmt: skip
    # the last queries see the most keys, so they start first
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    h, b = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    first_token, last_token = tile * ROWS // GP, tl.minimum((tile * ROWS + ROWS - 1) // GP, S - 1)
    token, g, real = rows_of_tile(tile, S, G, ROWS, GP)
    lo, hi = interval_of(LO, HI, token, real, ahead)
    row = (b * S + token) * HQ + h * G + g
    q = load_rows(Q + b * q_b, token * q_s + (h * G + g) * q_h, real, DK, DKP)
    do = load_rows(DO, row * DV, real, DV, DVP)
    lse, delta = tl.load(LSE + row, mask=real, other=0.0), tl.load(DELTA + row, mask=real, other=0.0)
    k_base, v_base, finite_base = K + b * k_b + h * k_h, V + b * v_b + h * v_h, FINITE + b * T * HKV + h
    first, end, some, most = key_range(LO, HI, first_token, last_token, ahead, BN)
    if CHOSEN is not None:
        bits = tl.load(CHOSEN + (b * S + token) * HKV + h, mask=real, other=0)
        clean_end = tl.where(all_finite(finite_base, HKV, first, end, CHECKED), end, first)

    dq = tl.zeros([ROWS, DKP], tl.float32)
    # With one stretch every tile takes the masked loop: q and do then stand once in shared memory (`tuning.fit`).
    for stretch in tl.static_range(STRETCHES):
        if stretch == 1:
            for at in range(some, most, BN):
                k, v = load_keys(k_base, k_s, v_base, v_s, at, None, DK, DKP, DV, DVP, BN)
                p = tl.exp2(product(q, k) * to_base_2 - lse[:, None])
                ds = p * (product(do, v) - delta[:, None])
                dq = dot(ds.to(k.dtype), k, dq)
        else:
            begin = first if stretch == 0 else most
            stop = tl.minimum(some, end) if stretch + 1 < STRETCHES else end
            for careful in tl.static_range(0 if CHOSEN is not None else 1, 2):
                if CHOSEN is not None:
                    begin, stop = (first, clean_end) if careful == 0 else (clean_end, end)
                for at in range(begin, stop, BN):
                    inside = (
                        are_finite_keys(finite_base, HKV, at, end, BN) if careful == 1 else at + tl.arange(0, BN) < end
                    )
                    seen_to = hi if CHOSEN is None else tl.where(among_chosen(bits, at, SIZE), hi, 0)
                    visible = visible_keys(at, lo, seen_to, BN)
                    k, v = load_keys(k_base, k_s, v_base, v_s, at, inside, DK, DKP, DV, DVP, BN)
                    p = tl.exp2(product(q, k) * to_base_2 - lse[:, None])
                    ds = p * (product(do, v) - delta[:, None])
                    dq = dot(tl.where(visible, ds, 0.0).to(k.dtype), k, dq)
    dq = add_branches(dq * scale, DQ_CMP, DQ_WIN, row, real, DQ, DK, DKP)
    store_rows(DQ, row * DK, real, dq, DK, DKP)


@kernel
def _backward_kv(
    Q, K, V, DO, LO, HI, CHOSEN, LSE, DELTA, SEEN_FROM, SEEN_TO, DK_OUT, DV_OUT,
    q_b, q_s, q_h, k_b, k_s, k_h, v_b, v_s, v_h, S, num_keys, HQ, HKV, G, ahead, scale, to_base_2, parts,
    SIZE: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, DKP: tl.constexpr, DVP: tl.constexpr,
    ROWS: tl.constexpr, GP: tl.constexpr, BN: tl.constexpr, ROWS_FIRST: tl.constexpr, STRETCHES: tl.constexpr,
):  # fmt: skip
    BT: tl.constexpr = ROWS // GP
    # `num_keys` and `parts` are no LENGTHS: not to know that they are multiples of 16, or 1, costs 100 bytes more of
    # spilled registers (192/128 on Hopper)
    first_key, h, b = tl.program_id(0) // parts * BN, tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    last_key = tl.minimum(first_key + BN, num_keys) - 1
    key = first_key + tl.arange(0, BN)
    k, v = load_keys(
        K + b * k_b + h * k_h, k_s, V + b * v_b + h * v_h, v_s, first_key, key < num_keys, DK, DKP, DV, DVP, BN
    )
    if SEEN_FROM is None:
        first, end = tl.maximum(first_key - ahead, 0), S
    else:
        first, end = tl.load(SEEN_FROM + first_key), tl.load(SEEN_TO + last_key)
    per_split = tl.cdiv(end - first, BT * parts) * BT
    first += tl.program_id(0) % parts * per_split
    end = tl.minimum(end, first + per_split)
    some, most = end, end
    if SEEN_FROM is not None:
        some, most = stretches(first, end, tl.load(SEEN_FROM + last_key), tl.load(SEEN_TO + first_key), BT)

    if CHOSEN is not None:
        clean_end = tl.where(all_loaded(LSE + b * S * HQ + h * G, first, end, HQ, G, GP, CHECKED), end, first)

    dk, dv = tl.zeros([BN, DKP], tl.float32), tl.zeros([BN, DVP], tl.float32)
    for part in tl.static_range(STRETCHES if CHOSEN is None else 2):
        stretch = part if CHOSEN is None else 0
        begin = first if stretch == 0 else (some if stretch == 1 else most)
        stop = tl.minimum(some, end) if stretch + 1 < STRETCHES else end
        stop = most if stretch == 1 else stop
        if CHOSEN is not None:
            begin, stop = (first, clean_end) if part == 0 else (clean_end, end)
        for at in range(begin, stop, BT):
            token, g, real = rows_of(at, S, G, ROWS, GP)
            row = (b * S + token) * HQ + h * G + g
            lse, delta = tl.load(LSE + row, mask=real, other=0.0), tl.load(DELTA + row, mask=real, other=0.0)
            # an lse of NaN: `launch.backward_rows`
            loaded = real if stretch == 1 or (CHOSEN is not None and part == 0) else real & (lse == lse)
            q = load_rows(Q + b * q_b, token * q_s + (h * G + g) * q_h, loaded, DK, DKP)
            do = load_rows(DO, row * DV, loaded, DV, DVP)
            p = tl.exp2(scores_of(q, k, ROWS_FIRST) * to_base_2 - per_row(lse, ROWS_FIRST))
            ds = p * (scores_of(do, v, ROWS_FIRST) - per_row(delta, ROWS_FIRST))
            if stretch != 1:
                lo, hi = interval_of(LO, HI, token, real, ahead)
                if CHOSEN is not None:
                    bits = tl.load(CHOSEN + (b * S + token) * HKV + h, mask=real, other=0)
                    hi = tl.where(among_chosen(bits, first_key, SIZE), hi, 0)
                seen_from, seen_to = per_row(lo, ROWS_FIRST), per_row(hi, ROWS_FIRST)
                p, ds = masked_pair(p, ds, per_key(key, ROWS_FIRST), seen_from, seen_to, ROWS_FIRST)
            dv = dot(transposed(p.to(do.dtype), ROWS_FIRST), do, dv)
            dk = dot(transposed(ds.to(q.dtype), ROWS_FIRST), q, dk)
    out = ((tl.program_id(0) % parts * tl.num_programs(2) + b) * num_keys + key.to(tl.int64)) * HKV + h
    store_rows(DK_OUT, out * DK, key < num_keys, dk * scale, DK, DKP)
    store_rows(DV_OUT, out * DV, key < num_keys, dv, DV, DVP)


def forward(
    q: Tensor,  # [B, S, Hq, Dk]
    k: Tensor,  # [B, T, Hkv, Dk]
    v: Tensor,  # [B, T, Hkv, Dv]
    lo: Tensor | None,  # int32 [S], ascending; None with `chosen`
    hi: Tensor | None,  # int32 [S], ascending
    finite: Tensor,  # bool [B, T, Hkv], of the keys that some interval holds
    scale: float,
    chosen: BlockMask | None = None,
    whole: tuple[Tensor, Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(o, lse, keys read) of query i over the keys lo[i] <= key < hi[i], or over those `chosen`.

    Of a `whole` call (o_cmp, o_win, gates, sum), all contiguous, the gated sum with the o of `chosen` is written too.
    """
    q, k, v = unit_stride(q), unit_stride(k), unit_stride(v)
    (batch, length, heads, dk), (num_kv_heads, dv) = q.shape, v.shape[2:]
    o, lse = q.new_empty(batch, length, heads, dv), q.new_empty(batch, length, heads, dtype=torch.float32)
    read = q.new_empty(batch, length, num_kv_heads, dtype=torch.int32)
    if not o.numel():
        return o, lse, read
    if lo is not None and hi is not None and variant("compressed_window_forward", q, k, v) is Variant.HOPPER:
        with on_device(q):
            hopper.compressed_window.forward(q, k, v, finite, lo, hi, o, lse, read, scale)
        return o, lse, read
    shape = _shape("forward", q, v, chosen)
    with on_device(q):
        _forward[shape.tiles(length), num_kv_heads, batch](
            q, k, v, finite, lo, hi, _bits(chosen), o, lse, read, *(whole or 4 * (None,)),
            *strides(q), *strides(k), *strides(v),
            length, k.shape[1], heads, num_kv_heads, heads // num_kv_heads, _ahead(chosen), scale * LOG2E,
            *_sizes(shape, dk, dv, chosen), _stretches_of(chosen), **shape.launch,
        )  # fmt: skip
    return o, lse, read


def _bits(chosen: BlockMask | None) -> Tensor | None:
    return None if chosen is None else chosen.bits


def _ahead(chosen: BlockMask | None) -> int:
    return 0 if chosen is None else chosen.ahead


def _stretches_of(chosen: BlockMask | None) -> int:
    """Loops of a kernel: no key is seen by all rows for sure where each has its own blocks."""
    return 3 if chosen is None else 1


def _shape(kernel: str, q: Tensor, v: Tensor, chosen: BlockMask | None) -> Shape:
    return tuning.shape(f"compressed_window_{kernel}", q, v) if chosen is None else tuning.masked_shape(kernel, q, v)


def _sizes(shape: Shape, dk: int, dv: int, chosen: BlockMask | None) -> tuple[int, ...]:
    """The constants SIZE, DK, DV, DKP, DVP, ROWS, GP, BN of a kernel; a step lies within a block."""
    *sizes, keys = shape.sizes(dk, dv)
    return (1, *sizes, keys) if chosen is None else (chosen.size, *sizes, min(keys, chosen.size))


def attend(
    q: Tensor, k: Tensor, v: Tensor, lo: Tensor, hi: Tensor, seen_from: Tensor, seen_to: Tensor, first_key: int,
    min_programs: int, scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """`forward` and which keys are finite; no interval begins before `first_key`. The rest is for the backward pass."""
    finite = finite_keys(unit_stride(k), unit_stride(v), first_key)
    return *forward(q, k, v, lo, hi, finite, scale), finite


def gradients(
    q: Tensor, k: Tensor, v: Tensor, finite: Tensor, do: Tensor, lse: Tensor, delta: Tensor,
    lo: Tensor | None, hi: Tensor | None, seen_from: Tensor | None, seen_to: Tensor | None, min_programs: int,
    scale: float, wide: bool = False, chosen: BlockMask | None = None, more_dq: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(dq, dk, dv), the last two as parts [splits, B, T, Hkv, D] that add up to them; dq in the lane QUERIES.

    lse (base 2) and delta are those of `launch.backward_rows`; the queries seen_from <= i < seen_to, int32 [T] each,
    see a key. Where there are fewer tiles of keys than `min_programs`, several programs share the queries of each. do
    is contiguous. `wide` leaves the parts in float32. All four bounds are None with `chosen`; only then are `more_dq`,
    those of the other branches, contiguous, added to dq.
    """
    q, k, v = unit_stride(q), unit_stride(k), unit_stride(v)
    with on_device(q):
        parts = _parts_of_keys(q, k, v, do, lo, hi, lse, delta, seen_from, seen_to, min_programs, scale, wide, chosen)
        with lane(QUERIES):
            dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
            _gradient_of_queries(q, k, v, finite, do, lo, hi, lse, delta, dq, scale, chosen, more_dq)
    return dq, *parts


def backward(
    do: Tensor | None, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, finite: Tensor, o: Tensor, lse: Tensor,
    lo: Tensor, hi: Tensor, seen_from: Tensor, seen_to: Tensor, min_programs: int, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(dq, dk, dv), from what `forward` was given and gave; None is a gradient of 0."""
    do = torch.zeros_like(o) if do is None else do.contiguous()
    rows = backward_rows(do, o, lse, dlse)
    dq, *parts = gradients(q, k, v, finite, do, *rows, lo, hi, seen_from, seen_to, min_programs, scale)
    return dq, *partial_sums.add_parts(parts, q.dtype)


def _gradient_of_queries(
    q: Tensor, k: Tensor, v: Tensor, finite: Tensor, do: Tensor, lo: Tensor | None, hi: Tensor | None, lse: Tensor,
    delta: Tensor, dq: Tensor, scale: float, chosen: BlockMask | None, more_dq: tuple[Tensor, Tensor] | None,
) -> None:  # fmt: skip
    """Write dq."""
    (batch, length, heads, dk), (num_keys, num_kv_heads, dv) = q.shape, v.shape[1:]
    if dq.numel() == 0:
        return
    if lo is not None and hi is not None and variant("compressed_window_backward_q", q, k, v) is Variant.HOPPER:
        hopper.compressed_window.backward_q(q, k, v, finite, do, lo, hi, lse, delta, dq, scale)
        return
    shape = _shape("backward_q", q, v, chosen)
    _backward_q[shape.tiles(length), num_kv_heads, batch](
        q, k, v, finite, do, lo, hi, _bits(chosen), lse, delta, dq, *(more_dq or (None, None)),
        *strides(q), *strides(k), *strides(v),
        length, num_keys, heads, num_kv_heads, heads // num_kv_heads, _ahead(chosen), scale, scale * LOG2E,
        *_sizes(shape, dk, dv, chosen), min(shape.stretches, _stretches_of(chosen)), **shape.launch,
    )  # fmt: skip


def _parts_of_keys(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, lo: Tensor | None, hi: Tensor | None, lse: Tensor, delta: Tensor,
    seen_from: Tensor | None, seen_to: Tensor | None, min_programs: int, scale: float, wide: bool,
    chosen: BlockMask | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """[splits, B, T, Hkv, D] of dk and of dv."""
    (batch, length, heads, dk), (num_keys, num_kv_heads, dv) = q.shape, v.shape[1:]
    on_hopper = (
        lo is not None and variant("compressed_window_backward_kv", q, k, v) is Variant.HOPPER and readable_by_tma(do)
    )
    kernel = "hopper.compressed_window_backward_kv"
    shape = tuning.shape(kernel, q, v) if on_hopper else _shape("backward_kv", q, v, chosen)
    *sizes, keys = _sizes(shape, dk, dv, chosen)
    tiles = cdiv(num_keys, keys)
    splits = _splits(tiles * num_kv_heads * batch, length, min_programs, masked=chosen is not None)
    if on_hopper:
        splits = min(splits, hopper.keys_and_values.most_splits(q, k, v))
    of_k, of_v = (x.new_empty(splits, *x.shape, dtype=torch.float32 if wide or splits > 1 else q.dtype) for x in (k, v))
    if not of_k.numel():
        return of_k, of_v
    if on_hopper:
        bounds = lo, hi, seen_from, seen_to
        hopper.keys_and_values.backward(q, k, v, do, lse, delta, bounds, of_k, of_v, scale)
        return of_k, of_v
    _backward_kv[tiles * splits, num_kv_heads, batch](
        q, k, v, do, lo, hi, _bits(chosen), lse, delta, seen_from, seen_to, of_k, of_v,
        *strides(q), *strides(k), *strides(v),
        length, num_keys, heads, num_kv_heads, heads // num_kv_heads, _ahead(chosen), scale, scale * LOG2E, splits,
        *sizes, keys, shape.rows_first, _stretches_of(chosen), **shape.launch,
    )  # fmt: skip
    return of_k, of_v


def _splits(tiles: int, num_queries: int, min_programs: int, *, masked: bool) -> int:
    """How many programs share the queries of one tile of keys: as many as keep the GPU busy.

    `masked`: the first keys are seen by all queries, and their programs end last; so no program takes more than
    MASKED_QUERIES.
    """
    tiles = max(tiles, 1)
    busy = min(cdiv(min_programs, tiles), num_queries // MIN_TOKENS_PER_SPLIT)
    even = min(cdiv(num_queries, MASKED_QUERIES), MASKED_PROGRAMS // tiles) if masked else 1
    return max(busy, even, 1)
