"""Which queries chose each block: what `nsa.torch_backend.index` finds, with a quarter of its launches.

The host needs longer to launch that many small kernels than the GPU for the attention of a few thousand tokens, and in
a CUDA graph each still costs a microsecond or two. PyTorch sorts and adds up; what stands between is fused here.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa.geometry import Layout
from nsa.torch_backend.index import sorted_as
from nsa.triton_backend.launch import on_device
from nsa.triton_backend.tile import kernel

PAIRS_PER_PROGRAM = 1024
CELLS_PER_PROGRAM = 128


@dataclass(frozen=True)
class Index:
    """Pairs (query, slot of its choice) grouped by cell: tile i holds those from begin[i] to end[i], all of cell[i].

    A cell is a (chunk of queries, sequence, group, block). Within one, queries ascend.
    """

    pair: Tensor
    """int64 [P]: numbers among [B, Hkv, count, n], sorted by cell, those without a block last."""
    query: Tensor
    """int32 [P]: the query of each sorted pair, or, as asked for, that times n plus the slot."""
    begin: Tensor
    """int64 [tiles]."""
    end: Tensor
    """int64 [tiles]; equal to begin in an empty tile, as all are behind those in use."""
    cell: Tensor
    """int64 [tiles], ascending."""
    first_tile: Tensor
    """int64 [cells + 1]: each cell's first tile; the last entry counts the tiles in use."""


def build(
    block_indices: Tensor, layout: Layout, first: int, last: int, *, chunk: int, size: int, with_slots: bool
) -> Index:  # fmt: skip
    """Tiles of up to `size` pairs over the queries first … last of block_indices int32 [B, S, Hkv, n] (contiguous),
    taken `chunk` at a time. No host sync: how many tiles there are is the bound that shapes alone give.
    """
    assert block_indices.is_contiguous()
    (batch, length, num_kv_heads, n), count, device = block_indices.shape, last - first, block_indices.device
    cells = triton.cdiv(count, chunk) * batch * num_kv_heads * layout.max_blocks
    pairs = batch * num_kv_heads * count * n
    of_pair = torch.empty(pairs, dtype=sorted_as(cells), device=device)
    by_row = (triton.cdiv(count * n, PAIRS_PER_PROGRAM), num_kv_heads, batch)
    with on_device(block_indices):
        _cells[by_row](
            block_indices, layout.blocks_before, of_pair, first, count, length, num_kv_heads, layout.max_blocks, chunk,
            batch * num_kv_heads * layout.max_blocks, cells, n, PAIRS_PER_PROGRAM,
        )  # fmt: skip
        ordered, pair = of_pair.sort(stable=True)  # so that queries ascend in a cell, and sums over them repeat
        first_pair = torch.empty(cells + 1, dtype=torch.int64, device=device)
        tiles_of_cell = torch.empty_like(first_pair)
        _bounds[triton.cdiv(cells + 1, CELLS_PER_PROGRAM),](
            ordered, first_pair, tiles_of_cell, pairs, cells, size, CELLS_PER_PROGRAM
        )
        first_tile = tiles_of_cell.cumsum(0)
        tiles = pairs // size + min(cells, pairs) + 1
        begin, end, cell = (torch.empty(tiles, dtype=torch.int64, device=device) for _ in range(3))
        _cut[triton.cdiv(tiles, CELLS_PER_PROGRAM),](
            first_pair, first_tile, begin, end, cell, tiles, cells, size, CELLS_PER_PROGRAM
        )
        query = torch.empty(pairs, dtype=torch.int32, device=device)
        _queries[triton.cdiv(pairs, PAIRS_PER_PROGRAM),](
            pair, query, pairs, first * n, count * n, 1 if with_slots else n, PAIRS_PER_PROGRAM
        )
    return Index(pair, query, begin, end, cell, first_tile)


@kernel
def _cells(
    BLOCKS, BLOCKS_BEFORE, CELL, first, count, S, HKV, max_blocks, chunk, cells_of_chunk, cells,
    N: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """CELL [B, Hkv, count, N]; `cells` where there is no block."""
    local = tl.program_id(0) * BN + tl.arange(0, BN)
    kv_row = tl.program_id(2).to(tl.int64) * HKV + tl.program_id(1)
    i, inside = local // N, local < count * N
    choice = ((tl.program_id(2).to(tl.int64) * S + first + i) * HKV + tl.program_id(1)) * N + local % N
    block = tl.load(BLOCKS + choice, mask=inside, other=-1)
    before = tl.load(BLOCKS_BEFORE + first + i, mask=inside, other=0)
    cell = (i // chunk).to(tl.int64) * cells_of_chunk + kv_row * max_blocks + before + block
    tl.store(CELL + kv_row * count * N + local, tl.where(block < 0, cells, cell), mask=inside)


@triton.jit
def _first_above(SORTED, value, places, OR_EQUAL: tl.constexpr):
    """int64: where the first of SORTED's `places` numbers above each value stands (`OR_EQUAL`: or equal); `places`
    for none."""
    low, high = tl.zeros_like(value), tl.zeros_like(value) + places
    while tl.max(high - low, axis=0) > 0:
        middle = (low + high) // 2
        searching = low < high
        there = tl.load(SORTED + middle, mask=searching, other=0)
        found = there >= value if OR_EQUAL else there > value
        high = tl.where(searching & found, middle, high)
        low = tl.where(searching & ~found, middle + 1, low)
    return low


@kernel
def _bounds(ORDERED, FIRST_PAIR, TILES_OF_CELL, pairs, cells, size, BN: tl.constexpr):
    """FIRST_PAIR [cells + 1] and, at the cell behind it, TILES_OF_CELL [cells + 1], whose running sum numbers tiles."""
    cell = tl.program_id(0).to(tl.int64) * BN + tl.arange(0, BN)
    first = _first_above(ORDERED, cell, pairs, True)
    before = _first_above(ORDERED, cell - 1, pairs, True)
    tl.store(FIRST_PAIR + cell, first, mask=cell <= cells)
    tl.store(TILES_OF_CELL + cell, tl.cdiv(first - before, size), mask=cell <= cells)


@kernel
def _cut(FIRST_PAIR, FIRST_TILE, BEGIN, END, CELL, tiles, cells, size, BN: tl.constexpr):
    """BEGIN, END and CELL [tiles]; the tiles that are left over are empty ones of the last cell."""
    tile = tl.program_id(0).to(tl.int64) * BN + tl.arange(0, BN)
    cell = tl.minimum(_first_above(FIRST_TILE, tile, cells + 1, False), cells) - 1
    past = tl.load(FIRST_PAIR + cell + 1)
    begin = tl.minimum(tl.load(FIRST_PAIR + cell) + (tile - tl.load(FIRST_TILE + cell)) * size, past)
    tl.store(BEGIN + tile, begin, mask=tile < tiles)
    tl.store(END + tile, tl.minimum(begin + size, past), mask=tile < tiles)
    tl.store(CELL + tile, cell, mask=tile < tiles)


@kernel
def _queries(PAIR, QUERY, pairs, first_slot, slots, PER: tl.constexpr, BN: tl.constexpr):
    """QUERY [pairs]: where each pair's slot stands among all queries' slots of a sequence and group, over PER.

    `slots` of them are indexed, from `first_slot` on.
    """
    place = tl.program_id(0).to(tl.int64) * BN + tl.arange(0, BN)
    pair = tl.load(PAIR + place, mask=place < pairs, other=0)
    tl.store(QUERY + place, (first_slot + pair % slots) // PER, mask=place < pairs)
