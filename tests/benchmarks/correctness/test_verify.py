"""The comparison lets a right implementation through and stops every wrong one, by what is wrong with it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from benchmarks.baselines import sdpa
from benchmarks.cases import inputs
from benchmarks.cases.inputs import Problem
from benchmarks.correctness import oracle, tolerance, verify
from benchmarks.correctness.verify import IncorrectError, NonFiniteError
from nsa import Aux, nsa_attention
from tests.benchmarks.synthetic import CONFIG, key

Fault = Callable[[Tensor, Aux], tuple[Tensor, Aux]]


def right(p: Problem) -> tuple[Tensor, Aux]:
    return nsa_attention(p.q, p.k, p.v, p.gates, CONFIG, backend="torch", return_aux=True)


def with_fault(fault: Fault) -> Callable[[Problem], tuple[Tensor, Aux]]:
    return lambda p: fault(*right(p))


def problem(dtype: str = "float32") -> Problem:
    return inputs.draw(key(length=96, dtype=dtype), "cpu")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_lets_nsa_and_dense_attention_through(dtype: str) -> None:
    p = problem(dtype)
    passed = verify.check_nsa(p, CONFIG, right, rows=24, backward=True)
    assert [check.name for check in passed.checks] == ["block_indices", "o", "dq", "dk", "dv", "dgates"]
    assert (passed.passed, passed.path, passed.rows_checked) == (True, "torch", 24)
    dense = verify.check_dense(p, lambda p: sdpa.attend(p, "sdpa-math"), "sdpa-math", rows=8, backward=True)
    assert [check.name for check in dense.checks] == ["o", "dq", "dk", "dv"]


def test_a_budget_comes_from_the_error_that_pytorch_has_in_a_whole_call() -> None:
    """Not from that of a row alone, whose products are summed in another order: budgets were then too small."""
    shares = []
    for seed in range(9):
        p = inputs.draw(key(length=200, inputs="recorded", head_dim_k=32, head_dim_v=32), "cpu", seed)
        found = verify.check_dense(p, lambda p: sdpa.attend(p, "sdpa-flash"), "sdpa-flash", rows=8, backward=True)
        shares += [check.error / check.budget for check in found.checks if check.name == "dq" and check.error]
    assert len(shares) == 9
    assert max(shares) < 1.3 / tolerance.BACKWARD_FACTOR  # it is PyTorch itself that is held to its own error


def test_a_budget_of_decode_comes_from_the_error_of_one_query() -> None:
    """With several, PyTorch's flash attention errs a quarter as much at this length: one query was out of budget."""
    p = inputs.draw(key("decode", "sdpa-flash", 16384, heads=8, batch=4, head_dim_k=64, head_dim_v=64), "cpu")
    (found,) = verify.check_dense(p, lambda p: sdpa.attend(p, "sdpa-flash"), "sdpa-flash", rows=4).checks
    assert found.error is not None
    assert found.error < 1.3 / tolerance.FORWARD_FACTOR * found.budget


def decode_step(p: Problem) -> tuple[Tensor, Aux]:
    return nsa_attention(
        p.q, p.k, p.v, p.gates, CONFIG, k_compressed=p.k_compressed, v_compressed=p.v_compressed, return_aux=True
    )


def decode_problem(batch: int) -> Problem:
    return inputs.with_compressed(inputs.draw(key("decode", length=96, batch=batch), "cpu"), CONFIG)


def test_lets_decode_through() -> None:
    assert verify.check_nsa(decode_problem(9), CONFIG, decode_step, rows=8).rows_checked == 9  # one of every sequence


@pytest.mark.parametrize("wrong", range(9))
def test_stops_a_batch_of_which_one_sequence_is_wrong(wrong: int) -> None:
    p = decode_problem(9)

    def other(o: Tensor) -> Tensor:
        o = o.clone()
        o[wrong] = 123.0
        return o

    def attend(p: Problem) -> tuple[Tensor, Aux]:
        o, aux = decode_step(p)
        return other(o), aux

    with pytest.raises(IncorrectError, match="o: error"):
        verify.check_nsa(p, CONFIG, attend, rows=8)
    with pytest.raises(IncorrectError, match="o: error"):
        verify.check_dense(p, lambda p: other(sdpa.attend(p, "sdpa-math")), "sdpa-math", rows=8)


def test_a_large_batch_of_prefills_meets_the_oracle_on_more_than_first_rows() -> None:
    p = inputs.draw(key(length=40, batch=9), "cpu")
    passed = verify.check_nsa(p, CONFIG, right, rows=4, backward=True)
    assert (passed.passed, passed.rows_checked) == (True, 9)
    with pytest.raises(IncorrectError, match="dq: error"):
        verify.check_nsa(p, CONFIG, with_fault(scaled_gradient), rows=4, backward=True)
    assert len({row.query for row in oracle.sample_rows(p, CONFIG, 4)}) == 9


def one_row_off(o: Tensor, aux: Aux) -> tuple[Tensor, Aux]:
    factor = torch.ones_like(o[..., :1])
    factor[:, -1] = 1 + 1e-5
    return o * factor, aux


def other_blocks(o: Tensor, aux: Aux) -> tuple[Tensor, Aux]:
    blocks = aux.block_indices.clone()
    blocks[:, -1] = torch.tensor([0, 1, 10, 11], dtype=torch.int32)  # legal, but not the best
    return o, dataclasses.replace(aux, block_indices=blocks)


def dropped_current_block(o: Tensor, aux: Aux) -> tuple[Tensor, Aux]:
    blocks = aux.block_indices.clone()
    blocks[:, -1] = torch.tensor([0, 1, 2, 3], dtype=torch.int32)
    return o, dataclasses.replace(aux, block_indices=blocks)


def scaled_gradient(o: Tensor, aux: Aux) -> tuple[Tensor, Aux]:
    return o.detach() + (o - o.detach()) * (1 + 1e-5), aux


@pytest.mark.parametrize(
    ("fault", "named"),
    [(one_row_off, "o: error"), (other_blocks, "block_indices: error"), (dropped_current_block, "not finite"),
     (scaled_gradient, "dq: error")],
    ids=lambda value: getattr(value, "__name__", ""),
)  # fmt: skip
def test_stops_what_is_wrong(fault: Fault, named: str) -> None:
    with pytest.raises(IncorrectError, match=named) as caught:
        verify.check_nsa(problem(), CONFIG, with_fault(fault), rows=24, backward=True)
    assert not caught.value.correctness.passed


def nan_output(o: Tensor, aux: Aux) -> tuple[Tensor, Aux]:
    poisoned = o.clone()
    poisoned[0, 50, 1, 2] = torch.nan  # in a row that no sample holds
    return poisoned, aux


class _NaNGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, *gradients: Tensor) -> Tensor:
        return torch.full_like(gradients[0], torch.nan)


def nan_gradient(o: Tensor, aux: Aux) -> tuple[Tensor, Aux]:
    return _NaNGradient.apply(o), aux


@pytest.mark.parametrize(("fault", "named"), [(nan_output, "o holds 1 values"), (nan_gradient, "dq holds")])
def test_stops_what_is_not_finite(fault: Fault, named: str) -> None:
    with pytest.raises(NonFiniteError, match=named):
        verify.check_nsa(problem(), CONFIG, with_fault(fault), rows=8, backward=True)


def test_stops_a_baseline_with_the_wrong_alignment() -> None:
    """is_causal with one query at the end of many keys sees key 0 only."""
    p = inputs.draw(key("decode", length=96), "cpu")

    def top_left(p: Problem) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (p.q, p.k, p.v))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(
            1, 2
        )

    with pytest.raises(IncorrectError, match="o: error"):
        verify.check_dense(p, top_left, "top-left", rows=8)


def test_what_is_not_finite_is_counted_part_by_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sum over bools takes eight bytes for each of them."""
    monkeypatch.setattr(verify, "_COUNTED_AT_ONCE", 7)
    x = torch.zeros(4, 5)
    verify.require_finite("o", x)
    x[0, 1], x[3, 3], x[3, 4] = float("inf"), float("nan"), float("-inf")
    with pytest.raises(NonFiniteError, match="o holds 3 values that are not finite, of 20"):
        verify.require_finite("o", x.mT)
