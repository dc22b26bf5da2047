"""Scores of the selection blocks and the n best of them (Eq. 8 to 12) in one pass, with no buffer of scores.

Eq. 9's sum over the compressed blocks that overlap a selection block is a sum over a few fixed offsets; for each of
them a product scores one compressed block per selection block. The n best so far are kept as integers that hold a
float32 score and, for ties, the lower index, and merged with each new tile of blocks by a sort.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa import geometry
from nsa.geometry import Layout
from nsa.triton_backend import tuning
from nsa.triton_backend.interval import IntervalAttention
from nsa.triton_backend.launch import LOG2E, on_device, strides, unit_stride
from nsa.triton_backend.tile import load_rows, product, rows_of

LAST = tl.constexpr(2**31 - 1)  # above any block index; x ^ LAST turns the order of indices around


@triton.jit
def _probability(q, k_base, k_s, lse, base, c, row_base, row_hi, to_base_2, DK: tl.constexpr, DKP: tl.constexpr):
    """p [rows, blocks c] of the rows whose document begins at slot `base`, 0 where a row does not see the block."""
    slot = (base + c).to(tl.int64)
    k = load_rows(k_base, slot * k_s, (c >= 0) & (slot < tl.max(row_hi)), DK, DKP)
    visible = (c >= 0)[None, :] & (slot[None, :] < row_hi[:, None]) & (row_base == base)[:, None]
    return tl.where(visible, tl.exp2(product(q, k) * to_base_2 - lse[:, None]), 0.0)


@triton.jit
def _select(
    Q, K, LSE, LO, HI, POSITIONS, OUT, q_b, q_s, q_h, k_b, k_s, k_h, S, HQ, HKV, G, to_base_2,
    STEP: tl.constexpr, WHOLE: tl.constexpr, FIRST_OFFSET: tl.constexpr, WEIGHTS: tl.constexpr,
    INIT: tl.constexpr, LOCAL: tl.constexpr, SIZE: tl.constexpr, N: tl.constexpr, NP: tl.constexpr,
    DK: tl.constexpr, DKP: tl.constexpr, BT: tl.constexpr, GP: tl.constexpr,
):  # fmt: skip
    first_token, h, b = tl.program_id(0) * BT, tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    last_token = tl.minimum(first_token + BT, S) - 1
    token, g, real = rows_of(first_token, S, G, BT, GP)
    row = (b * S + token) * HQ + h * G + g
    q = load_rows(Q + b * q_b, token * q_s + (h * G + g) * q_h, real, DK, DKP)
    lse = tl.load(LSE + row, mask=real, other=0.0)
    lse = tl.where(lse == float("-inf"), 0.0, lse * 1.4426950408889634)
    row_base, row_hi = tl.load(LO + token, mask=real, other=-1), tl.load(HI + token, mask=real, other=0)
    k_base = K + b * k_b + h * k_h
    if WHOLE:  # the weight of each compressed block that begins in a selection block, block after block
        inner = tl.arange(0, NP * STEP) % STEP
        weight = tl.zeros([NP * STEP], tl.float32)
        for i in tl.static_range(STEP):
            weight = tl.where(inner == i, WEIGHTS[i - FIRST_OFFSET] * 1.0, weight)

    query = (first_token + tl.arange(0, BT)).to(tl.int64)
    here = query < S
    lo = tl.load(LO + query, mask=here, other=-1)
    current = tl.load(POSITIONS + query, mask=here, other=-1) // SIZE  # the block that holds the query
    best = tl.full([BT, NP], -1, tl.int64)
    base = tl.load(LO + first_token)
    last_base = tl.load(LO + last_token)
    while base <= last_base:  # once per document that stands in this tile
        own = lo == base
        blocks_here = tl.max(tl.where(own, current, -1), axis=0) + 1
        for first in range(0, blocks_here, NP):
            block = first + tl.arange(0, NP)
            score = tl.zeros([BT, NP], tl.float32)
            for i in tl.static_range(len(WEIGHTS)):
                if i < -FIRST_OFFSET or not WHOLE:
                    c = block * STEP + (FIRST_OFFSET + i)
                    p = _probability(q, k_base, k_s, lse, base, c, row_base, row_hi, to_base_2, DK, DKP)
                    score += WEIGHTS[i] * tl.sum(tl.reshape(p, [BT, GP, NP]), axis=1)
            if WHOLE:
                c = first * STEP + tl.arange(0, NP * STEP)
                p = _probability(q, k_base, k_s, lse, base, c, row_base, row_hi, to_base_2, DK, DKP)
                p = tl.sum(tl.reshape(p, [BT, GP, NP * STEP]), axis=1) * weight[None, :]
                score += tl.sum(tl.reshape(p, [BT, NP, STEP]), axis=2)
            score = tl.where(score == score, score, 0.0)
            forced = (block[None, :] < INIT) | (block[None, :] > current[:, None] - LOCAL)
            score = tl.where(forced, float("inf"), score)
            ranking = (score.to(tl.int32, bitcast=True).to(tl.int64) << 32) | (block ^ LAST)[None, :].to(tl.int64)
            ranking = tl.where(own[:, None] & (block[None, :] <= current[:, None]), ranking, -1)
            # of two sequences sorted in opposite ways, the larger of each pair are the best of both
            best = tl.sort(tl.maximum(best, tl.sort(ranking)), descending=True)
        base = tl.min(tl.where(lo > base, lo, LAST), axis=0)

    column = tl.arange(0, NP)[None, :]
    index = tl.where((best >= 0) & (column < N), (best & LAST) ^ LAST, LAST).to(tl.int32)
    index = tl.sort(index)
    out = ((b * S + query) * HKV + h)[:, None] * N + column
    tl.store(OUT + out, tl.where(index == LAST, -1, index), mask=here[:, None] & (column < N))


def select_blocks(q: Tensor, k_cmp: Tensor, layout: Layout, scale: float, lse: Tensor | None = None) -> Tensor:
    """int32 [B, S, Hkv, n]; see `nsa.select_blocks`."""
    q, k_cmp, config = unit_stride(q), unit_stride(k_cmp), layout.config
    (batch, length, heads, dk), kv_heads = q.shape, k_cmp.shape[2]
    lo, hi = layout.compressed_interval
    if lse is None:
        lse = IntervalAttention.apply(q, k_cmp, k_cmp, lo, hi, 1, scale)[1]
    out = torch.empty(batch, length, kv_heads, config.n_sel, dtype=torch.int32, device=q.device)
    if out.numel() == 0:
        return out
    places, step = tuning.padded(config.n_sel), config.l_sel // config.d
    shape = tuning.shape("select", q, k_cmp)
    whole = step & (step - 1) == 0  # only then can a tile of compressed blocks be cut by selection block
    with on_device(q):
        _select[triton.cdiv(length, shape.tokens), kv_heads, batch](
            q, k_cmp, lse.contiguous(), lo, hi, layout.positions, out, *strides(q), *strides(k_cmp),
            length, heads, kv_heads, heads // kv_heads, scale * LOG2E,
            step, whole, geometry.overlap_offsets(config).start, tuple(geometry.overlap_weights(config)),
            config.init_blocks, config.local_blocks, config.l_sel, config.n_sel, places,
            dk, shape.dk, shape.tokens, shape.group, **shape.launch,
        )  # fmt: skip
    return out
