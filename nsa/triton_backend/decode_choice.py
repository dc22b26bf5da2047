"""Decode, second launch: the choice of blocks (Eq. 8 to 12), a program per query and group of heads.

It knows the scores of all compressed blocks and the parts of their softmax; what it adds up, in which order, and how it
takes the n best is what the prefill does (`scores.py`, `top_n.py`).
"""

from __future__ import annotations

import triton.language as tl

from nsa.triton_backend.decode_compressed import visible_blocks
from nsa.triton_backend.tile import kernel
from nsa.triton_backend.top_n import best

HEADS = 8  # whose scores are in registers at a time


@kernel
def _choose(
    SCORES, LSE_PART, LENGTHS, OUT, S, HQ, HKV, G, slots, splits,
    SIZE: tl.constexpr, STRIDE: tl.constexpr, SEL: tl.constexpr, FIRST_OFFSET: tl.constexpr, WEIGHTS: tl.constexpr,
    INIT: tl.constexpr, LOCAL: tl.constexpr, N: tl.constexpr, NP: tl.constexpr, BLOCKS: tl.constexpr,
    HEADS: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """OUT int32 [B, S, Hkv, N], ascending, -1 at the end."""
    i, h, b = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    t = tl.load(LENGTHS + b) - S + tl.program_id(0)
    seen = visible_blocks(t, SIZE, STRIDE)
    block, split = tl.arange(0, BLOCKS), tl.arange(0, SPLITS)
    score = tl.zeros([1, BLOCKS], tl.float32)
    for offset in tl.static_range(len(WEIGHTS)):
        c = block * (SEL // STRIDE) + (FIRST_OFFSET + offset)
        visible = (c >= 0) & (c < seen)
        p = tl.zeros([BLOCKS], tl.float32)
        for first in range(0, G, HEADS):
            g = first + tl.arange(0, HEADS)
            row = (b * S + i) * HQ + h * G + g
            part = tl.load(LSE_PART + row[:, None] * splits + split[None, :],
                           mask=(g < G)[:, None] & (split < splits)[None, :], other=float("-inf"))  # fmt: skip
            top = tl.max(part, axis=1)
            top = tl.where(top == float("-inf"), 0.0, top)
            lse = top + tl.log2(tl.sum(tl.exp2(part - top[:, None]), axis=1))
            s = tl.load(SCORES + row[:, None] * slots + c[None, :], mask=(g < G)[:, None] & visible[None, :],
                        other=float("-inf"))  # fmt: skip
            p += tl.sum(tl.where(visible[None, :] & (g < G)[:, None], tl.exp2(s - lse[:, None]), 0.0), axis=0)
        score += WEIGHTS[offset] * p[None, :]
    score = tl.where(score == score, score, 0.0)
    taken = best(score, block, tl.full([1], 0, tl.int32) + t // SEL, INIT, LOCAL, N)

    out = OUT + ((b * S + i) * HKV + h) * N
    position = tl.cumsum(taken.to(tl.int32), axis=1) - 1
    tl.store(out + position, tl.broadcast_to(block[None, :], [1, BLOCKS]), mask=taken)
    column, found = tl.arange(0, NP), tl.sum(tl.sum(taken.to(tl.int32), axis=1), axis=0)
    tl.store(out + column, tl.full([NP], -1, tl.int32), mask=(column >= found) & (column < N))
