"""Work that is left out, made coarser, or hidden behind NaN: refused with what is missing."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.cases.outcome import CaseOutcome, OracleCheck
from benchmarks.correctness import tolerance, verify
from benchmarks.timing import rotating_inputs
from nsa import nsa_attention
from tests.benchmarks.honesty.cheats import accepted, caught, measured, refused, unless_checked

GATES = 3
"""Which of the positional arguments of nsa_attention holds the gates."""


@pytest.mark.parametrize(("branch", "name"), [(0, "compressed"), (1, "selected"), (2, "window")])
def test_a_branch_that_is_left_out(branch: int, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def without(*arguments: Any, **options: Any) -> Tensor:
        gates = arguments[GATES].clone()
        gates[..., branch] = 0
        found: Tensor = nsa_attention(*arguments[:GATES], gates, *arguments[GATES + 1 :], **options)
        return found

    refused(measured(monkeypatch, unless_checked(without), length=128), f"o is as without the {name} branch")
    monkeypatch.setattr(OracleCheck, "passed", True)
    monkeypatch.setattr(rotating_inputs.known_answer, "require_known_answers", lambda: None)
    accepted(measured(monkeypatch, unless_checked(without), length=128))


@pytest.mark.parametrize("mode", ["prefill-forward", "decode"])
def test_a_head_that_is_left_out(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def without(*arguments: Any, **options: Any) -> Tensor:
        o: Tensor = nsa_attention(*arguments, **options)
        o[:, :, 2] = 0
        return o

    refused(measured(monkeypatch, unless_checked(without), mode), "head 2 of o is 0, as where it is skipped")


def test_the_backward_of_a_gate_that_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def without(*arguments: Any, **options: Any) -> Tensor:
        gates = arguments[GATES].detach() + 0 * arguments[GATES]
        found: Tensor = nsa_attention(*arguments[:GATES], gates, *arguments[GATES + 1 :], **options)
        return found

    record = measured(monkeypatch, unless_checked(without), "prefill-forward-backward")
    refused(record, "dgates is 0 everywhere, as where a backward is skipped")


@pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float16])
def test_a_float32_case_computed_in_a_narrower_type(narrow: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    def lowered(*arguments: Any, **options: Any) -> Tensor:
        arguments = tuple(x.to(narrow) if isinstance(x, Tensor) else x for x in arguments)
        found: Tensor = nsa_attention(*arguments, **options)
        return found.float()

    name = str(narrow).removeprefix("torch.")
    said = f"every value of o is a {name}, a narrower type than torch.float32"
    refused(measured(monkeypatch, unless_checked(lowered)), said)


def test_sums_in_a_narrower_type(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inputs rounded to TF32's ten bits, as its matrix products do; the output has all of float32's."""

    def tf32(x: Any) -> Any:
        return (x.view(torch.int32) & ~0x1FFF).view(torch.float32) if isinstance(x, Tensor) else x

    def lowered(*arguments: Any, **options: Any) -> Tensor:
        found: Tensor = nsa_attention(*map(tf32, arguments), **options)
        return found

    said = "the error is of the size that a narrower type makes (TF32, float16, bfloat16)"
    refused(measured(monkeypatch, unless_checked(lowered)), said)


def test_nan_in_a_row_that_nobody_compares(monkeypatch: pytest.MonkeyPatch) -> None:
    def with_nan(*arguments: Any, **options: Any) -> Tensor:
        o: Tensor = nsa_attention(*arguments, **options)
        o[0, 37, 1, 3] = torch.nan
        return o

    record = measured(monkeypatch, unless_checked(with_nan), length=128)
    caught(record, CaseOutcome.NONFINITE, "holds 1 values that are not finite")


@pytest.mark.parametrize("errors", [[math.nan, 1.0], [1.0, math.nan], [1.0, math.nan, 2.0]])
def test_a_nan_among_errors_is_the_worst_of_them(errors: list[float]) -> None:
    """Python's `max` finds 1.0 or 2.0 in two of these."""
    assert math.isnan(tolerance.worst(errors))
    assert not tolerance.check("o", tolerance.worst(errors), 3.0).passed


@pytest.mark.parametrize("budget", [math.inf, math.nan])
def test_a_budget_that_allows_everything_allows_nothing(budget: float) -> None:
    assert OracleCheck("o", 1.0, 2.0).passed
    assert not OracleCheck("o", 1.0, budget).passed
    assert not tolerance.pooled([[OracleCheck("o", 1.0, 2.0)], [OracleCheck("o", 1.0, budget)]])[0].passed


def test_a_nan_in_an_oracle_row_is_no_small_error() -> None:
    rows = [verify.QueryRow(0, 0), verify.QueryRow(0, 1)]
    o = torch.ones(1, 2, 2, 4)
    o[0, 1] = torch.nan
    truth = [torch.ones(1, 1, 2, 4)] * 2
    assert not tolerance.outputs(o, rows, truth, truth).passed
