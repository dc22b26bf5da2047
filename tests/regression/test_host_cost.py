"""What a layer costs the host is bounded by a constant: one operator per token is seen, and both halves must fire."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor

from nsa import layer, nsa_attention
from regression import step5_stall
from regression.verdict import Verdict, verdict
from tests.regression.test_attention_incidents import Quiet

QUIET = Quiet(("reference", "torch"), "cpu")


def _per_token(q: Tensor, *tensors: Any, **more: Any) -> Tensor:
    """A fault of one operator per token that asks the host for nothing."""
    for t in range(q.shape[1]):
        q[:, t] + 1
    return nsa_attention(q, *tensors, **more)


@pytest.mark.parametrize(
    ("fault", "expected"), [(nsa_attention, Verdict.WRONG), (_per_token, Verdict.WRONG), (None, Verdict.SLOW)]
)
def test_step5_stall_fires_by_its_operators_and_by_its_host_syncs(
    fault: Callable[..., Tensor] | None, expected: Verdict, monkeypatch: pytest.MonkeyPatch
) -> None:
    if fault is not None:
        monkeypatch.setattr(step5_stall, "token_by_token", fault)
    assert verdict(step5_stall.faulty(QUIET)) is expected


def test_one_operator_per_token_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer, "nsa_attention", _per_token)
    assert verdict(step5_stall.product(QUIET)) is Verdict.SLOW
