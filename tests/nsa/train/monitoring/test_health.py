"""The monitors in a live run: each stops it, or is written down, on its fault, and a sound run hears nothing."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nsa.layer import NativeSparseAttention
from nsa.model import DecoderLM
from nsa.train.__main__ import ALARMED, main
from nsa.train.data import packing
from nsa.train.monitoring import health, monitors
from nsa.train.monitoring.attention_stats import AttentionStats
from nsa.train.monitoring.health import LAWFUL_SKIPS, Health, StepMetrics, StoppedError
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
    healthy = packing.pack

    def unshifted(*given: Any, **named: Any) -> packing.Batch:
        made = healthy(*given, **named)
        return dataclasses.replace(made, targets=made.tokens.clone())

    monkeypatch.setattr(packing, "pack", unshifted)
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
            said += [(step, alarm.monitor) for alarm in health.logged(None, step)]
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


ROWS = {"data__packing": False, "model__n_layers": 1}
VOCAB_SIZE = 256


def _healthy(step: int, loss: float) -> StepMetrics:
    return StepMetrics(step, loss, 1.0, 1000, None, None)


@pytest.mark.parametrize(("before", "after"), [(500, 10), (10, 10)])
def test_a_loss_that_becomes_too_good_late_is_seen_at_the_next_logged_step(before: int, after: int) -> None:
    """The mean of the whole run would hide it for as long again."""
    watch = Health(random_vocab_size=VOCAB_SIZE, fp16=False, warmup_steps=0, fused_backend="torch")
    entropy = math.log(VOCAB_SIZE)
    for step in range(1, before + 1):
        watch.step(_healthy(step, entropy + 0.05))
        if step % 10 == 0:
            assert watch.logged(None, step) == []
    for step in range(before + 1, before + after + 1):
        watch.step(_healthy(step, entropy - 0.02))
    assert [alarm.monitor for alarm in watch.logged(None, before + after)] == ["too_good"]


def test_a_leak_too_small_for_one_window_is_seen_in_the_whole_run() -> None:
    watch = Health(random_vocab_size=VOCAB_SIZE, fp16=False, warmup_steps=0, fused_backend="torch")
    said = []
    for step in range(1, 101):
        watch.step(StepMetrics(step, math.log(VOCAB_SIZE) - 0.05, 1.0, 10, None, None))
        if step % 10 == 0:  # 100 targets allow 0.14 nats, 1000 allow 0.014
            said += [(step, alarm.monitor) for alarm in watch.logged(None, step)]
    assert [name for _, name in said] == ["too_good"]
    assert 20 <= said[0][0] <= 40


def test_a_leak_that_begins_during_the_run_is_found_by_the_next_validation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    healthy, step = DecoderLM.hidden, Trainer.step
    steps = 0

    def counted(self: Trainer, *given: Any, **named: Any) -> Any:
        nonlocal steps
        steps += 1
        return step(self, *given, **named)

    def leaking(self: DecoderLM, *given: Any, **named: Any) -> Any:
        found = healthy(self, *given, **named)
        return found + found.roll(-1, 1).flip(-1) if steps >= 2 else found  # of no use to the loss

    monkeypatch.setattr(Trainer, "step", counted)
    monkeypatch.setattr(DecoderLM, "hidden", leaking)
    with pytest.raises(StoppedError, match="step 4: future_leak"):
        train(settings(tmp_path, **ROWS, train__val_every=4))


@pytest.mark.parametrize("sentinel", ["keys_read", "selection_at_maximum"])
def test_a_selection_that_goes_wrong_late_stops_the_run(
    sentinel: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Statistics are asked at every logged step, and what they say of keys and blocks ends the run."""
    from nsa.train.monitoring.attention_stats import AttentionObserver

    healthy, calls = AttentionObserver.read, 0
    spoilt: dict[str, dict[str, Any]] = {
        "keys_read": {"keys_read": {"compressed": 1, "selected": 1, "window": 1}},
        "selection_at_maximum": {"at_maximum": 0.1, "at_maximum_expected": 0.9},
    }

    def read(self: AttentionObserver, figures: Any) -> AttentionStats:
        nonlocal calls
        calls += 1
        found = healthy(self, figures)
        return found if calls < 3 else AttentionStats(**{**vars(found), **spoilt[sentinel]})

    monkeypatch.setattr(AttentionObserver, "read", read)
    with pytest.raises(StoppedError, match=f"step 4: {sentinel}"):
        train(settings(tmp_path, **ROWS))


def test_what_a_validation_or_a_checkpoint_takes_is_no_part_of_a_step(tmp_path: Path) -> None:
    train(settings(tmp_path, **ROWS, train__val_every=4, train__save_every=6))
    beats = {record["step"]: record for record in runs.records(tmp_path / "run") if "loss" in record}
    unknown = [step for step, beat in beats.items() if beat["tokens_per_s"] is None]
    assert unknown == [1, 5, 7]
    for beat in beats.values():
        if beat["step_ms"] is not None:
            assert beat["tokens_per_s"] == pytest.approx(2 * 48 / beat["step_ms"] * 1000)


def test_every_alarm_is_written_with_its_step_and_in_the_summary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that stops nothing, too."""
    alarm = monitors.Alarm("throughput_drift", "fell by half")
    monkeypatch.setattr(health, "throughput", lambda series: alarm)
    monkeypatch.setattr(health, "IN_A_ROW", 2)
    assert train(settings(tmp_path, **ROWS)).reason == "done"
    events = [record for record in runs.records(tmp_path / "run") if record.get("event") == "alarm"]
    assert [(event["sentinel"], event["step"]) for event in events] == [("throughput_drift", 2)]
    assert runs.record(tmp_path / "run" / "metrics.json")["alarms"] == {"throughput_drift": "fell by half"}


def test_non_finite_steps_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An fp16 run may skip some; its summary says how many."""
    healthy, calls = Trainer._update, 0

    def overflowing(self: Trainer) -> Any:
        nonlocal calls
        calls += 1
        if calls in (2, 3):
            next(p for p in self.lm.parameters() if p.grad is not None).grad.fill_(math.inf)  # type: ignore[union-attr]
        return healthy(self)

    monkeypatch.setattr(Trainer, "_update", overflowing)
    train(settings(tmp_path, **ROWS, runtime__precision="fp16", train__steps=4))
    metrics = runs.record(tmp_path / "run" / "metrics.json")
    assert (metrics["skipped_steps"], metrics["non_finite_steps"]) == (2, 2)


def test_a_model_whose_layers_fall_back_is_counted_at_logged_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    healthy = NativeSparseAttention.__init__

    def on_the_reference(self: NativeSparseAttention, *given: Any, **named: Any) -> None:
        healthy(self, *given, **{**named, "backend": "reference"})

    monkeypatch.setattr(NativeSparseAttention, "__init__", on_the_reference)
    train(settings(tmp_path, **ROWS, train__steps=2, train__seq_len=16))
    logged = [record for record in runs.records(tmp_path / "run") if "fallbacks" in record]
    assert [record["fallbacks"] for record in logged] == [1, 1]
    assert "fallbacks" in runs.record(tmp_path / "run" / "metrics.json")["alarms"]
