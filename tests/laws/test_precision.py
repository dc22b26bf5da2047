"""Values and gradients within a budget that PyTorch's own error sets, for every branch and dtype."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from nsa import NSAConfig
from tests.laws import oracle
from tests.laws.budget import BACKWARD, FORWARD, gradient_unit, greatest, output_unit, score_unit, within_budget
from tests.laws.cases import DTYPES, Case, cases
from tests.laws.parts import BRANCHES_AND_ALL, Parts, branch_law, law

STEADY = Case(
    config=NSAConfig(l=4, d=2, l_sel=8, n_sel=4, w=13), num_kv_heads=2, group=3, dk=24, dv=16, queries=64, keys=64
)
"""Enough numbers that the greatest of PyTorch's own errors is no accident."""


def values_and_gradients_within_budget(parts: Parts, case: Case, branch: str, *, steady: bool = False) -> None:
    x = case.inputs(parts.device)
    block_indices = parts.select(case, x)
    o = parts.forward(case, x, branch)
    pytorch_o, true_o = oracle.pytorch_and_truth(case, x, branch, block_indices)
    within_budget(
        "o", o, pytorch_o, true_o, FORWARD, unit=greatest(true_o) if steady else output_unit(x), steady=steady
    )
    upstream = case.noise(o)
    ours = parts.gradients(case, x, branch, upstream)
    pytorch = oracle.gradients(case, x, branch, block_indices, upstream, oracle.sdpa)
    truth = oracle.gradients(case, x, branch, block_indices, upstream.double(), oracle.dense)
    for name, a, b, c in zip(("dq", "dk", "dv", "dgates"), ours, pytorch, truth, strict=True):
        unit = greatest(c) if steady else gradient_unit(x, upstream)
        within_budget(name, a, b, c, BACKWARD, unit=unit, steady=steady)


@branch_law(cases(dtypes=DTYPES))
def test_any_call_within_budget(parts: Parts, case: Case, branch: str) -> None:
    """Any config, any shape, fewer queries than keys, packed documents."""
    values_and_gradients_within_budget(parts, case, branch)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("branch", BRANCHES_AND_ALL)
def test_steady_call_within_budget(parts: Parts, branch: str, dtype: torch.dtype) -> None:
    """Forward within 2 times, backward within 3 times PyTorch's own error in the same dtype."""
    values_and_gradients_within_budget(parts, replace(STEADY, dtype=dtype), branch, steady=True)


@law(cases(dtypes=DTYPES))
def test_lse_within_budget(parts: Parts, case: Case) -> None:
    """lse is float32, base e, and -inf where nothing is seen."""
    x = case.inputs(parts.device)
    block_indices = parts.select(case, x)
    k_cmp = parts.compress(case, x)[0][:, : len(oracle.compressed_blocks(case))]
    masks = {
        "compressed": (k_cmp, oracle.compressed_mask(case, parts.device)),
        "selected": (x.k, oracle.selected_mask(case, block_indices)),
        "window": (x.k, oracle.window_mask(case, parts.device)),
    }
    lse = parts.whole(case, x)[1].lse
    assert set(lse) == set(masks)
    for name, (k, mask) in masks.items():
        single, truth = (
            oracle.attend(x.q.to(wide), k.to(wide), k.to(wide), mask)[1] for wide in (torch.float32, torch.float64)
        )
        within_budget(f"lse of {name}", lse[name], single, truth, FORWARD, unit=score_unit(x))


def test_the_oracle_in_pieces_is_the_oracle_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of real sizes it takes few query heads at a time, since all scores would not fit on a GPU beside others."""
    case, cpu = replace(STEADY, batch=2, num_kv_heads=2, group=3, dtype=torch.float64), torch.device("cpu")
    x = case.inputs(cpu)
    blocks = Parts("torch", cpu).select(case, x)
    upstream = case.noise(x.q[..., : case.dv])
    taken: list[int] = []
    monkeypatch.setattr(oracle, "attend", _noting(oracle.attend, taken))

    def results(attention: oracle.Attention, dtype: torch.dtype) -> list[torch.Tensor]:
        found = (oracle.gradients(case, x, one, blocks, upstream.to(dtype), attention) for one in BRANCHES_AND_ALL)
        return [gradient for of_a_branch in found for gradient in of_a_branch]

    both = (oracle.dense, oracle.sdpa)
    truth, single = ([results(attention, dtype) for attention in both] for dtype in (torch.float64, torch.bfloat16))
    for heads in (1, 2):
        monkeypatch.setattr(oracle, "_AT_ONCE", heads * case.batch * case.queries * case.keys)
        taken.clear()
        for attention, whole, rounded in zip(both, truth, single, strict=True):
            for piece, wanted in zip(results(attention, torch.float64), whole, strict=True):
                torch.testing.assert_close(piece, wanted)
            for piece, one, wanted in zip(results(attention, torch.bfloat16), rounded, whole, strict=True):
                assert (piece - wanted).norm() <= 1.05 * (one - wanted).norm(), "gradients of keys are rounded once"
        assert heads in taken
        assert max(taken) <= case.group, "never all heads at a time"


def _noting(attend: Callable[..., Any], taken: list[int]) -> Callable[..., Any]:
    def noting(q: torch.Tensor, *more: torch.Tensor) -> Any:
        taken.append(q.shape[2])
        return attend(q, *more)

    return noting
