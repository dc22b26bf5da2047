"""What work costs the host: every operator and every wait is counted, and what a layer costs has a bound."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from nsa import layer, nsa_attention
from regression.contract import ReproVerdict, verdict
from regression.detectors.host_cost import Operators
from regression.incidents import step5_stall
from tests.regression.test_attention_incidents import SilentStep

STEP = SilentStep(("reference", "torch"), "cpu")


def _per_token(q: Tensor, *tensors: Any, **more: Any) -> Tensor:
    """A fault of one operator per token that asks the host for nothing."""
    for t in range(q.shape[1]):
        q[:, t] + 1
    return nsa_attention(q, *tensors, **more)


@pytest.mark.parametrize(
    ("fault", "expected"),
    [(nsa_attention, ReproVerdict.WRONG), (_per_token, ReproVerdict.WRONG), (None, ReproVerdict.SLOW)],
)
def test_step5_stall_fires_by_its_operators_and_by_its_host_syncs(
    fault: Callable[..., Tensor] | None, expected: ReproVerdict, monkeypatch: pytest.MonkeyPatch
) -> None:
    if fault is not None:
        monkeypatch.setattr(step5_stall, "token_by_token", fault)
    assert verdict(step5_stall.faulty(STEP)) is expected


def test_one_operator_per_token_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer, "nsa_attention", _per_token)
    assert verdict(step5_stall.product(STEP)) is ReproVerdict.SLOW


WAITS: dict[str, Callable[[Tensor], object]] = {
    "item": lambda x: x.sum().item(),
    "float": lambda x: float(x.sum()),
    "bool": lambda x: bool(x.sum() > 0),
    "if all": lambda x: 1 if (x > 0).all() else 2,
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: x.numpy(),
    "cpu": lambda x: x.cpu(),
    "nonzero": lambda x: x.nonzero(),
    "where": lambda x: torch.where(x > 0),
    "mask": lambda x: x[x > 0],
    "write by mask": lambda x: x.clone().index_put_((x > 0,), torch.zeros(())),
    "masked_select": lambda x: x.masked_select(x > 0),
    "unique": lambda x: torch.unique(x),
    "unique_consecutive": lambda x: torch.unique_consecutive(x),
    "equal": lambda x: torch.equal(x, x),
}


@pytest.mark.parametrize("name", WAITS)
def test_waits_are_seen(name: str) -> None:
    x = torch.randn(5)
    with Operators() as operators:
        WAITS[name](x)
    assert operators.host_syncs >= 1


def test_work_on_the_device_is_no_wait() -> None:
    x, i = torch.randn(5, 5, requires_grad=True), torch.tensor([1, 2])
    with Operators() as operators:
        torch.where(x > 0, x, 0.0)[i].topk(2).values.sort().values.sum().backward()
    assert operators.host_syncs == 0
    assert operators.count > 5


def test_forward_and_backward_are_counted() -> None:
    x = torch.randn(3, requires_grad=True)
    with Operators() as forward:
        y = x.sin().sum()
    with Operators() as backward:
        y.backward()
    assert forward.count == 2
    assert backward.count >= 2
