"""Which queries chose each block: what `nsa.torch_backend.index` finds, in three launches.

The host needs longer to launch many small kernels than the GPU for the attention of a few thousand tokens, and in a
CUDA graph each still costs a microsecond or two. PyTorch sorts; what stands before and behind it are two kernels here.
Tiles are numbered so that no running sum is needed: a cell whose pairs begin at place p of the sorted ones, behind c
other cells, has the tiles from c + p // size on. That leaves a cell at most one number more than it has tiles.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa.geometry import Layout
from nsa.torch_backend.index import sorted_as
from nsa.triton_backend.launching.relaunch import on_device
from nsa.triton_backend.tile import kernel
from nsa.triton_backend.tuning import cdiv

PAIRS_PER_PROGRAM = 1024
CELLS_PER_PROGRAM, AT_ONCE = 32, 16  # of a cell: places that are looked at, and tiles that are written, at a time


@dataclass(frozen=True)
class Index:
    """Pairs (query, slot of its choice) grouped by cell: tile i holds those from begin[i] to end[i], all of cell[i].

    A cell is a (chunk of queries, sequence, group, block). Within one, queries ascend.
    """

    query_slot: Tensor
    """int32 [P]: of each pair, sorted by cell, the query times n plus the slot; those without a block are last."""
    begin: Tensor
    """int64 [tiles]."""
    end: Tensor
    """int64 [tiles]; equal to begin in an empty tile: the last of some cells, and all behind those of the last cell."""
    cell: Tensor
    """int64 [tiles], ascending."""
    first_tile: Tensor
    """int64 [cells + 1]: the first tile of each cell, and of what is behind the last."""
    size: int
    """Pairs of a tile, at most."""

    def most_tiles(self, cells: int, pairs: int) -> int:
        """How many tiles so many cells with so many pairs have, at most."""
        return _most_tiles(cells, pairs, self.size)


def _most_tiles(cells: int, pairs: int, size: int) -> int:
    return cells + pairs // size + 1


def build(block_indices: Tensor, layout: Layout, first: int, last: int, *, chunk: int, size: int) -> Index:
    """Tiles of up to `size` pairs over the queries first … last of block_indices int32 [B, S, Hkv, n] (contiguous),
    taken `chunk` at a time. No host sync: how many tiles there are is the bound that shapes alone give.
    """
    assert block_indices.is_contiguous()
    assert block_indices.shape[1] * block_indices.shape[3] < 2**31  # which a query's slots are counted in
    (batch, length, num_kv_heads, n), count, device = block_indices.shape, last - first, block_indices.device
    cells = cdiv(count, chunk) * batch * num_kv_heads * layout.max_blocks
    pairs = batch * num_kv_heads * count * n
    of_pair = torch.empty(pairs, dtype=sorted_as(cells), device=device)
    by_row = (cdiv(count * n, PAIRS_PER_PROGRAM), num_kv_heads, batch)
    with on_device(block_indices):
        _cells[by_row](
            block_indices, layout.blocks_before, of_pair, first, count, length, num_kv_heads, layout.max_blocks, chunk,
            batch * num_kv_heads * layout.max_blocks, cells, n, PAIRS_PER_PROGRAM,
        )  # fmt: skip
        ordered, pair = of_pair.sort(stable=True)  # so that queries ascend in a cell, and sums over them repeat
        query_slot = torch.empty(pairs, dtype=torch.int32, device=device)
        tiles = _most_tiles(cells, pairs, size)
        begin, end, cell = (torch.empty(tiles, dtype=torch.int64, device=device) for _ in range(3))
        first_tile = torch.empty(cells + 1, dtype=torch.int64, device=device)
        of_cells = cdiv(cells + 1, CELLS_PER_PROGRAM)
        _tiles[of_cells + cdiv(pairs, PAIRS_PER_PROGRAM),](
            ordered, pair, begin, end, cell, first_tile, query_slot, pairs, cells, tiles, size, of_cells,
            first * n, count * n, CELLS_PER_PROGRAM, PAIRS_PER_PROGRAM, AT_ONCE,
        )  # fmt: skip
    return Index(query_slot, begin, end, cell, first_tile, size)


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
def _first_from(SORTED, value, places, PROBES: tl.constexpr):
    """int64: where the first of SORTED's `places` numbers stands that is each value or above; `places` for none.

    A step takes as long as a load. With 16 places at once it needs a quarter of the steps of a binary search.
    """
    low, high = tl.zeros_like(value), tl.zeros_like(value) + places
    number = tl.arange(0, PROBES)
    while tl.max(high - low, axis=0) > 0:
        width = tl.cdiv(high - low, PROBES)
        probe = low[:, None] + number[None, :] * width[:, None]
        there = probe < high[:, None]
        less = there & (tl.load(SORTED + probe, mask=there, other=0) < value[:, None])
        count = tl.sum(less.to(tl.int64), axis=1)  # as they are sorted, the first so many
        high = tl.where(count == 0, low, tl.minimum(low + count * width, high))
        low = tl.where(count == 0, low, low + (count - 1) * width + 1)
    return low


@kernel
def _tiles(
    ORDERED, PAIR, BEGIN, END, CELL, FIRST_TILE, QUERY_SLOT, pairs, cells, tiles, size, of_cells, first_slot, slots,
    BC: tl.constexpr, BP: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """The first `of_cells` programs cut the sorted pairs of their cells into tiles; the others write QUERY_SLOT.

    What is behind the last cell has all the tiles that are left, and no pair. QUERY_SLOT [pairs] is where each pair's
    slot stands among all queries' slots of a sequence and group; `slots` of them are indexed, from `first_slot` on.
    """
    if tl.program_id(0) < of_cells:
        cell = tl.program_id(0).to(tl.int64) * BC + tl.arange(0, BC)
        first = _first_from(ORDERED, cell, pairs, AT_ONCE)
        past = tl.where(cell < cells, _first_from(ORDERED, cell + 1, pairs, AT_ONCE), first)
        tile = cell + first // size
        next_tile = tl.where(cell < cells, cell + 1 + past // size, tiles)
        tl.store(FIRST_TILE + cell, tile, mask=cell <= cells)
        count = tl.where(cell <= cells, next_tile - tile, 0)
        past, cell = past[:, None], tl.minimum(cell, cells - 1)[:, None]
        for number in range(0, tl.max(count, axis=0), AT_ONCE):
            place = number + tl.arange(0, AT_ONCE)[None, :]
            there, at = place < count[:, None], tile[:, None] + place
            begin = tl.minimum(first[:, None] + place * size, past)
            tl.store(BEGIN + at, begin, mask=there)
            tl.store(END + at, tl.minimum(begin + size, past), mask=there)
            tl.store(CELL + at, tl.broadcast_to(cell, [BC, AT_ONCE]), mask=there)
    else:
        place = (tl.program_id(0) - of_cells).to(tl.int64) * BP + tl.arange(0, BP)
        pair = tl.load(PAIR + place, mask=place < pairs, other=0)
        tl.store(QUERY_SLOT + place, (first_slot + pair % slots).to(tl.int32), mask=place < pairs)
