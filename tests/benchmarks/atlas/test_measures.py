"""Each measure of a choice against the definition, written out row by row with Python's sets."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import nsa
from benchmarks.atlas import measures
from nsa.config import NSAConfig
from nsa.geometry import is_forced

CONFIG = NSAConfig(l=8, d=4, l_sel=8, n_sel=5, w=16)
TOKENS, HEADS = 256, 2
BLOCKS = TOKENS // CONFIG.l_sel


@pytest.fixture(scope="module")
def drawn() -> tuple[Tensor, Tensor]:
    """(indices [rows, H, n], positions [rows]) of the later half, as the product chooses them from random inputs."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(1, TOKENS, 4, 8, generator=generator).cumsum(1) / 4  # neighbours have something in common
    k = torch.randn(1, TOKENS, HEADS, 8, generator=generator)
    k_cmp = nsa.compress(k, CONFIG)
    indices = nsa.select_blocks(q, k_cmp, CONFIG)[0]
    return indices[TOKENS // 2 :], torch.arange(TOKENS // 2, TOKENS)


def sets(indices: Tensor, head: int) -> list[set[int]]:
    return [{block for block in row if block >= 0} for row in indices[:, head].tolist()]


def alike(a: set[int], b: set[int]) -> float:
    return len(a & b) / len(a | b) if a | b else 1.0


def close(found: Tensor, wanted: list[float]) -> None:
    torch.testing.assert_close(found, torch.tensor(wanted, dtype=torch.float64))


@pytest.mark.parametrize("lag", [1, 4, 16])
@pytest.mark.parametrize("forced", [True, False])
def test_jaccard_at_a_lag(drawn: tuple[Tensor, Tensor], lag: int, forced: bool) -> None:
    indices, positions = drawn
    chosen = indices if forced else measures.without_forced(indices, positions, CONFIG)
    wanted = []
    for head in range(HEADS):
        rows = sets(chosen, head)
        wanted.append(sum(map(alike, rows[:-lag], rows[lag:])) / (len(rows) - lag))
    close(measures.at_lag(chosen, lag), wanted)


def test_jaccard_of_what_is_padded() -> None:
    a = torch.tensor([[0, 3, -1, -1], [-1, -1, -1, -1], [2, 5, 7, 9]])
    b = torch.tensor([[3, 4, -1, -1], [-1, -1, -1, -1], [2, 5, 7, 9]])
    assert measures.jaccard(a, b).tolist() == [1 / 3, 1.0, 1.0]


@pytest.mark.parametrize("count", [2, 8, 12])
def test_unions_of_tiles(drawn: tuple[Tensor, Tensor], count: int) -> None:
    indices, positions = drawn
    free = measures.without_forced(indices, positions, CONFIG)
    for chosen in (indices, free):
        wanted = []
        for head in range(HEADS):
            rows = sets(chosen, head)
            tiles = [rows[i : i + count] for i in range(0, len(rows) - count + 1, count)]
            wanted.append(sum(len(set().union(*tile)) for tile in tiles) / len(tiles))
        close(measures.union_size(chosen, count), wanted)


def test_only_what_is_free_is_left(drawn: tuple[Tensor, Tensor]) -> None:
    indices, positions = drawn
    free = measures.without_forced(indices, positions, CONFIG)
    assert ((free >= 0).sum(-1) == CONFIG.n_sel - 3).all()
    for row, position in zip(free.tolist(), positions.tolist(), strict=True):
        kept = [block for head in row for block in head if block >= 0]
        assert not any(is_forced(block, position // CONFIG.l_sel, CONFIG) for block in kept)


def test_distances_by_bins(drawn: tuple[Tensor, Tensor]) -> None:
    indices, positions = drawn
    edges = measures.distance_edges(BLOCKS)
    assert edges == [1, 2, 4, 8, 16, 32]
    found = measures.distances(measures.without_forced(indices, positions, CONFIG), positions, CONFIG.l_sel, BLOCKS)
    for head in range(HEADS):
        far = [
            position // CONFIG.l_sel - block
            for row, position in zip(indices[:, head].tolist(), positions.tolist(), strict=True)
            for block in row
            if not is_forced(block, position // CONFIG.l_sel, CONFIG)
        ]
        low = [0, *edges[:-1]]
        close(found[head], [sum(a <= x < b for x in far) / len(far) for a, b in zip(low, edges, strict=True)])


def test_the_last_edge_is_above_every_distance() -> None:
    for num_blocks in range(1, 70):
        last = measures.distance_edges(num_blocks)[-1]
        assert num_blocks - 1 < last <= max(2 * (num_blocks - 1), 1)


def test_popularity_is_of_free_choices(drawn: tuple[Tensor, Tensor]) -> None:
    indices, positions = drawn
    found = measures.popularity(measures.without_forced(indices, positions, CONFIG), positions, CONFIG)
    could = [block for block in range(BLOCKS) if not is_forced(block, BLOCKS - 1, CONFIG)]
    for head in range(HEADS):
        counts = dict.fromkeys(could, 0)
        for row, position in zip(indices[:, head].tolist(), positions.tolist(), strict=True):
            for block in row:
                if not is_forced(block, position // CONFIG.l_sel, CONFIG):
                    counts[block] += 1
        assert float(found[head]) == pytest.approx(max(counts.values()) / (sum(counts.values()) / len(could)))


def test_adjacent_layers_are_compared_head_by_head(drawn: tuple[Tensor, Tensor]) -> None:
    later, _ = drawn
    assert measures.most_alike(later.flip(1), later) == 1.0  # head 0's choices are head 1's of the layer before
    shifted = later.roll(7, 0)
    wanted = []
    for head in range(HEADS):
        pairs = [sum(map(alike, sets(shifted, other), sets(later, head))) / len(later) for other in range(HEADS)]
        wanted.append(max(pairs))
    assert measures.most_alike(shifted, later) == pytest.approx(sum(wanted) / HEADS)


def test_the_scores_are_those_that_were_chosen_by() -> None:
    """The best of them, beside the forced ones, are what the product chose; and they are those of the definition."""
    generator = torch.Generator().manual_seed(1)
    q = torch.randn(1, TOKENS, 4, 8, generator=generator, dtype=torch.float64)
    k_cmp = nsa.compress(torch.randn(1, TOKENS, HEADS, 8, generator=generator, dtype=torch.float64), CONFIG)
    positions = torch.arange(TOKENS // 2, TOKENS, 3)
    found = measures.scores(q[0, positions], k_cmp[0], positions, TOKENS, CONFIG)
    chosen = nsa.select_blocks(q, k_cmp, CONFIG, backend="reference")[0, positions]
    for row, position in enumerate(positions.tolist()):
        current = position // CONFIG.l_sel
        for head in range(HEADS):
            free = [block for block in range(current + 1) if not is_forced(block, current, CONFIG)]
            best = sorted(free, key=lambda block: -float(found[row, head, block]))[: CONFIG.n_sel - 3]
            assert set(best) == {b for b in chosen[row, head].tolist() if not is_forced(b, current, CONFIG)}
    mass, sink = measures.held(found, chosen)
    shares = [
        sum(float(found[row, head, block]) for block in chosen[row, head].tolist()) / float(found[row, head].sum())
        for head in range(HEADS)
        for row in range(len(positions))
    ]
    close(mass, [sum(part) / len(positions) for part in (shares[: len(positions)], shares[len(positions) :])])
    close(sink, [float((found[:, head, 0] / found[:, head].sum(-1)).double().mean()) for head in range(HEADS)])


def test_what_is_not_visible_has_no_score() -> None:
    generator = torch.Generator().manual_seed(2)
    q, k_cmp = torch.randn(3, 4, 8, generator=generator), torch.randn(TOKENS // 4 - 1, HEADS, 8, generator=generator)
    positions = torch.tensor([40, 41, 100])
    found = measures.scores(q, k_cmp, positions, TOKENS, CONFIG)
    for row, position in enumerate(positions.tolist()):
        assert not found[row, :, position // CONFIG.l_sel + 1 :].any()
        assert float(found[row, 0].sum()) > 0
