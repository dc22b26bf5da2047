"""Which blocks the queries of a tile chose together: what `hopper/shared_blocks*.py` read once for all of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton.language as tl
from torch import Tensor

from nsa.geometry import Layout
from nsa.triton_backend.launching.relaunch import on_device
from nsa.triton_backend.tile import kernel
from nsa.triton_backend.tuning import cdiv, next_power_of_2

KEYS_PER_PROGRAM = 1024  # whose flags are read
NONE = tl.constexpr(2**30)  # behind any block
FORWARD_TOKENS, DQ_TOKENS = 4, 8
"""Neighbouring queries that share their blocks: with groups of 9 to 16 heads the rows of one warpgroup and of two."""


@dataclass(frozen=True)
class Unions:
    """The blocks of each `tokens` queries and group."""

    blocks: Tensor
    """int32 [B, Hkv, tiles, tokens * n], ascending by block, not written beyond the tile's count:
    block << (tokens + 1) | has_nonfinite << tokens | bits of the queries that chose it, the lowest for the first. Fewer
    than 2**(30 - tokens) blocks. Where no query chose any, block 0 stands there for none of them, so that no tile is
    empty."""
    counts: Tensor
    """int32 [B, Hkv, tiles, 2]: how many blocks, and how many of them all these queries see in full."""


@kernel
def _finite_blocks(FINITE, OUT, T, max_blocks, HKV, SIZE: tl.constexpr, BLOCKS: tl.constexpr, KEYS: tl.constexpr):
    """OUT [B, max_blocks, Hkv]: whether all keys of a block are finite."""
    h, b = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    block, place = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS), tl.arange(0, KEYS)
    key = block[:, None] * SIZE + place[None, :]
    inside = (place < SIZE)[None, :] & (key < T)
    finite = tl.load(FINITE + (b * T + key) * HKV + h, mask=inside, other=1)
    tl.store(OUT + (b * max_blocks + block) * HKV + h, tl.min(finite.to(tl.int32), axis=1), mask=block < max_blocks)


@kernel
def _unions(
    CHOSEN, FINITE_BLOCKS, UNIONS, COUNTS, S, T, max_blocks, HKV,
    N: tl.constexpr, NP: tl.constexpr, SIZE: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    SLOTS: tl.constexpr = TOKENS * NP
    i, h, b = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    slot = tl.arange(0, SLOTS)
    query = i * TOKENS + slot // NP
    of_query = CHOSEN + ((b * S + query) * HKV + h) * N
    chosen = tl.load(of_query + slot % NP, mask=(slot % NP < N) & (query < S), other=-1)
    by_block = tl.sort(tl.where(chosen < 0, NONE, chosen * TOKENS + slot // NP))
    # a block stands there once for each query that chose it, one behind the other
    block, bits = by_block // TOKENS, 1 << (by_block % TOKENS)
    for distance in tl.static_range(1, TOKENS):
        other = tl.gather(by_block, (slot + distance) % SLOTS, 0)
        bits |= tl.where(other // TOKENS == block, 1 << (other % TOKENS), 0)
    first = ((block != tl.gather(block, tl.maximum(slot - 1, 0), 0)) | (slot == 0)) & (by_block < NONE)
    none = (slot == 0) & (by_block == NONE)  # the least is none: all are

    finite = tl.load(FINITE_BLOCKS + (b * max_blocks + block) * HKV + h, mask=first, other=1)
    entry = (block << (TOKENS + 1)) | tl.where(finite != 0, 0, 1 << TOKENS) | bits
    tile = (b * HKV + h) * tl.num_programs(0) + i
    tl.store(UNIONS + tile * (TOKENS * N) + tl.cumsum(first.to(tl.int32), axis=0) - 1, entry, mask=first)
    tl.store(UNIONS + tile * (TOKENS * N) + slot, tl.full([SLOTS], 1 << TOKENS, tl.int32), mask=none)
    whole = first & ((block + 1) * SIZE - 1 <= i * TOKENS + T - S)
    tl.store(COUNTS + tile * 2, tl.sum((first | none).to(tl.int32), axis=0))
    tl.store(COUNTS + tile * 2 + 1, tl.sum(whole.to(tl.int32), axis=0))


def unions(block_indices: Tensor, finite: Tensor, layout: Layout, tokens: int) -> Unions:
    """Of each `tokens` neighbouring queries, a power of two; block_indices int32 [B, S, Hkv, n], contiguous, of one
    document; finite bool [B, T, Hkv]."""
    (batch, length, num_kv_heads, n), size = block_indices.shape, layout.config.l_sel
    tiles, max_blocks, keys = cdiv(length, tokens), layout.max_blocks, next_power_of_2(size)
    new = block_indices.new_empty
    found = Unions(new(batch, num_kv_heads, tiles, tokens * n), new(batch, num_kv_heads, tiles, 2))
    finite_blocks = torch.empty(batch, max_blocks, num_kv_heads, dtype=torch.bool, device=finite.device)
    per_program = max(KEYS_PER_PROGRAM // keys, 1)
    with on_device(block_indices):
        _finite_blocks[cdiv(max_blocks, per_program), num_kv_heads, batch](
            finite, finite_blocks, finite.shape[1], max_blocks, num_kv_heads, size, per_program, keys
        )
        _unions[tiles, num_kv_heads, batch](
            block_indices, finite_blocks, found.blocks, found.counts, length, layout.num_keys, max_blocks,
            num_kv_heads, n, next_power_of_2(n), size, tokens, num_warps=1,
        )  # fmt: skip
    return found
