"""The monitors of a live run again and again: what begins late is seen too."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from nsa.layer import NativeSparseAttention
from nsa.model import DecoderLM
from nsa.train import health, monitors
from nsa.train.attention_stats import AttentionStats
from nsa.train.health import Health, StepMetrics, StoppedError
from nsa.train.trainer import Trainer
from tests.nsa.train import runs
from tests.nsa.train.runs import settings, train

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
    assert [alarm.sentinel for alarm in watch.logged(None, before + after)] == ["too_good"]


def test_a_leak_too_small_for_one_window_is_seen_in_the_whole_run() -> None:
    watch = Health(random_vocab_size=VOCAB_SIZE, fp16=False, warmup_steps=0, fused_backend="torch")
    said = []
    for step in range(1, 101):
        watch.step(StepMetrics(step, math.log(VOCAB_SIZE) - 0.05, 1.0, 10, None, None))
        if step % 10 == 0:  # 100 targets allow 0.14 nats, 1000 allow 0.014
            said += [(step, alarm.sentinel) for alarm in watch.logged(None, step)]
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
    from nsa.train.attention_stats import AttentionObserver

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
