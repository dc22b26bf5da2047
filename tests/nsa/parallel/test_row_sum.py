"""Sums of what pieces give to rows: each row is written once before it is added to."""

from __future__ import annotations

import pytest
import torch

from nsa.parallel.branches import RowSum
from regression.detectors.memory import poisoned_allocations

PIECES = {
    "prefixes": [(0, 3), (0, 7), (0, 10)],
    "a tail that nobody reaches": [(0, 3), (0, 7)],
    "documents apart": [(2, 4), (2, 5), (7, 9)],
    "windows that overlap": [(0, 4), (3, 7), (6, 10)],
    "one piece": [(0, 10)],
    "one row": [(9, 10)],
    "none": [],
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", PIECES)
def test_rows_are_added_up(name: str, dtype: torch.dtype) -> None:
    like = torch.ones(2, 10, 3, 4, dtype=dtype)
    wide = torch.promote_types(dtype, torch.float32)
    gradients = [torch.randn(2, end - first, 3, 4, dtype=wide) for first, end in PIECES[name]]
    wanted = torch.zeros(2, 10, 3, 4, dtype=wide)
    for (first, end), gradient in reversed(list(zip(PIECES[name], gradients, strict=True))):
        wanted[:, first:end] += gradient
    with poisoned_allocations():
        total = RowSum(like)
        for (first, end), gradient in reversed(list(zip(PIECES[name], gradients, strict=True))):
            total.add(slice(first, end), gradient)
        assert torch.equal(total.total(), wanted)


def test_a_piece_that_covers_all_rows_is_the_sum() -> None:
    total, gradient = RowSum(torch.ones(1, 4, 1, 1, dtype=torch.bfloat16)), torch.ones(1, 4, 1, 1)
    total.add(slice(0, 4), gradient)
    assert total.total() is gradient


def test_a_sum_is_never_narrow() -> None:
    """Where nothing is computed a kernel may give a gradient in the type of the keys."""
    total = RowSum(torch.ones(1, 4, 1, 1, dtype=torch.bfloat16))
    total.add(slice(0, 4), torch.ones(1, 4, 1, 1, dtype=torch.bfloat16))
    assert total.total().dtype == torch.float32
