"""Decode, first launch: the compressed branch, each sequence's blocks shared among several programs.

A program writes the partial output of its share, and the scores, which the choice of blocks needs once the whole
softmax is known. How many blocks there are is read from the device.
"""

from __future__ import annotations

import triton
import triton.language as tl

from nsa.triton_backend.pages import load_keys
from nsa.triton_backend.tile import kernel, load_rows, online_softmax, product, rows_of, spoilt, store_rows


@triton.jit
def visible_blocks(t, SIZE: tl.constexpr, STRIDE: tl.constexpr):
    """How many compressed blocks token t sees: those that end at or before it."""
    return tl.where(t + 1 < SIZE, 0, (t + 1 - SIZE) // STRIDE + 1)


@kernel
def _compressed(
    Q, K, V, TABLE, LENGTHS, SCORES, O_PART, LSE_PART, READ, q_b, q_s, q_h,
    table_b, k_o, k_r, k_h, v_o, v_r, v_h, S, HQ, HKV, G, slots, splits, to_base_2,
    SIZE: tl.constexpr, STRIDE: tl.constexpr, PAGE: tl.constexpr, ALONE: tl.constexpr,
    DK: tl.constexpr, DV: tl.constexpr, DKP: tl.constexpr, DVP: tl.constexpr,
    BT: tl.constexpr, GP: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """SCORES [B, S, Hq, slots] base 2, O_PART [B, S, Hq, splits, Dv], LSE_PART [B, S, Hq, splits] base 2, READ
    [B, S, Hkv, splits]."""
    slots = tl.multiple_of(slots, 64)  # as `decode.SLOTS` has it, or no store would be wide
    first_token, split = tl.program_id(0) // splits * BT, tl.program_id(0) % splits
    h, b = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    i, g, real = rows_of(first_token, S, G, BT, GP)
    before = tl.load(LENGTHS + b) - S  # tokens that stand before the queries
    seen = visible_blocks(before + i.to(tl.int32), SIZE, STRIDE)
    end = visible_blocks(before + tl.minimum(first_token + BT, S) - 1, SIZE, STRIDE)
    share = tl.cdiv(tl.cdiv(end, BN), splits) * BN
    first = split * share
    stop = tl.minimum(end, first + share)
    q = load_rows(Q + b * q_b, i * q_s + (h * G + g) * q_h, real, DK, DKP)
    row = (b * S + i) * HQ + h * G + g

    top, total = tl.full([BT * GP], float("-inf"), tl.float32), tl.zeros([BT * GP], tl.float32)
    acc, place = tl.zeros([BT * GP, DVP], tl.float32), tl.arange(0, BN)
    seen_by_all = visible_blocks(before + first_token, SIZE, STRIDE)
    whole = first + tl.maximum(tl.minimum(seen_by_all, stop) - first, 0) // BN * BN
    for stretch in tl.static_range(2):  # tiles that every query sees the whole of, and then what is left
        for at in range(first if stretch == 0 else whole, whole if stretch == 0 else stop, BN):
            block = at + place
            inside = block < stop
            k, v = load_keys(K, V, TABLE, table_b, k_o, k_r, k_h, v_o, v_r, v_h, b, h, at, place,
                             None if stretch == 0 else inside, PAGE, PAGE % BN == 0, DK, DKP, DV, DVP)  # fmt: skip
            s = product(q, k)
            scored = real[:, None] if stretch == 0 else real[:, None] & inside[None, :]
            tl.store(SCORES + row[:, None] * slots + block[None, :], s * to_base_2, mask=scored)
            if stretch == 1:
                if not ALONE:  # a query that does not see a block must not meet what is not finite in it
                    good = ~(spoilt(k) | spoilt(v))
                    v = tl.where(good[:, None], v, 0.0)
                    s = tl.where(good[None, :], s, float("nan"))
                s = tl.where(block[None, :] < tl.minimum(seen, stop)[:, None], s, float("-inf"))
            top, total, acc = online_softmax(s, v, top, total, acc, to_base_2)
    read = tl.minimum(tl.maximum(seen - first, 0), tl.maximum(stop - first, 0))
    store_partial(O_PART, LSE_PART, row * splits + split, real, top, total, acc, spoilt(q) & (read > 0),
                  DV, DVP)  # fmt: skip
    tl.store(READ + ((b * S + i) * HKV + h) * splits + split, read, mask=real & (g == 0))


@triton.jit
def store_partial(O_PART, LSE_PART, row, real, top, total, acc, bad, DV: tl.constexpr, DVP: tl.constexpr):
    """Write a share's output, and its lse base 2: -inf where it saw nothing, NaN for `bad` rows."""
    something = tl.where(total == 0.0, 1.0, total)
    lse = tl.where(total == 0.0, float("-inf"), top + tl.log2(something))
    store_rows(O_PART, row * DV, real, acc * (1.0 / something)[:, None], DV, DVP)
    tl.store(LSE_PART + row, tl.where(bad, float("nan"), lse), mask=real)
