"""The executable specification's own gradients, against finite differences in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import nsa
import nsa.reference
from tests.laws.cases import Case
from tests.laws.parts import BRANCHES_AND_ALL, Parts

CASES = [
    Case(queries=13, keys=13, num_kv_heads=1, dk=3, dv=2),
    Case(queries=5, keys=13, num_kv_heads=1, dk=3, dv=2),
    Case(queries=14, keys=14, documents=(9, 0, 1, 4), num_kv_heads=1, dk=2, dv=3),
]


@pytest.mark.parametrize("case", CASES, ids=["square", "fewer-queries", "packed"])
@pytest.mark.parametrize("branch", BRANCHES_AND_ALL)
@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_gradients_are_finite_differences(backend: str, branch: str, case: Case) -> None:
    """Every branch through phi = avg, and the gates."""
    parts = Parts(backend, torch.device("cpu"))
    case = replace(case, config=nsa.NSAConfig(l=4, d=2, l_sel=4, n_sel=2, w=5, init_blocks=0, local_blocks=1))
    x = case.inputs(parts.device)
    leaves = tuple(a.double().requires_grad_() for a in x.floats())

    def run(*floats: Tensor) -> Tensor:
        return parts.forward(case, x.with_floats(floats), branch)

    assert torch.autograd.gradcheck(run, leaves)


@pytest.mark.parametrize("case", CASES[:1], ids=["square"])
def test_one_page_reference_is_the_whole(case: Case) -> None:
    """`nsa.reference.nsa_attention`, for reading, computes what the public face does with it."""
    x = case.inputs(torch.device("cpu"))
    read = nsa.reference.nsa_attention(*x.floats(), case.config)
    assert torch.equal(read, nsa.nsa_attention(*x.floats(), case.config, backend="reference"))
