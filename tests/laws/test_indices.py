"""The selected branch takes any indices: what is invalid is ignored, what comes twice counts once."""

from __future__ import annotations

import torch
from torch import Tensor

import nsa
from tests.laws import oracle
from tests.laws.budget import BACKWARD, FORWARD, gradient_unit, output_unit, score_unit, within_budget
from tests.laws.cases import Case, Inputs, cases
from tests.laws.parts import Parts, law


def _messy_indices(case: Case, device: torch.device) -> Tensor:
    """int64 [B, S, Hkv, 6]: −1 anywhere, out of range, beyond the query, twice, in no order."""
    most = -(-case.keys // case.config.l_sel)
    numbers = torch.Generator().manual_seed(case.seed)
    drawn = torch.randint(-2, most + 3, (case.batch, case.queries, case.num_kv_heads, 6), generator=numbers)
    far = torch.tensor([-(2**31), 2**31 - 1, -1, 2**20])
    pick = torch.randint(0, 12, drawn.shape, generator=numbers)
    return torch.where(pick < 4, far[pick.clamp(max=3)], drawn).to(device)


def _selected(parts: Parts, case: Case, x: Inputs, block_indices: Tensor) -> tuple[Tensor, Tensor]:
    return nsa.selected_attention(*x.qkv(), block_indices, case.config, cu_seqlens=x.cu_seqlens, backend=parts.backend)


def _is_the_masked_output(case: Case, x: Inputs, block_indices: Tensor, o: Tensor) -> None:
    pytorch, truth = oracle.pytorch_and_truth(case, x, "selected", block_indices)
    within_budget("o", o, pytorch, truth, FORWARD, unit=output_unit(x))


@law(cases(least_keys=1))
def test_invalid_indices_are_ignored_and_duplicates_count_once(parts: Parts, case: Case) -> None:
    """Against the mask of the blocks that are valid: output, lse and gradients."""
    x = case.inputs(parts.device)
    block_indices = _messy_indices(case, parts.device)
    leaves = x.with_floats(tuple(a.detach().requires_grad_() for a in x.floats()))
    o, lse = _selected(parts, case, leaves, block_indices)
    _is_the_masked_output(case, x, block_indices, o.detach())
    mask = oracle.selected_mask(case, block_indices)
    single, true = (oracle.attend(*x.qkv(wide), mask)[1] for wide in (torch.float32, torch.float64))
    within_budget("lse", lse.detach(), single, true, FORWARD, unit=score_unit(x))
    upstream = case.noise(o)
    grads = torch.autograd.grad(o, leaves.qkv(), upstream)
    pytorch = oracle.gradients(case, x, "selected", block_indices, upstream, oracle.sdpa)
    truth = oracle.gradients(case, x, "selected", block_indices, upstream.double(), oracle.dense)
    for name, ours, p, t in zip(("dq", "dk", "dv"), grads, pytorch[:3], truth[:3], strict=True):
        within_budget(name, ours, p, t, BACKWARD, unit=gradient_unit(x, upstream))


@law(cases(least_keys=1))
def test_index_dtype_and_order_do_not_matter(parts: Parts, case: Case) -> None:
    """int32 and int64, ascending or not, give the same bits; listed twice, the same output."""
    x = case.inputs(parts.device)
    block_indices = parts.select(case, x)
    o = _selected(parts, case, x, block_indices)[0]
    assert torch.equal(o, _selected(parts, case, x, block_indices.long())[0])
    assert torch.equal(o, _selected(parts, case, x, block_indices.flip(-1))[0])
    twice = torch.cat([block_indices, block_indices], -1)
    _is_the_masked_output(case, x, block_indices, _selected(parts, case, x, twice)[0])


@law(cases(least_keys=1))
def test_any_number_of_indices_is_served(parts: Parts, case: Case) -> None:
    """None at all gives empty rows; one column gives one block."""
    x = case.inputs(parts.device)
    none = torch.zeros(case.batch, case.queries, case.num_kv_heads, 0, dtype=torch.int32, device=parts.device)
    o, lse = _selected(parts, case, x, none)
    assert torch.equal(o, torch.zeros_like(o))
    assert (lse == -torch.inf).all()
    first = none.new_zeros(*none.shape[:3], 1)
    _is_the_masked_output(case, x, first, _selected(parts, case, x, first)[0])
