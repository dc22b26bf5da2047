"""What lies in memory does not matter: garbage before the call, strides, what ran before."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from regression.detectors import memory
from tests.laws import oracle
from tests.laws.budget import FORWARD, agree, gradient_unit, output_unit, within_budget
from tests.laws.cases import Case, Inputs, cases
from tests.laws.parts import Parts, branch_law, law

ANY = cases(least_keys=1)


def _everything(parts: Parts, case: Case, x: Inputs, branch: str) -> tuple[Tensor, ...]:
    """Output and gradients, and for the whole also the indices and each lse."""
    o = parts.forward(case, x, branch)
    results = (o, *parts.gradients(case, x, branch, case.noise(o)))
    if branch != "all":
        return results
    aux = parts.whole(case, x)[1]
    return (*results, aux.block_indices, *aux.lse.values(), *aux.keys_read.values())


def _all_equal(a: tuple[Tensor, ...], b: tuple[Tensor, ...]) -> None:
    for i, (left, right) in enumerate(zip(a, b, strict=True)):
        assert torch.equal(left, right), f"result {i}"


@branch_law(ANY)
def test_garbage_in_fresh_memory_changes_nothing(parts: Parts, case: Case, branch: str) -> None:
    x = case.inputs(parts.device)
    clean = _everything(parts, case, x, branch)
    with memory.poisoned_allocations():
        _all_equal(clean, _everything(parts, case, x, branch))


@branch_law(ANY)
def test_repeats_bit_for_bit(parts: Parts, case: Case, branch: str) -> None:
    """Forward and backward give the same bits twice."""
    x = case.inputs(parts.device)
    _all_equal(_everything(parts, case, x, branch), _everything(parts, case, x, branch))


@branch_law(ANY)
def test_other_calls_in_between_leave_no_trace(parts: Parts, case: Case, branch: str) -> None:
    """Long, short, long again: no state is kept between calls, and results already given stay as they are."""
    x = case.inputs(parts.device)
    first = _everything(parts, case, x, branch)
    kept = tuple(a.clone() for a in first)
    other = replace(case.config, n_sel=case.config.n_sel + 1, w=case.config.w + 3, l_sel=2 * case.config.l_sel)
    short = Case(config=case.config, queries=1, keys=1, num_kv_heads=case.num_kv_heads, group=case.group, dk=case.dk)
    for between in (short, replace(case, config=other), replace(case, seed=case.seed + 1)):
        _everything(parts, between, between.inputs(parts.device), branch)
    _all_equal(kept, first)
    _all_equal(kept, _everything(parts, case, x, branch))


@branch_law(ANY)
def test_two_configs_in_turn(parts: Parts, case: Case, branch: str) -> None:
    """Each of two configs gives its own truth, whichever came first with this shape."""
    config = case.config
    other = replace(config, n_sel=config.n_sel + 1, w=config.w + 3, l_sel=2 * config.l_sel)
    for turn in (case, replace(case, config=other), case):
        x = turn.inputs(parts.device)
        block_indices = parts.select(turn, x)
        pytorch, truth = oracle.pytorch_and_truth(turn, x, branch, block_indices)
        within_budget("o", parts.forward(turn, x, branch), pytorch, truth, FORWARD, unit=output_unit(x))


@branch_law(ANY)
def test_graph_survives_a_call_of_another_length(parts: Parts, case: Case, branch: str) -> None:
    """A forward of another length between forward and backward does not disturb the first graph."""
    x = case.inputs(parts.device)
    upstream = case.noise(parts.forward(case, x, branch))
    expected = parts.gradients(case, x, branch, upstream)
    leaves = tuple(a.detach().requires_grad_() for a in x.floats())
    o = parts.forward(case, x.with_floats(leaves), branch)
    other = Case(config=case.config, queries=17, keys=17, num_kv_heads=case.num_kv_heads, group=case.group, dk=case.dk)
    parts.forward(other, other.inputs(parts.device), branch)
    if o.requires_grad:
        _all_equal(expected, torch.autograd.grad(o, leaves, upstream, allow_unused=True, materialize_grads=True))


def _transposed(a: Tensor) -> Tensor:
    return a.transpose(1, 2).contiguous().transpose(1, 2)


def _spread(a: Tensor) -> Tensor:
    """The same numbers in every other channel, with NaN in between."""
    return torch.stack([a, torch.full_like(a, torch.nan)], -1).flatten(-2)[..., ::2]


@branch_law(ANY)
def test_strides_do_not_matter(parts: Parts, case: Case, branch: str) -> None:
    """Transposed and strided tensors give what contiguous ones do, forward and backward."""
    x = case.inputs(parts.device)
    block_indices = parts.select(case, x)
    o, (pytorch, truth) = parts.forward(case, x, branch), oracle.pytorch_and_truth(case, x, branch, block_indices)
    upstream = case.noise(o)
    for strided in (_transposed, _spread):
        y = x.with_floats(tuple(strided(a) for a in x.floats()))
        assert torch.equal(parts.select(case, y), block_indices)
        agree(strided.__name__, parts.forward(case, y, branch), o, pytorch, truth, unit=output_unit(x))
        grads = parts.gradients(case, y, branch, strided(upstream))
        own = oracle.gradients(case, x, branch, block_indices, upstream, oracle.sdpa)
        true = oracle.gradients(case, x, branch, block_indices, upstream.double(), oracle.dense)
        for a, b, p, t in zip(grads, parts.gradients(case, x, branch, upstream), own, true, strict=True):
            agree(f"gradient, {strided.__name__}", a, b, p, t, unit=gradient_unit(x, upstream))


@branch_law(cases(packed=False, least_keys=1))
def test_expanded_tensors_are_read_as_they_look(parts: Parts, case: Case, branch: str) -> None:
    """A batch or head axis of stride 0, and an upstream gradient that is one expanded number."""
    x = case.inputs(parts.device)
    y = x.with_floats(tuple(a[:1, :, :1].expand(2, -1, a.shape[2], -1) for a in x.floats()))
    copied = y.with_floats(tuple(a.contiguous() for a in y.floats()))
    case = replace(case, batch=2)
    block_indices = parts.select(case, copied)
    o = parts.forward(case, copied, branch)
    pytorch, truth = oracle.pytorch_and_truth(case, copied, branch, block_indices)
    agree("o", parts.forward(case, y, branch), o, pytorch, truth, unit=output_unit(x))
    one = torch.ones((), device=parts.device).expand(o.shape)
    _all_equal(parts.gradients(case, copied, branch, one), parts.gradients(case, copied, branch, one.contiguous()))


@branch_law(ANY)
def test_inputs_are_left_as_they_were(parts: Parts, case: Case, branch: str) -> None:
    """Nothing is written into q, k, v, the gates, the block indices or the upstream gradient."""
    x = case.inputs(parts.device)
    before = tuple(a.clone() for a in x.floats())
    upstream = case.noise(parts.forward(case, x, branch))
    kept = upstream.clone()
    parts.gradients(case, x, branch, upstream)
    _all_equal((*before, kept), (*x.floats(), upstream))


@law(cases(least_keys=1))
def test_block_indices_are_left_as_they_were(parts: Parts, case: Case) -> None:
    x = case.inputs(parts.device)
    block_indices = parts.select(case, x).flip(-1).contiguous()
    kept = block_indices.clone()
    parts.selected(case, x, block_indices)
    assert torch.equal(kept, block_indices)
