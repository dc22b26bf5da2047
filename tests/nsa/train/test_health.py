"""The sentinels in a live run: each stops it, or is written down, on its fault, and a sound run hears nothing."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nsa.model import DecoderLM
from nsa.train import data
from nsa.train.__main__ import ALARMED, main
from nsa.train.health import LAWFUL_SKIPS, Health, StepMetrics, StoppedError
from nsa.train.objective import Objective
from nsa.train.trainer import Trainer
from tests.nsa.train import runs
from tests.nsa.train.runs import settings, train


def _spoil(monkeypatch: pytest.MonkeyPatch, after: int, change: Callable[[Objective, Tensor], Tensor]) -> None:
    """Change the loss from its call `after` on."""
    healthy, calls = Objective.forward, 0

    def forward(self: Objective, *given: Any) -> Tensor:
        nonlocal calls
        calls += 1
        loss = healthy(self, *given)
        return change(self, loss) if calls > after else loss

    monkeypatch.setattr(Objective, "forward", forward)


def test_a_step_that_the_scaler_skips_is_no_missing_gradient(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One gradient overflows, so that clipping makes 0 of all others: the next step says whether they are there."""
    healthy, calls = Trainer._update, 0

    def overflowing(self: Trainer) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == 1:
            next(p for p in self.lm.parameters() if p.grad is not None).grad.fill_(torch.inf)  # type: ignore[union-attr]
        return healthy(self)

    asked: list[int] = []
    gradients = Health.gradients
    monkeypatch.setattr(Trainer, "_update", overflowing)
    monkeypatch.setattr(Health, "gradients", lambda self, norms: asked.append(calls) or gradients(self, norms))
    train(settings(tmp_path, train__steps=3, runtime__precision="fp16"))
    assert asked == [2]
    assert "missing_gradients" not in _events(tmp_path / "run")


def _events(folder: Path) -> list[str]:
    return [record.get("sentinel", record["event"]) for record in runs.records(folder) if "event" in record]


def test_a_sound_run_hears_nothing(tmp_path: Path) -> None:
    assert train(settings(tmp_path, train__steps=12, train__val_every=5)).reason == "done"
    assert set(_events(tmp_path / "run")) == {"saved"}
    assert runs.record(tmp_path / "run" / "metrics.json")["alarms"] == {}


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_stops_the_run_and_is_never_saved(
    value: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _spoil(monkeypatch, 4, lambda self, loss: loss * value)
    with pytest.raises(StoppedError, match="step 5: non_finite: NaN or infinity in loss, grad_norm"):
        train(settings(tmp_path))
    run = tmp_path / "run"
    assert _events(run) == ["saved", "non_finite", "stopped"]
    assert [path.name for path in (run / "checkpoints").glob("step-*")] == ["step-00000003.ckpt"]
    assert runs.record(run / "metrics.json")["state"].startswith("StoppedError")


def test_an_alarm_has_its_own_exit_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _spoil(monkeypatch, 1, lambda self, loss: loss * math.nan)
    assert main(runs.command(tmp_path)[3:]) == ALARMED


def test_a_loss_below_the_entropy_of_random_tokens_is_too_good(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Targets that are the inputs: no label shift."""
    healthy = data.pack

    def unshifted(*given: Any, **named: Any) -> data.Batch:
        made = healthy(*given, **named)
        return dataclasses.replace(made, targets=made.tokens.clone())

    monkeypatch.setattr(data, "pack", unshifted)
    with pytest.raises(StoppedError, match="too_good"):
        train(settings(tmp_path, train__steps=60, train__lr=1e-2, train__log_every=5))


def test_a_parameter_without_a_gradient_stops_the_first_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    healthy = DecoderLM.__init__

    def with_a_dead_end(self: DecoderLM, config: Any) -> None:
        healthy(self, config)
        self.norm.register_forward_hook(lambda module, given, out: out * 1.0 + 0.0 * out.detach())
        self.dead = torch.nn.Linear(2, 2)

    monkeypatch.setattr(DecoderLM, "__init__", with_a_dead_end)
    with pytest.raises(StoppedError, match=r"step 1: missing_gradients: no gradient reaches dead\.weight, dead\.bias"):
        train(settings(tmp_path))


def test_a_model_that_sees_the_future_is_stopped_before_its_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    healthy = DecoderLM.hidden
    monkeypatch.setattr(DecoderLM, "hidden", lambda *given, **named: healthy(*given, **named).roll(-1, 1))
    with pytest.raises(StoppedError, match="step 0: future_leak"):
        train(settings(tmp_path, train__val_every=5))


def test_throughput_and_memory_are_written_down(tmp_path: Path) -> None:
    health = Health(random_vocab_size=None, fp16=False, warmup_steps=0, fused_backend="torch")
    said = []
    for step in range(1, 261):
        speed, memory = (100.0 if step < 100 else 50.0) + step % 3, 100.0 + step
        assert health.step(StepMetrics(step, 1.0, 1.0, 10, speed, memory)) == []
        if step % 10 == 0:
            said += [(step, alarm.sentinel) for alarm in health.logged(None, step)]
    assert sorted(name for _, name in said) == ["memory_slope", "throughput_drift"]  # each said once
    assert min(step for step, _ in said) > 120  # seen at three logged steps


def test_a_busy_machine_comes_and_goes(tmp_path: Path) -> None:
    """Throughput that falls and returns, and a resident set that goes up and down."""
    health = Health(random_vocab_size=None, fp16=False, warmup_steps=0, fused_backend="torch")
    for step in range(1, 301):
        speed, memory = (100.0 if step % 100 < 75 else 40.0) + step % 3, 560.0 + 20 * math.sin(step / 30)
        health.step(StepMetrics(step, 1.0, 1.0, 10, speed, memory))
        if step % 10 == 0:
            assert health.logged(None, step) == []


def test_fp16_may_skip_while_its_scale_comes_down() -> None:
    health = Health(random_vocab_size=None, fp16=True, warmup_steps=0, fused_backend="torch")
    alarms = [health.step(StepMetrics(step, 1.0, math.inf, 10, None, None)) for step in range(LAWFUL_SKIPS + 2)]
    assert [bool(found) for found in alarms] == [False] * LAWFUL_SKIPS + [True, False]
    assert health.skipped == LAWFUL_SKIPS + 2
    fresh = Health(random_vocab_size=None, fp16=True, warmup_steps=0, fused_backend="torch")
    assert fresh.step(StepMetrics(1, math.nan, math.inf, 10, None, None))
