"""From "which blocks did each query choose" to "which queries chose each block", on the device and without a sync.

Pairs (query, block) are sorted by block and cut into tiles of at most `size` pairs that share one block. How many
tiles there are depends on the data, so their number is the bound that shapes alone give and one more: the last tile
is always empty, and those left over are too.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Tiles:
    """Pairs grouped by block: tile i holds the pairs order[begin[i]:end[i]], all of block `block[i]`."""

    order: Tensor
    """int64 [P]: the pairs sorted by block, pairs without a block last; earlier pairs first within a block."""
    begin: Tensor
    """int64 [tiles]."""
    end: Tensor
    """int64 [tiles]; equal to begin in an empty tile."""
    block: Tensor
    """int64 [tiles]; 0 in an empty tile."""
    rank: Tensor
    """int64 [P]: tile · size + place in it, of each entry of `order`; a place in the last tile for none."""


def build(blocks: Tensor, size: int, max_blocks: int) -> Tiles:
    """Tiles over `blocks` (int64 [P], < 0 where a pair has none), of which at most `max_blocks` are distinct."""
    num_pairs, device = blocks.numel(), blocks.device
    num_tiles = num_pairs // size + max_blocks + 1
    beyond = torch.iinfo(torch.int64).max
    ordered, order = torch.where(blocks < 0, beyond, blocks).sort(stable=True)
    place = torch.arange(num_pairs, device=device)
    held = ordered != beyond
    new_block = torch.ones_like(held)
    new_block[1:] = ordered[1:] != ordered[:-1]
    first_of_block = torch.where(new_block, place, 0).cummax(0).values
    within = (place - first_of_block) % size
    opens = held & (within == 0)
    tile = torch.where(held, opens.cumsum(0) - 1, num_tiles - 1)

    spill = torch.where(opens, tile, num_tiles - 1)  # the last tile takes what belongs to none, then is emptied
    begin = torch.zeros(num_tiles, dtype=torch.int64, device=device).scatter_(0, spill, place)
    block = torch.zeros_like(begin).scatter_(0, spill, ordered)
    end = begin.scatter_reduce(0, tile, place + 1, "amax")
    used = held.new_zeros(num_tiles).scatter_(0, spill, True)
    used[-1] = False
    rank = tile * size + within
    return Tiles(order, begin, torch.where(used, end, begin), torch.where(used, block, 0), rank)
