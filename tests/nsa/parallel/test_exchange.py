"""What travels arrives at its place, and sums have the order that is documented, in every bit."""

from __future__ import annotations

import dataclasses
import functools

import pytest
import torch
from torch import Tensor

from tests.nsa.parallel import rank_work
from tests.nsa.parallel.pool import Pool
from tests.nsa.parallel.rank_work import NUM_ROWS, Exchanged
from tests.nsa.parallel.test_laws import CASES

RANKS = 4


def _held() -> list[Tensor]:
    """Of each rank: three pieces, two, two and none; row 20 is nobody's."""
    pieces = [((0, 3), (9, 11), (21, 24)), ((3, 9), (30, 31)), ((11, 20), (24, 30)), ()]
    return [torch.cat([torch.arange(0), *(torch.arange(*piece) for piece in own)]) for own in pieces]


def _needed(held: list[Tensor]) -> list[Tensor]:
    """The own rows, and some that several ranks need."""
    more = [(5, 13), (10, 13), (8, 10), (8, 12)]
    return [torch.cat([own, torch.arange(*near)]).unique() for own, near in zip(held, more, strict=True)]


@functools.cache
def _found(pool: Pool, dtype: torch.dtype) -> list[Exchanged]:
    return pool.run(RANKS, rank_work.exchanged, _held(), _needed(_held()), dtype)


def _sum(parts: list[Tensor]) -> Tensor:
    return functools.reduce(torch.add, parts)


def test_a_gather_brings_all_rows(pool: Pool) -> None:
    whole = torch.zeros(2, NUM_ROWS, 3, 5)
    for rank, own in enumerate(_held()):
        whole[:, own] = rank_work.drawn(rank, len(own))
    for found in _found(pool, torch.float32):
        assert torch.equal(found.gathered, whole)


def test_a_halo_brings_the_rows_that_are_needed(pool: Pool) -> None:
    whole = torch.full((2, NUM_ROWS, 3, 5), torch.nan)
    for rank, own in enumerate(_held()):
        whole[:, own] = rank_work.drawn(rank, len(own))
    for found, needed in zip(_found(pool, torch.float32), _needed(_held()), strict=True):
        assert torch.equal(found.near, whole[:, needed])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gathers_sum_is_in_the_order_of_the_ranks(pool: Pool, dtype: torch.dtype) -> None:
    parts = [rank_work.drawn(rank, NUM_ROWS) for rank in range(RANKS)]
    for found, own in zip(_found(pool, dtype), _held(), strict=True):
        assert torch.equal(found.sum_of_all, _sum(parts)[:, own].to(dtype))
    assert not torch.equal(_sum(parts), _sum(parts[::-1]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_halos_sum_begins_with_the_ranks_own(pool: Pool, dtype: torch.dtype) -> None:
    held, needed = _held(), _needed(_held())
    parts = []
    for rank, rows in enumerate(needed):
        whole = torch.zeros(2, NUM_ROWS, 3, 5)
        whole[:, rows] = rank_work.drawn(rank, len(rows))
        parts.append(whole)
    others_first = False
    for rank, found in enumerate(_found(pool, dtype)):
        wanted = _sum([parts[rank], *parts[:rank], *parts[rank + 1 :]])[:, held[rank]]
        assert torch.equal(found.sum_near, wanted.to(dtype))
        others_first |= not torch.equal(wanted, _sum(parts)[:, held[rank]])
    assert others_first


def test_a_halos_sum_leaves_what_it_is_given(pool: Pool) -> None:
    """Autograd's gradients are others' too."""
    assert all(found.partial_unchanged for found in _found(pool, torch.float32))


def test_own_rows_do_not_travel(pool: Pool) -> None:
    for rank, found in enumerate(_found(pool, torch.float32)):
        assert len(found.splits) == 3
        assert all(come[rank] == go[rank] == 0 for come, go in found.splits)


@pytest.mark.parametrize("name", ["documents", "two sequences"])
def test_the_window_goes_backward_with_what_arrived_forward(pool: Pool, name: str) -> None:
    """Nothing of other ranks is waited for at the beginning of the backward pass."""
    assert pool.run(4, rank_work.halos_started_backward, CASES[name]) == [0] * 4


@pytest.mark.parametrize("name", ["q", "k1", "v1", "k2", "v2", "gates"])
def test_a_change_in_place_is_found_backward(pool: Pool, name: str) -> None:
    case = dataclasses.replace(CASES["head-tail"], tokens=64)
    for error in pool.run(2, rank_work.changed_in_place, case, name):
        assert "modified by an inplace operation" in error
