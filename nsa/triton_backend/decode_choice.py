"""Decode, second and third launch: the choice of blocks (Eq. 8 to 12).

The scores of all compressed blocks and the parts of their softmax are known. First they become probabilities, summed
over the heads of a group, by as many programs as there are scores to read; then one program per query and group takes
the n best. What is added up, in which order, and how the best are found is what the prefill does (`scores.py`,
`top_n.py`).
"""

from __future__ import annotations

import triton.language as tl

from nsa.triton_backend.decode_compressed import visible_blocks
from nsa.triton_backend.tile import kernel
from nsa.triton_backend.top_n import best

SCORES = 4096  # per program of the first kernel


@kernel
def _group_probabilities(
    S_CMP, LSE_PART, LENGTHS, P, S, HQ, HKV, G, slots, splits, tiles,
    SIZE: tl.constexpr, STRIDE: tl.constexpr, GP: tl.constexpr, BN: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """P float32 [B, S, Hkv, slots] of the scores S_CMP [B, S, Hq, slots], base 2, written for the blocks that a query
    sees."""
    i, tile = (tl.program_id(0) // tiles).to(tl.int64), tl.program_id(0) % tiles
    h, b = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    seen = visible_blocks(tl.load(LENGTHS + b) - S + tl.program_id(0) // tiles, SIZE, STRIDE)
    if tile * BN >= seen:
        return
    slots = tl.multiple_of(slots, 64)  # as `decode.SLOTS` has it, or no load would be wide
    g, split, block = tl.arange(0, GP), tl.arange(0, SPLITS), tile * BN + tl.arange(0, BN)
    row = (b * S + i) * HQ + h * G + g
    part = tl.load(LSE_PART + row[:, None] * splits + split[None, :], mask=(g < G)[:, None] & (split < splits)[None, :],
                   other=float("-inf"))  # fmt: skip
    top = tl.max(part, axis=1)
    top = tl.where(top == float("-inf"), 0.0, top)
    lse = top + tl.log2(tl.sum(tl.exp2(part - top[:, None]), axis=1))
    shown = (g < G)[:, None] & (block < seen)[None, :]
    s = tl.load(S_CMP + row[:, None] * slots + block[None, :], mask=shown, other=float("-inf"))
    p = tl.sum(tl.where(shown, tl.exp2(s - lse[:, None]), 0.0), axis=0)
    tl.store(P + ((b * S + i) * HKV + h) * slots + block, p, mask=block < seen)


@kernel
def _choose(
    P, LENGTHS, OUT, S, HKV, slots,
    SIZE: tl.constexpr, STRIDE: tl.constexpr, SEL: tl.constexpr, FIRST_OFFSET: tl.constexpr, WEIGHTS: tl.constexpr,
    INIT: tl.constexpr, LOCAL: tl.constexpr, N: tl.constexpr, NP: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """OUT int32 [B, S, Hkv, N], ascending, -1 at the end."""
    i, h, b = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    t = tl.load(LENGTHS + b) - S + tl.program_id(0)
    seen, block = visible_blocks(t, SIZE, STRIDE), tl.arange(0, BLOCKS)
    row = (b * S + i) * HKV + h
    score = tl.zeros([1, BLOCKS], tl.float32)
    for offset in tl.static_range(len(WEIGHTS)):
        c = block * (SEL // STRIDE) + (FIRST_OFFSET + offset)
        p = tl.load(P + row * slots + c, mask=(c >= 0) & (c < seen), other=0.0)
        score += WEIGHTS[offset] * p[None, :]
    score = tl.where(score == score, score, 0.0)
    taken = best(score, block, tl.full([1], 0, tl.int32) + t // SEL, INIT, LOCAL, N)

    out = OUT + row * N
    position = tl.cumsum(taken.to(tl.int32), axis=1) - 1
    tl.store(out + position, tl.broadcast_to(block[None, :], [1, BLOCKS]), mask=taken)
    column, found = tl.arange(0, NP), tl.sum(tl.sum(taken.to(tl.int32), axis=1), axis=0)
    tl.store(out + column, tl.full([NP], -1, tl.int32), mask=(column >= found) & (column < N))
