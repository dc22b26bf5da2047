"""Tiles hold each pair once, of one block each, in order."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nsa.torch_backend import index


@given(blocks=st.lists(st.integers(-1, 5), max_size=40), size=st.integers(1, 7))
def test_tiles_hold_every_pair_once(blocks: list[int], size: int) -> None:
    tiles = index.build(torch.tensor(blocks, dtype=torch.int64), size, num_blocks=6)
    found: dict[int, list[int]] = {}
    for begin, end, block in zip(tiles.begin.tolist(), tiles.end.tolist(), tiles.block.tolist(), strict=True):
        assert 0 <= end - begin <= size
        found.setdefault(block, []).extend(tiles.order[begin:end].tolist())
    wanted = {b: [i for i, block in enumerate(blocks) if block == b] for b in range(6)}
    assert {b: pairs for b, pairs in found.items() if pairs} == {b: pairs for b, pairs in wanted.items() if pairs}
    assert tiles.begin[-1] == tiles.end[-1], "the last tile must be empty"


@given(blocks=st.lists(st.integers(-1, 5), max_size=40), size=st.integers(1, 7))
def test_places_lead_back_to_each_pair(blocks: list[int], size: int) -> None:
    numbers = torch.tensor(blocks, dtype=torch.int64)
    tiles = index.build(numbers, size, num_blocks=6)
    for pair, place in enumerate(tiles.places(numbers).tolist()):
        tile, within = divmod(place, size)
        if blocks[pair] < 0:
            assert tile == tiles.begin.numel() - 1
        else:
            assert tiles.order[tiles.begin[tile] + within] == pair


@pytest.mark.parametrize("num_blocks", [2**15 - 2, 2**15 - 1, 2**15, 2**15 + 1])
def test_numbers_that_no_longer_fit_in_16_bits_are_sorted_by_more(num_blocks: int) -> None:
    """The pair without a block is sorted as `num_blocks`."""
    tiles = index.build(torch.tensor([num_blocks - 1, 0, -1]), 2, num_blocks=num_blocks)
    assert tiles.order.tolist() == [1, 0, 2]
    assert tiles.first_pair[-1] == 2
