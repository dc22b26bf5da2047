"""Decode, fourth launch: the selected blocks and the window of each query, both shared among several programs."""

from __future__ import annotations

import triton
import triton.language as tl

from nsa.triton_backend.decode_compressed import store_partial
from nsa.triton_backend.pages import load_keys
from nsa.triton_backend.tile import kernel, load_rows, online_softmax, product, spoilt


@triton.jit
def _tile(q, first, lo, hi, K, V, TABLE, table_b, k_o, k_r, k_h, v_o, v_r, v_h, b, h, top, total, acc, to_base_2,
          PAGE: tl.constexpr, WHOLE: tl.constexpr, DK: tl.constexpr, DKP: tl.constexpr, DV: tl.constexpr,
          DVP: tl.constexpr, BN: tl.constexpr):  # fmt: skip
    """Attention over those of the keys first … first + BN that lie in lo … hi; the others are not even loaded."""
    place = tl.arange(0, BN)
    visible = (first + place >= lo) & (first + place < hi)
    k, v = load_keys(K, V, TABLE, table_b, k_o, k_r, k_h, v_o, v_r, v_h, b, h, first, place, visible,
                     PAGE, WHOLE, DK, DKP, DV, DVP)  # fmt: skip
    s = tl.where(visible[None, :], product(q, k), float("-inf"))
    top, total, acc = online_softmax(s, v, top, total, acc, to_base_2)
    return top, total, acc, tl.sum(visible.to(tl.int32), axis=0)


@kernel
def _near(
    Q, K, V, TABLE, WINDOW_K, WINDOW_V, WINDOW_TABLE, BLOCKS, LENGTHS, O_PART, LSE_PART, READ, q_b, q_s, q_h,
    table_b, k_o, k_r, k_h, v_o, v_r, v_h, window_b, wk_o, wk_r, wk_h, wv_o, wv_r, wv_h, S, HQ, HKV, G, to_base_2,
    SEL: tl.constexpr, N: tl.constexpr, W: tl.constexpr, PAGE: tl.constexpr, WINDOW_PAGE: tl.constexpr,
    SELECTED_SPLITS: tl.constexpr, WINDOW_SPLITS: tl.constexpr,
    DK: tl.constexpr, DV: tl.constexpr, DKP: tl.constexpr, DVP: tl.constexpr, GP: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """O_PART [B, S, Hq, splits, Dv], LSE_PART [B, S, Hq, splits] base 2, READ [B, S, Hkv, splits]: first the selected
    branch's shares, then the window's."""
    splits: tl.constexpr = SELECTED_SPLITS + WINDOW_SPLITS
    split, i = tl.program_id(0) % splits, (tl.program_id(0) // splits).to(tl.int64)
    h, b = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    t = tl.load(LENGTHS + b) - S + tl.program_id(0) // splits
    g = tl.arange(0, GP)
    real = g < G
    q = load_rows(Q + b * q_b + i * q_s, (h * G + g) * q_h, real, DK, DKP)
    top, total = tl.full([GP], float("-inf"), tl.float32), tl.zeros([GP], tl.float32)
    acc, read = tl.zeros([GP, DVP], tl.float32), tl.zeros([], tl.int32)
    if split < SELECTED_SPLITS:
        steps: tl.constexpr = (SEL + BN - 1) // BN
        share: tl.constexpr = (N * steps + SELECTED_SPLITS - 1) // SELECTED_SPLITS
        chosen = BLOCKS + ((b * S + i) * HKV + h) * N
        for step in range(split * share, tl.minimum(split * share + share, N * steps)):
            block = tl.load(chosen + step // steps)
            lo = tl.maximum(block, 0) * SEL
            hi = tl.where(block < 0, 0, tl.minimum(lo + SEL, t + 1))
            top, total, acc, more = _tile(
                q, lo + step % steps * BN, lo, hi, K, V, TABLE, table_b, k_o, k_r, k_h, v_o, v_r, v_h, b, h,
                top, total, acc, to_base_2, PAGE, SEL % BN == 0, DK, DKP, DV, DVP, BN,
            )  # fmt: skip
            read += more
    else:
        lo = tl.maximum(t - W + 1, 0)
        begin = lo // BN * BN
        window_share = tl.cdiv(tl.cdiv(t + 1 - begin, BN), WINDOW_SPLITS) * BN
        first = begin + (split - SELECTED_SPLITS) * window_share
        for at in range(first, tl.minimum(first + window_share, t + 1), BN):
            top, total, acc, more = _tile(
                q, at, lo, t + 1, WINDOW_K, WINDOW_V, WINDOW_TABLE, window_b, wk_o, wk_r, wk_h, wv_o, wv_r, wv_h, b, h,
                top, total, acc, to_base_2, WINDOW_PAGE, WINDOW_PAGE % BN == 0, DK, DKP, DV, DVP, BN,
            )  # fmt: skip
            read += more
    row = ((b * S + i) * HQ + h * G + g) * splits + split
    store_partial(O_PART, LSE_PART, row, real, top, total, acc, spoilt(q) & (read > 0), DV, DVP)
    tl.store(READ + ((b * S + i) * HKV + h) * splits + split, read)
