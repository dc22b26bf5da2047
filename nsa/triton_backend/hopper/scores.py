"""`scores._group_probabilities`: the next product runs beside the exponentials of this one.

Of one document, whose selection blocks begin at every fourth compressed one, it writes the scores of these blocks
(Eq. 9): a quarter of what is written, and read, for the choice.
"""

from __future__ import annotations

from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import jit
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from nsa.triton_backend.hopper import CHANNELS
from nsa.triton_backend.hopper.tile import (
    descriptors,
    fetch,
    kernel,
    load_rows,
    ring,
    rows_of,
    shared,
    start,
    tile,
    wait,
)
from nsa.triton_backend.launch import strides
from nsa.triton_backend.tuning import Shape

SUMMED_WEIGHTS = (1, 2, 2, 2, 1)
"""Of Eq. 9, from the last compressed block before a selection block to its own last one: l = 2 d, l' = 4 d."""


@jit
def _rows_of(first, S, G, BT: gl.constexpr, GP: gl.constexpr, layout: gl.constexpr):
    """As `tile.rows_of`, in an order in which one thread has all heads of a token.

    Of a product's 8 columns a thread has two, of each 8 the same: these are of one token, so that a sum over the heads
    passes nothing from thread to thread.
    """
    if BT < 4 or GP < 2:
        token, head, real = rows_of(first, S, G, BT, GP, layout)
    else:
        row = gl.arange(0, BT * GP, layout)
        pair = row // 8
        token = (first + pair // (GP // 2) * 4 + row % 8 // 2).to(gl.int64)
        head = pair % (GP // 2) * 2 + row % 2
        real = (token < S) & (head < G)
    return token, head, real


@jit
def _sum_of_heads(p, BT: gl.constexpr, GP: gl.constexpr):
    """[blocks, tokens], from p [blocks, rows of `_rows_of`]."""
    if BT >= 4 and GP >= 2:
        p = p.reshape([p.shape[0], BT // 4, GP // 2, 4, 2]).permute((0, 1, 3, 2, 4))
    return gl.sum(p.reshape([p.shape[0], BT, GP]), 2)


@jit
def _block_scores(p, before, layout: gl.constexpr):
    """(scores [blocks, queries], moved [blocks, queries]), both in `layout`, of p [4 * blocks, queries].

    moved[j] is the last row of p in block j - 1; moved[0] is that of the last block, which the next tile needs as
    `before`. The order of the sum is that of `topk.py`, so that scores are equal bit for bit.
    """
    BLOCKS: gl.constexpr = p.shape[0] // 4
    p = p.reshape([BLOCKS, 2, 2, p.shape[1]]).permute((0, 3, 1, 2))
    even, odd = gl.split(p)
    p_0, p_2 = gl.split(even)
    p_1, p_3 = gl.split(odd)
    p_0, p_1, p_2, p_3 = (
        gl.convert_layout(p_0, layout), gl.convert_layout(p_1, layout),
        gl.convert_layout(p_2, layout), gl.convert_layout(p_3, layout),
    )  # fmt: skip
    block = gl.expand_dims(gl.arange(0, BLOCKS, gl.SliceLayout(1, layout)), 1)
    above = (block + (BLOCKS - 1)) % BLOCKS + gl.zeros(p_3.shape, gl.int32, layout)
    moved = gl.gather(p_3, above, 0)
    score = gl.where(block == 0, before, moved) + 2.0 * p_0
    return score + 2.0 * p_1 + 2.0 * p_2 + p_3, moved


@kernel
def _group_probabilities(
    Q, K, K_REST, LSE, LO, HI, P, q_b, q_s, q_h, first_query, count, S, WIDTH, HQ, HKV, G, to_base_2, splits,
    SUMMED: gl.constexpr, D: gl.constexpr, REST: gl.constexpr, BT: gl.constexpr, GP: gl.constexpr, BN: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """P [B, count, Hkv, WIDTH], of compressed blocks as in `scores.py`, or SUMMED the scores of selection blocks."""
    WARPS: gl.constexpr = gl.num_warps()
    gl.static_assert(BN == 16 * WARPS, "a warpgroup takes 64 blocks")
    gl.static_assert(STAGES > 1, "two tiles are waited for before the first is given back")
    of_s: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BT * GP, 16])  # [blocks, rows]
    flat: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    # [blocks, queries], as written; SUMMED, a thread has the 4 compressed blocks of a selection block
    BLOCKS: gl.constexpr = BN // 4
    ALONG: gl.constexpr = BLOCKS if BLOCKS < 32 else 32
    of_p: gl.constexpr = (
        gl.BlockedLayout([4, 1], [ALONG, 32 // ALONG], [1, WARPS], [0, 1])
        if SUMMED
        else gl.BlockedLayout([1, 1], [32, 1], [2, WARPS // 2], [0, 1])
    )
    of_sums: gl.constexpr = gl.BlockedLayout([1, 1], [ALONG, 32 // ALONG], [1, WARPS], [0, 1])
    # the last queries see the most blocks, so they start first
    number, split = gl.num_programs(0) // splits - 1 - gl.program_id(0) // splits, gl.program_id(0) % splits
    h, b = gl.program_id(1), gl.program_id(2)
    first_token, end_query = first_query + number * BT, first_query + count
    last_token = gl.minimum(first_token + BT, end_query) - 1
    first, end = gl.load(LO + first_token), gl.load(HI + last_token)
    if SUMMED:
        end += 1  # the block behind the last compressed one has a share of it
    per_split = gl.cdiv(gl.cdiv(end - first, BN), splits) * BN
    first += split * per_split
    end = gl.minimum(end, first + per_split)
    wanted_from = first
    if SUMMED:
        first = gl.maximum(first - BN, 0)  # for the share of the split before in the first block
    tiles = gl.cdiv(gl.maximum(end - first, 0), BN)

    slots, full = ring(K, STAGES)
    start(K, b, first, h, slots, full, STAGES, tiles, BN)
    token, g, real = _rows_of(first_token, end_query, G, BT, GP, gl.SliceLayout(1, flat))
    at_q = b.to(gl.int64) * q_b + token * q_s + (h * G + g) * q_h
    q_tile = shared(load_rows(Q, at_q, real, D, flat))
    if REST > 0:
        rest_slots, rest_full = ring(K_REST, STAGES)
        start(K_REST, b, first, h, rest_slots, rest_full, STAGES, tiles, BN)
        q_rest_tile = shared(load_rows(Q, at_q + D, real, REST, flat))
    fence_async_shared()
    token, g, real = _rows_of(first_token, end_query, G, BT, GP, gl.SliceLayout(0, of_s))
    lse = (
        gl.load(LSE + ((b.to(gl.int64) * S + token) * HQ + h * G + g), mask=real, other=float("inf"))
        * 1.4426950408889634
    )

    query = first_token + gl.arange(0, BT, gl.SliceLayout(0, of_p))
    place = gl.arange(0, BN, gl.SliceLayout(1, of_p))
    out = ((b.to(gl.int64) * count + query - first_query) * HKV + h) * WIDTH
    if SUMMED:
        hi = gl.expand_dims(gl.load(HI + query, mask=query < end_query, other=0), 0)
        query = first_token + gl.arange(0, BT, gl.SliceLayout(0, of_sums))
        out = gl.convert_layout(out, gl.SliceLayout(0, of_sums))
        before = gl.zeros([BLOCKS, BT], gl.float32, of_sums)
        block = gl.arange(0, BLOCKS, gl.SliceLayout(1, of_sums))
    nothing = gl.zeros([BN, BT * GP], gl.float32, of_s)
    wait(full, 0, STAGES, tiles > 0)
    s = warpgroup_mma(tile(slots, 0, STAGES), q_tile.permute((1, 0)), nothing, use_acc=False)
    wait(full, 1, STAGES, tiles > 1)
    if REST > 0:
        wait(rest_full, 0, STAGES, tiles > 0)
        s = warpgroup_mma(tile(rest_slots, 0, STAGES), q_rest_tile.permute((1, 0)), s)
        wait(rest_full, 1, STAGES, tiles > 1)
    for pair in range(gl.cdiv(tiles, 2)):  # in pairs, so that no scores are moved to where the next ones were
        for half in gl.static_range(2):
            this = pair * 2 + half
            then, wanted = this + STAGES, this + STAGES < tiles
            fetch(K, b, first + then * BN, h, slots, full, then, STAGES, wanted)
            k = tile(slots, this + 1, STAGES)  # behind the last there is one more product, of whatever stands there
            scores = warpgroup_mma(k, q_tile.permute((1, 0)), nothing, use_acc=False, is_async=True)
            if REST > 0:
                fetch(K_REST, b, first + then * BN, h, rest_slots, rest_full, then, STAGES, wanted)
                k_rest = tile(rest_slots, this + 1, STAGES)
                scores = warpgroup_mma(k_rest, q_rest_tile.permute((1, 0)), scores, is_async=True)
            p = gl.exp2(s * to_base_2 - gl.expand_dims(lse, 0))
            p = gl.convert_layout(_sum_of_heads(p, BT, GP), of_p)
            slot = first + this * BN + place
            if SUMMED:
                p = gl.where(gl.expand_dims(slot, 1) < hi, p, 0.0)
                p, before = _block_scores(p, before, of_sums)
                slot = first + this * BN + 4 * block
            inside = gl.expand_dims((slot >= wanted_from) & (slot < end), 1) & gl.expand_dims(query < end_query, 0)
            if SUMMED:
                slot = slot // 4
            gl.store(P + (gl.expand_dims(out, 0) + gl.expand_dims(slot, 1)), p, mask=inside)
            wait(full, this + 2, STAGES, this + 2 < tiles)  # here, as in `compressed_window._forward`
            if REST > 0:
                wait(rest_full, this + 2, STAGES, this + 2 < tiles)
            s = warpgroup_mma_wait(0, deps=[scores])


def group_probabilities(
    q: Tensor, k_cmp: Tensor, lse: Tensor, bounds: tuple[Tensor, Tensor], p: Tensor, first: int, count: int,
    splits: int, shape: Shape, to_base_2: float, summed: bool,
) -> None:  # fmt: skip
    """Write p of `count` queries from `first` on, where a tile of theirs sees a block.

    `summed` needs one document and `SUMMED_WEIGHTS`: then p [B, count, Hkv, selection blocks and a few more] are
    scores, written for the selection blocks that overlap a compressed block which a query of the tile sees.
    """
    (batch, length, heads, dk), num_kv_heads = q.shape, k_cmp.shape[2]
    tiles = -(-count // shape.tokens)
    _group_probabilities[tiles * splits, num_kv_heads, batch](
        q, *descriptors(k_cmp, shape.keys), lse, *bounds, p, *strides(q),
        first, count, length, p.shape[3], heads, num_kv_heads, heads // num_kv_heads, to_base_2, splits,
        summed, CHANNELS, dk - CHANNELS, shape.tokens, shape.group, shape.keys, shape.num_stages, **shape.launch,
    )  # fmt: skip
