"""The incidents judge by the monitors that a training run uses: one that is silent is not caught."""

from __future__ import annotations

from types import ModuleType

import pytest

from nsa.train.monitoring import monitors
from regression.contract import aspects
from regression.incidents import no_label_shift, slow_drift
from tests.regression.test_attention_incidents import SilentStep


@pytest.mark.filterwarnings("ignore:std")  # of a single tensor, in the faulty variant's first step
@pytest.mark.parametrize(
    ("incident", "sentinel", "aspect"),
    [
        (no_label_shift, "too_good", "loss_nats"),
        (slow_drift, "memory_slope", "memory"),
        (slow_drift, "throughput_drift", "slowdown"),
    ],
)
def test_a_silent_sentinel_is_not_caught(
    incident: ModuleType, sentinel: str, aspect: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(monitors, sentinel, lambda *figures, **limits: None)
    judged = {found.name: found.verdict.value for found in aspects(incident.faulty(SilentStep(("torch",), "cpu")))}
    assert judged.get(aspect, "PASSED") == "PASSED"
