"""The curves of a selection, beside the same counted one pair of rows at a time."""

from __future__ import annotations

import itertools
from statistics import fmean

import pytest
import torch
from torch import Tensor

from benchmarks.atlas.record import LAGS, UNIONS
from benchmarks.selection import curves
from benchmarks.selection.curves import Curves
from nsa import NSAConfig

CONFIG = NSAConfig(l=4, d=2, l_sel=4, n_sel=4, w=8, local_blocks=1)
FIRST, ROWS = 40, 70


@pytest.fixture(scope="module")
def chosen() -> Tensor:
    """[2 sequences, rows, 2 heads, n]: the first block, the query's own, and two others at random."""
    numbers = torch.Generator().manual_seed(3)
    rows = []
    for i in range(ROWS):
        current = (FIRST + i) // CONFIG.l_sel
        free = torch.stack([torch.randperm(current - 1, generator=numbers)[:2] + 1 for _ in range(4)])
        whole = torch.cat([torch.zeros(4, 1), free, torch.full((4, 1), current)], 1)
        rows.append(whole.sort(-1).values.view(2, 2, 4))
    return torch.stack(rows, 1).int()


def _sets(chosen: Tensor) -> list[list[set[int]]]:
    """Rows of each sequence and head."""
    return [[set(row) for row in chosen[b, :, h].tolist()] for b in range(2) for h in range(2)]


def test_curves_are_what_a_count_by_hand_gives(chosen: Tensor) -> None:
    found, heads = curves.measure([chosen], [FIRST], CONFIG), _sets(chosen)
    for lag in LAGS:
        pairs = [(rows[i], rows[i + lag]) for rows in heads for i in range(ROWS - lag)]
        assert found.jaccard[lag] == pytest.approx(fmean(len(a & b) / len(a | b) for a, b in pairs), rel=1e-5)
    for count in UNIONS:
        tiles = [rows[i : i + count] for rows in heads for i in range(0, ROWS - count + 1, count)]
        assert found.union[count] == pytest.approx(fmean(len(set().union(*tile)) for tile in tiles))
    current = [(FIRST + i) // CONFIG.l_sel for i in range(ROWS)]
    free = [[row - {0, at} for row, at in zip(rows, current, strict=True)] for rows in heads]
    apart = [at - block for rows in free for row, at in zip(rows, current, strict=True) for block in row]
    for edge, share in found.distance.items():
        assert share == pytest.approx(sum(distance < edge for distance in apart) / len(apart))
    often = []
    for rows in free:
        times = [sum(block in row for row in rows) for block in range(1, current[-1])]
        often.append(max(times) / fmean(times))
    assert found.popularity == pytest.approx(fmean(often))


def test_stretches_are_counted_apart(chosen: Tensor) -> None:
    """Rows of one stretch are no neighbours of the next one's, and count as much."""
    twice = curves.measure([chosen, chosen], [FIRST, FIRST], CONFIG)
    once = curves.measure([chosen], [FIRST], CONFIG)
    assert list(twice.jaccard.values()) == pytest.approx(list(once.jaccard.values()))
    assert twice.union == once.union


def test_a_stretch_that_is_too_short_is_refused(chosen: Tensor) -> None:
    with pytest.raises(ValueError, match=r"stretches must have as many rows, more than 64; got \[64\]"):
        curves.measure([chosen[:, :64]], [FIRST], CONFIG)


def test_rows_that_choose_only_forced_blocks_have_no_popularity() -> None:
    forced = torch.tensor([0, 9, -1, -1]).expand(1, 65, 1, 4)
    same = NSAConfig(l=64, d=64, l_sel=128, n_sel=4, w=8, local_blocks=1)
    found = curves.measure([forced], [9 * 128], same)
    assert (found.popularity, found.distance) == (None, {})
    assert set(found.jaccard.values()) == {1.0}


def test_a_deviation_is_relative_and_of_shares_a_difference() -> None:
    mine = Curves({1: 0.6, 4: 0.5}, {2: 20.0}, {1: 0.0, 2: 0.3}, 3.0)
    target = Curves({1: 0.5}, {2: 25.0}, {2: 0.4}, 2.0)
    found = mine.deviations(target)
    assert found == pytest.approx({"jaccard 1": 0.2, "union 2": -0.2, "distance 2": -0.1, "popularity": 0.5})
    assert not mine.deviations(Curves({}, {}, {}, None))
    assert all(itertools.starmap(lambda name, x: x != 0 or name, found.items()))
