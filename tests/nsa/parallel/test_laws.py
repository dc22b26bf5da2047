"""Attention over 2, 4 and 8 ranks is one device's: bit for bit, but for dk and dv, which keep the error budget."""

from __future__ import annotations

import dataclasses
import functools
from itertools import pairwise

import pytest
import torch

from nsa import NSAConfig
from nsa.config import BRANCHES
from nsa.parallel import TokenOrder
from tests.nsa.parallel import cases, faults, laws, rank_work
from tests.nsa.parallel.cases import SMALL, Case, Result, on_rank, one_device
from tests.nsa.parallel.pool import Pool

WIDE = dataclasses.replace(SMALL, l=16, d=4, l_sel=32, w=150)
LONG_WINDOW = NSAConfig(l=16, d=8, l_sel=32, n_sel=8, w=256)
CASES = {
    "head-tail": Case(640, dk=8, dv=12),
    "two sequences": Case(560, batch=2, heads=6, num_kv_heads=3, seed=1),
    "uneven": Case(601, heads=4, num_kv_heads=1, dk=12, dv=8, seed=2),
    "documents": Case(700, heads=4, num_kv_heads=2, dk=8, dv=6, cu_seqlens=(0, 0, 1, 300, 301, 688, 700, 700), seed=3),
    "one head in a group": Case(576, heads=3, num_kv_heads=3, config=WIDE, seed=4),
    "sixteen heads in a group, bf16": Case(528, heads=16, num_kv_heads=1, dk=12, dv=8, dtype=torch.bfloat16, seed=5),
    "documents in bf16, one set of keys": Case(
        544, heads=8, num_kv_heads=2, cu_seqlens=(0, 130, 131, 544), dtype=torch.bfloat16, separate=False, seed=6
    ),
    "gradients below the size of their terms, bf16": Case(
        1024, heads=2, num_kv_heads=1, dk=64, dv=128, config=LONG_WINDOW, dtype=torch.bfloat16, seed=9
    ),
    "fewer tokens than a block": Case(7, seed=7),
    "negative scale": Case(520, heads=2, num_kv_heads=1, dk=16, scale=-0.5, seed=8),
}


IN_EIGHT = ("head-tail", "documents", "sixteen heads in a group, bf16", "fewer tokens than a block")
"""Each of eight ranks pads its pieces to steps of 512 queries, so these cost most."""


@functools.cache
def _one(name: str) -> Result:
    return one_device(CASES[name])


def _shared(pool: Pool, ranks: int, case: Case) -> Result:
    return cases.joined(case, case.dealt(ranks), pool.run(ranks, on_rank, case))


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_as_one_device(pool: Pool, ranks: int) -> None:
    names = IN_EIGHT if ranks == 8 else CASES
    found = {name: laws.wrong(CASES[name], _shared(pool, ranks, CASES[name]), _one(name)) for name in names}
    assert not {name: faulty for name, faulty in found.items() if faulty}


@pytest.mark.parametrize("ranks", [3, 5])
def test_any_cut(pool: Pool, ranks: int) -> None:
    """Pieces of any length, dealt out at random, some ranks with nothing."""
    case = dataclasses.replace(CASES["documents"], order=_random_order(700, 8, ranks))
    assert not laws.wrong(case, _shared(pool, 8, case), _one("documents"))


def _random_order(tokens: int, ranks: int, seed: int) -> TokenOrder:
    numbers = torch.Generator().manual_seed(seed)
    cuts = sorted({0, tokens, *torch.randint(1, tokens, (11,), generator=numbers).tolist()})
    owner = torch.randint(ranks - 1, (len(cuts) - 1,), generator=numbers).tolist()
    pieces = list(pairwise(cuts))
    held = [tuple(piece for piece, rank in zip(pieces, owner, strict=True) if rank == own) for own in range(ranks)]
    return TokenOrder(tokens, tuple(held))


def test_kernels_over_two_ranks(pool: Pool, device: torch.device) -> None:
    """In Triton's interpreter, whose matrix products (NumPy's) depend on a row's place in its tile: dq nearly."""
    if device.type == "cuda":
        pytest.skip("these ranks are CPU processes")
    config = NSAConfig(l=4, d=2, l_sel=8, n_sel=3, w=8)
    case = Case(40, heads=2, num_kv_heads=1, dk=16, dv=16, config=config, cu_seqlens=(0, 12, 40), backend="triton")
    one, got = one_device(case), _shared(pool, 2, case)
    assert set(laws.wrong(case, got, one)) <= {"dq"}
    torch.testing.assert_close(got.gradients["q"], one.gradients["q"])


@pytest.mark.parametrize("batch", [1, 2])
def test_kernels_that_are_given_parts_of_tensors(pool: Pool, device: torch.device, batch: int) -> None:
    """Pieces of whole steps are not padded, so not copied: of two sequences they are no contiguous tensors."""
    if device.type == "cuda":
        pytest.skip("these ranks are CPU processes")
    config = NSAConfig(l=4, d=2, l_sel=8, n_sel=3, w=8)
    case = Case(32, heads=4, num_kv_heads=2, dk=16, dv=16, batch=batch, config=config, backend="triton")
    got, one = cases.joined(case, case.dealt(2), pool.run(2, rank_work.in_steps_of, 8, case)), one_device(case)
    rounded = {"o", "dq", "dgates", *(f"lse of {branch}" for branch in BRANCHES)}
    assert set(laws.wrong(case, got, one)) <= rounded
    torch.testing.assert_close(got.o, one.o)
    torch.testing.assert_close(got.gradients, one.gradients)


def test_with_the_kernels_a_piece_takes_the_keys_of_its_documents(pool: Pool, device: torch.device) -> None:
    """And no earlier ones: its compressed keys begin with those of its first document."""
    if device.type == "cuda":
        pytest.skip("these ranks are CPU processes")
    config = NSAConfig(l=4, d=2, l_sel=8, n_sel=3, w=8)
    order = TokenOrder(40, (((0, 8), (32, 40)), ((8, 24), (24, 32))))
    case = Case(
        40, heads=2, num_kv_heads=1, dk=16, dv=16, config=config, cu_seqlens=(0, 8, 20, 40), order=order,
        backend="triton",
    )  # fmt: skip
    got, one = cases.joined(case, order, pool.run(2, rank_work.in_steps_of, 8, case)), one_device(case)
    assert torch.equal(got.chosen, one.chosen)
    assert got.keys_read == one.keys_read
    torch.testing.assert_close(got.o, one.o)
    torch.testing.assert_close(got.gradients, one.gradients)


def test_gradients_repeat_bit_for_bit(pool: Pool) -> None:
    assert all(pool.run(4, rank_work.twice, CASES["documents"]))


def test_nothing_is_left_unwritten(pool: Pool) -> None:
    case = CASES["documents"]
    parts = pool.run(4, rank_work.poisoned, case)
    assert not laws.wrong(case, cases.joined(case, case.dealt(4), parts), _one("documents"))


@pytest.mark.parametrize("cut", [1, 257, 400])
def test_no_rank_sees_what_comes_later(pool: Pool, cut: int) -> None:
    """NaN in every later key and value; they do reach the rows behind them."""
    assert pool.run(4, rank_work.later_changed, CASES["head-tail"], cut) == [(True, True)] * 4


@pytest.mark.parametrize("name", faults.FAULTS)
def test_the_laws_find(pool: Pool, name: str) -> None:
    _found_by_the_laws(pool, name, "head-tail")


@pytest.mark.parametrize("name", ["dk and dv never sent", "gradients of a halo dropped"])
def test_the_laws_find_in_a_narrow_type(pool: Pool, name: str) -> None:
    """Where a whole gradient is less than one unit in the last place of the terms that could be in it."""
    _found_by_the_laws(pool, name, "gradients below the size of their terms, bf16")


def _found_by_the_laws(pool: Pool, name: str, case_name: str) -> None:
    case = CASES[case_name]
    parts = pool.run(2, rank_work.faulty, name, case)
    assert faults.FAULTS[name][1] in laws.wrong(case, cases.joined(case, case.dealt(2), parts), _one(case_name))
