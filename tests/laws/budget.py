"""How far a result may be from the truth: a multiple of PyTorch's own error in the same dtype, not a number by hand.

PyTorch's own error can be 0 by luck (one key: the output is the value itself, and the gradient of q cancels out
exactly), so the greatest error has a floor of one unit in the last place of the terms that are summed. The Euclidean
one has it only where the numbers may be too few for PyTorch's error to be typical.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tests.laws.cases import Inputs

FORWARD, BACKWARD = 2.0, 3.0
"""How many times PyTorch's own error is allowed."""

_MEASURES = {"greatest": torch.inf, "Euclidean": 2}


def _finite_error(x: Tensor, truth: Tensor) -> Tensor:
    return torch.where(truth.isfinite(), x.double() - truth, 0.0).flatten()


def greatest(*tensors: Tensor) -> float:
    """The greatest finite entry, in absolute value; 0 if there is none."""
    return max((x[x.isfinite()].abs().max().item() for x in tensors if x.isfinite().any()), default=0.0)


def output_unit(x: Inputs) -> float:
    """The size of the terms gate · p · v of an output."""
    return greatest(x.v) * max(greatest(x.gates), 1.0)


def score_unit(x: Inputs) -> float:
    """A bound on the scores q · k / sqrt(Dk)."""
    return _longest(x.q) * _longest(x.k) * x.q.shape[-1] ** -0.5


def gradient_unit(x: Inputs, upstream: Tensor) -> float:
    """A bound on the terms gate · do · v · k / sqrt(Dk) (or q for k) that gradients sum, though the sum may be 0."""
    factor = max(greatest(x.q, x.k) * x.q.shape[-1] ** -0.5, 1.0)
    return _longest(upstream) * _longest(x.v) * factor * max(greatest(x.gates), 1.0)


def _longest(x: Tensor) -> float:
    return x.double().norm(dim=-1).max().item() if x.numel() else 0.0


def _budgets(pytorch: Tensor, truth: Tensor, factor: float, unit: float, steady: bool) -> dict[str, float]:
    """The error allowed in each measure."""
    ulp = torch.finfo(pytorch.dtype).eps * unit
    own = _finite_error(pytorch, truth)
    floors = {"greatest": ulp, "Euclidean": 0.0 if steady else ulp * math.sqrt(truth.numel())}
    return {name: factor * torch.linalg.vector_norm(own, p).item() + floors[name] for name, p in _MEASURES.items()}


def _check(name: str, error: Tensor, budgets: dict[str, float]) -> None:
    for measure, p in _MEASURES.items():
        found = torch.linalg.vector_norm(error, p).item()
        assert found <= budgets[measure], f"{name}: {measure} error {found:.3g} of at most {budgets[measure]:.3g}"


def within_budget(
    name: str,
    ours: Tensor,
    pytorch: Tensor,
    truth: Tensor,
    factor: float,
    *,
    unit: float,
    steady: bool = False,
) -> None:
    """Assert that `ours` is at most `factor` times as far from the float64 truth as PyTorch is.

    The floor is one unit in the last place of `unit`, the size of the terms that are summed; `steady` numbers are
    so many that they need no Euclidean floor.
    """
    assert ours.dtype == pytorch.dtype, f"{name}: {ours.dtype}, not {pytorch.dtype}"
    assert ours.shape == truth.shape, f"{name}: {list(ours.shape)}, not {list(truth.shape)}"
    if truth.numel() == 0:
        return
    infinite = ~truth.isfinite()
    assert torch.equal(ours[infinite].double(), truth[infinite]), f"{name}: infinities in the wrong places"
    _check(name, _finite_error(ours, truth), _budgets(pytorch, truth, factor, unit, steady))


def agree(name: str, a: Tensor, b: Tensor, pytorch: Tensor, truth: Tensor, *, unit: float) -> None:
    """Assert that two ways to the same result differ by no more than two forward errors within budget."""
    assert a.shape == b.shape == truth.shape, f"{name}: {list(a.shape)}, {list(b.shape)}, not {list(truth.shape)}"
    if truth.numel() == 0:
        return
    allowed = _budgets(pytorch, truth, FORWARD, unit, steady=False)
    _check(name, (a.double() - b.double()).flatten(), {measure: 2 * budget for measure, budget in allowed.items()})
