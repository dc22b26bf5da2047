"""The n best selection blocks of each query and group (Eq. 9, 11 and 12), forced ones first, ties to the lower index.

A row of scores stays in registers. Scores are not negative, so that as integers their bits stand in the same order.
The kernel searches for a threshold that exactly n scores reach: first downwards from the best score in growing steps,
then by bisection. If several blocks tie for the n-th place, no such threshold exists; the lower indices are taken.
"""

from __future__ import annotations

import functools

import triton
import triton.language as tl
from torch import Tensor

from nsa import geometry
from nsa.config import NSAConfig
from nsa.geometry import Layout
from nsa.triton_backend.tile import kernel
from nsa.triton_backend.tuning import cdiv, next_power_of_2

ELEMENTS = 128  # scores per program, unless a row has more
ELEMENTS_PER_WARP = 2048
READ_AT_ONCE = 4  # scores of selection blocks by one thread; rows of them are a multiple as long
BITS_OF_INF = tl.constexpr(0x7F800000)  # above any score; a forced block gets it
FIRST_STEP = tl.constexpr(1 << 19)  # below the best score, as integers: 1/32 to 1/16 of it
LAST_STEP = tl.constexpr(1 << 29)


@triton.jit
def best(score, block, current, INIT: tl.constexpr, LOCAL: tl.constexpr, N: tl.constexpr):
    """[rows, blocks]: which blocks are taken by rows with these scores, each of which stands in its block `current`."""
    forced = (block[None, :] < INIT) | (block[None, :] > current[:, None] - LOCAL)
    ranking = tl.where(forced, BITS_OF_INF, tl.cast(score, tl.int32, bitcast=True))
    ranking = tl.where(block[None, :] <= current[:, None], ranking, -1)

    # `reached` blocks, n or more unless fewer are visible, have a ranking >= low; fewer than n, or forced blocks alone,
    # have one >= high
    greatest = tl.max(tl.where(forced, -1, ranking), axis=1)
    low, high, reached = current * 0, greatest + 1, current + 1
    step = FIRST_STEP
    while tl.max(((reached > N) & (high - low > 1)).to(tl.int32), axis=0) > 0:
        below = tl.where(step < LAST_STEP, tl.maximum(greatest - step, 1), 1)  # 1: are there n that are not 0?
        middle = tl.where((low == 0) & (step <= LAST_STEP), below, low + (high - low) // 2)
        step = tl.where(step < LAST_STEP, step * 4, LAST_STEP + 1)
        count = tl.sum((ranking >= middle[:, None]).to(tl.int32), axis=1)
        low, high = tl.where(count >= N, middle, low), tl.where(count >= N, high, middle)
        reached = tl.where(count >= N, count, reached)
    taken = ranking >= low[:, None]
    if tl.max(reached, axis=0) > N:  # several blocks have the n-th best score
        better, equal = ranking > low[:, None], ranking == low[:, None]
        left = N - tl.sum(better.to(tl.int32), axis=1)
        taken = better | (equal & (tl.cumsum(equal.to(tl.int32), axis=1) <= left[:, None]))
    return taken


@kernel
def _topk(
    P, LO, HI, POSITIONS, OUT, BITS, first_query, count, S, WIDTH, HKV,
    SUMMED: tl.constexpr, STEP: tl.constexpr, FIRST_OFFSET: tl.constexpr, WEIGHTS: tl.constexpr, INIT: tl.constexpr,
    LOCAL: tl.constexpr, SIZE: tl.constexpr, N: tl.constexpr, NP: tl.constexpr, BR: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    b, row = tl.program_id(1).to(tl.int64), tl.program_id(0) * BR + tl.arange(0, BR)
    here = row < count * HKV
    query = first_query + row // HKV
    lo, hi = tl.load(LO + query, mask=here, other=0), tl.load(HI + query, mask=here, other=0)
    current = (tl.load(POSITIONS + query, mask=here, other=-1) // SIZE).to(tl.int32)  # the block that holds the query
    block = tl.arange(0, BLOCKS)

    if SUMMED:  # of one document, and four at a time: WIDTH is a multiple of 4
        from_row = P + ((b * count * HKV + row) * (WIDTH // 4) * 4)[:, None]
        some_visible = (block // 4 * (4 * STEP) + FIRST_OFFSET)[None, :] < hi[:, None]
        score = tl.load(from_row + block[None, :], mask=some_visible, other=0.0)
        score = tl.where((block * STEP + FIRST_OFFSET)[None, :] < hi[:, None], score, 0.0)
    else:
        from_row = P + ((b * count * HKV + row) * WIDTH + lo)[:, None]
        score = tl.zeros([BR, BLOCKS], tl.float32)
        for i in tl.static_range(len(WEIGHTS)):
            c = block * STEP + (FIRST_OFFSET + i)
            visible = (c >= 0)[None, :] & (c[None, :] < (hi - lo)[:, None])
            score += WEIGHTS[i] * tl.load(from_row + c[None, :], mask=visible, other=0.0)
    score = tl.where(score == score, score, 0.0)  # the bits of a NaN would rank above a forced block
    taken = best(score, block, current, INIT, LOCAL, N)

    out = OUT + ((b * S * HKV + first_query * HKV + row) * N)[:, None]
    place = tl.cumsum(taken.to(tl.int32), axis=1) - 1
    tl.store(out + place, tl.broadcast_to(block[None, :], [BR, BLOCKS]), mask=taken & here[:, None])
    column, found = tl.arange(0, NP)[None, :], tl.sum(taken.to(tl.int32), axis=1)
    none = (column >= found[:, None]) & (column < N)
    tl.store(out + column, tl.full([BR, NP], -1, tl.int32), mask=none & here[:, None])
    if BITS is not None:
        bit = tl.full([BLOCKS], 1, tl.int64) << block.to(tl.int64)
        bits = tl.sum(tl.where(taken, bit[None, :], 0), axis=1)
        tl.store(BITS + b * S * HKV + first_query * HKV + row, bits, mask=here)


@functools.cache
def weights(config: NSAConfig) -> tuple[int, tuple[int, ...]]:
    """Eq. 9's first offset, and the weights from there on."""
    return geometry.overlap_offsets(config).start, tuple(geometry.overlap_weights(config))


def choose(
    p: Tensor, layout: Layout, first: int, count: int, out: Tensor, summed: bool = False, bits: Tensor | None = None
) -> None:
    """Write out[:, first : first + count], int32 [B, S, Hkv, n], from p of these queries.

    p are the probabilities of compressed blocks; `summed`, the scores of selection blocks. `bits` int64 [B, S, Hkv]
    gets the same as bits, of at most 64 blocks.
    """
    config, (batch, length, num_kv_heads, n) = layout.config, out.shape
    seen = layout.num_keys - length + first + count  # no position in these queries is as large
    places = next_power_of_2(n)
    blocks = max(next_power_of_2(geometry.num_selection_blocks(seen, config)), places)
    rows = max(ELEMENTS // blocks, 1)
    _topk[cdiv(count * num_kv_heads, rows), batch](
        p, *layout.compressed_interval, layout.positions, out, bits, first, count, length, p.shape[3], num_kv_heads,
        summed, config.l_sel // config.d, *weights(config),
        config.init_blocks, config.local_blocks, config.l_sel, n, places, rows, blocks,
        num_warps=min(max(rows * blocks // ELEMENTS_PER_WARP, 1), 16),
    )  # fmt: skip
