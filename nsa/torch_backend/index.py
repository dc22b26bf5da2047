"""From "which blocks did each query choose" to "which queries chose each block", on the device and without a sync.

Pairs (query, block) are sorted by block and cut into tiles of at most `size` pairs that share one block. How many
tiles there are depends on the data, so their number is the bound that shapes alone give and one more: the last tile
is always empty, and those left over are too.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad


@dataclass(frozen=True)
class Tiles:
    """Pairs grouped by block: tile i holds the pairs order[begin[i]:end[i]], all of block `block[i]`."""

    size: int
    order: Tensor
    """int64 [P]: the pairs sorted by block, pairs without a block last; earlier pairs first within a block."""
    begin: Tensor
    """int64 [tiles]."""
    end: Tensor
    """int64 [tiles]; equal to begin in an empty tile."""
    block: Tensor
    """int64 [tiles], ascending; the last block in an empty tile."""
    first_pair: Tensor
    """int64 [blocks + 1]: where each block's pairs begin in `order`; the last entry counts the pairs with a block."""
    first_tile: Tensor
    """int64 [blocks + 1]: each block's first tile; the last entry counts the tiles in use."""

    def places(self, blocks: Tensor) -> Tensor:
        """int64 [P]: tile · size + place in it, of each pair of `blocks`; a place in the last tile for none."""
        rank = torch.empty_like(self.order).scatter_(
            0, self.order, torch.arange(self.order.numel(), device=blocks.device)
        )
        number = blocks.clamp(min=0)
        place = self.first_tile[number] * self.size + rank - self.first_pair[number]
        return torch.where(blocks < 0, (self.begin.numel() - 1) * self.size, place)


def sorted_as(num_blocks: int) -> torch.dtype:
    """What holds each block's number and one more: a radix sort takes a pass per byte."""
    return torch.int16 if num_blocks < 2**15 else torch.int32 if num_blocks < 2**31 else torch.int64


def build(blocks: Tensor, size: int, num_blocks: int) -> Tiles:
    """Tiles over `blocks` (int64 [P]: 0 <= block < num_blocks, negative where a pair has none)."""
    narrow = sorted_as(num_blocks)
    key = torch.where(blocks < 0, num_blocks, blocks).to(narrow)
    ordered, order = key.sort(stable=True)
    first_pair = torch.searchsorted(ordered, torch.arange(num_blocks + 1, dtype=narrow, device=blocks.device))
    tiles_of_block = (first_pair.diff() + size - 1) // size
    first_tile = pad(tiles_of_block.cumsum(0), (1, 0))
    distinct = min(num_blocks, blocks.numel())
    tile = torch.arange(blocks.numel() // size + distinct + 1, device=blocks.device)
    block = (torch.searchsorted(first_tile, tile, right=True) - 1).clamp(max=max(num_blocks - 1, 0))
    begin = torch.minimum(first_pair[block] + (tile - first_tile[block]) * size, first_pair[-1])
    end = torch.minimum(begin + size, first_pair[block + 1])
    return Tiles(size, order, begin, torch.maximum(begin, end), block, first_pair, first_tile)
