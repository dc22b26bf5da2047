"""lse can be trained through: its gradients are those of the logarithm of the sum, alone and beside an output's."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import nsa
from nsa.config import BRANCHES
from tests.laws import oracle
from tests.laws.budget import BACKWARD, gradient_unit, greatest, within_budget
from tests.laws.cases import Case, Inputs, cases
from tests.laws.parts import BRANCHES_AND_ALL, Parts, branch_law
from tests.laws.test_precision import STEADY

SMALL = replace(STEADY, queries=14, keys=20, num_kv_heads=1)
"""What Triton's interpreter takes a second for."""


def _ours(parts: Parts, case: Case, x: Inputs, branch: str, block_indices: Tensor) -> list[Tensor]:
    """[o, lse] of a branch, or [o, lse of each branch] of the whole, with the graph to the inputs."""
    if branch == "all":
        o, aux = parts.whole(case, x)
        return [o, *aux.lse.values()]
    if branch == "selected":
        return list(parts.selected(case, x, block_indices))
    return list({"compressed": parts.compressed, "window": parts.window}[branch](case, x))


def _dense(case: Case, x: Inputs, branch: str, block_indices: Tensor) -> list[Tensor]:
    """The same by dense attention under counted masks."""
    device = x.q.device
    if branch == "all":
        each = [_dense(case, x, name, block_indices) for name in BRANCHES]
        o = sum(x.gates[..., i, None] * found[0] for i, found in enumerate(each))
        return [torch.as_tensor(o), *(lse for _, lse in each)]
    if branch == "compressed":
        k, v = oracle.compress(case, x.k), oracle.compress(case, x.v)
        return list(oracle.attend(x.q, k, v, oracle.compressed_mask(case, device))[:2])
    selected = branch == "selected"
    mask = oracle.selected_mask(case, block_indices) if selected else oracle.window_mask(case, device)
    return list(oracle.attend(x.q, x.k, x.v, mask)[:2])


def _gradients(outputs: list[Tensor], upstream: list[Tensor], leaves: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    with_graph = [(o, do) for o, do in zip(outputs, upstream, strict=True) if o.requires_grad]
    if not with_graph:
        return tuple(torch.zeros_like(leaf) for leaf in leaves)
    outputs, upstream = map(list, zip(*with_graph, strict=True))
    return torch.autograd.grad(outputs, leaves, upstream, allow_unused=True, materialize_grads=True)


def gradients_through_lse(parts: Parts, case: Case, branch: str, *, alone: bool) -> None:
    """Of q, k, v and the gates, from upstream gradients of each lse, and of the output too unless `alone`."""
    x = case.inputs(parts.device)
    block_indices = parts.select(case, x)
    first = 1 if alone else 0

    def found(dtype: torch.dtype, outputs_of: str) -> tuple[Tensor, ...]:
        leaves = tuple(leaf.detach().to(dtype).requires_grad_() for leaf in x.floats())
        y = x.with_floats(leaves)
        by_parts = outputs_of == "parts"
        run = _ours(parts, case, y, branch, block_indices) if by_parts else _dense(case, y, branch, block_indices)
        outputs = run[first:]
        return _gradients(outputs, [case.noise(o) for o in outputs], leaves)

    ours, pytorch, truth = found(case.dtype, "parts"), found(case.dtype, "dense"), found(torch.float64, "dense")
    of_lse = greatest(x.q, x.k) * x.q.shape[-1] ** -0.5 * greatest(case.noise(x.q))
    for name, a, b, c in zip(("dq", "dk", "dv", "dgates"), ours, pytorch, truth, strict=True):
        within_budget(name, a, b, c, BACKWARD, unit=gradient_unit(x, case.noise(x.v)) + of_lse)


@branch_law(cases())
def test_gradients_through_lse_and_output(parts: Parts, case: Case, branch: str) -> None:
    gradients_through_lse(parts, case, branch, alone=False)


@pytest.mark.parametrize("branch", BRANCHES_AND_ALL)
def test_gradients_through_lse_alone(parts: Parts, branch: str) -> None:
    gradients_through_lse(parts, SMALL, branch, alone=True)


def test_the_gradient_of_lse_is_that_of_its_own_branch(parts: Parts) -> None:
    """A tensor per branch: those of the others get none from it."""
    case = replace(SMALL, queries=10, keys=12)
    x = case.inputs(parts.device)
    keys = [x.k.clone().requires_grad_() for _ in range(3)]
    _, aux = nsa.nsa_attention(x.q, keys, x.v, x.gates, case.config, backend=parts.backend, return_aux=True)
    for branch, lse in aux.lse.items():
        given = torch.autograd.grad(lse, keys, case.noise(lse), allow_unused=True, retain_graph=True)
        assert [g is not None and bool((g != 0).any()) for g in given] == [name == branch for name in aux.lse]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_lse_is_float32_for_every_type(parts: Parts, dtype: torch.dtype) -> None:
    """From each part and from the whole, many queries or few, none or some keys."""
    if parts.backend == "triton" and dtype == torch.float64:
        pytest.skip("the kernels know no float64")
    for case in (replace(SMALL, queries=2, keys=9), replace(SMALL, queries=0), replace(SMALL, queries=2, keys=2)):
        x = case.inputs(parts.device)
        x = x.with_floats(tuple(a.to(dtype) for a in x.floats()))
        found = dict(parts.whole(case, x)[1].lse)
        found |= {"part": parts.compressed(case, x)[1], "part 2": parts.window(case, x)[1]}
        found |= {"part 3": parts.selected(case, x)[1]}
        assert {name: lse.dtype for name, lse in found.items()} == dict.fromkeys(found, torch.float32)


@pytest.mark.parametrize("branch", BRANCHES)
def test_float64_gradients_are_not_rounded_through_lse(parts: Parts, branch: str) -> None:
    """What is handed out in float32 is kept in float64 for the backward pass, and for the choice of blocks."""
    if parts.backend == "triton":
        pytest.skip("the kernels know no float64")
    x = SMALL.inputs(parts.device)
    x = x.with_floats(tuple(a.double() for a in x.floats()))
    block_indices = parts.select(SMALL, x)
    assert torch.equal(parts.whole(SMALL, x)[1].block_indices, block_indices)
    upstream = SMALL.noise(parts.forward(SMALL, x, branch))
    truth = oracle.gradients(SMALL, x, branch, block_indices, upstream, oracle.dense)
    for a, b in zip(parts.gradients(SMALL, x, branch, upstream), truth, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)
