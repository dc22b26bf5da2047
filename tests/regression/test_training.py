"""The smallest training loop: its loss, its precisions, what a resume needs, and that preflight is asked first."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest
import torch

from nsa.train.preflight import RefusedError
from regression import training
from regression.training import Run, Trainer

RUN = Run(steps=6, save_every=2)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_trains_in_every_precision_with_float32_weights(precision: str) -> None:
    trainer = Trainer(dataclasses.replace(RUN, precision=precision))
    losses = [trainer.step() for _ in range(4)]
    assert all(abs(loss - math.log(16)) < 0.2 for loss in losses)  # random tokens: near their entropy from the start
    assert {p.dtype for p in trainer.model.parameters()} == {torch.float32}


def _spoilt(trainer: Trainer, value: float) -> None:
    """Every gradient of one weight is `value`."""
    next(trainer.model.parameters()).register_hook(lambda grad: torch.full_like(grad, value))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_steps_that_the_scaler_skips_forever_are_seen(value: float) -> None:
    """Nothing else shows it: the loss and the weights stay finite, and nothing is learnt."""
    trainer = Trainer(dataclasses.replace(RUN, precision="fp16"))
    _spoilt(trainer, value)
    alarms = [trainer.non_finite(trainer.step()) for _ in range(training.LAWFUL_SKIPS + 2)]
    assert [alarm is not None for alarm in alarms] == [False] * training.LAWFUL_SKIPS + [True] * 2
    assert trainer.skipped == trainer.done
    assert all(parameter.isfinite().all() for parameter in trainer.model.parameters())


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_gradients_that_are_not_finite_are_seen_at_once_without_a_scaler(precision: str) -> None:
    trainer = Trainer(dataclasses.replace(RUN, precision=precision))
    _spoilt(trainer, math.inf)
    alarm = trainer.non_finite(trainer.step())
    assert alarm is not None
    assert "grad_norm" in alarm.why


def test_a_sound_fp16_run_skips_next_to_nothing() -> None:
    trainer = Trainer(dataclasses.replace(RUN, precision="fp16"))
    assert [trainer.non_finite(trainer.step()) for _ in range(8)] == [None] * 8
    assert trainer.skipped < training.LAWFUL_SKIPS
    assert trainer.grad_norm is not None
    assert 0 < trainer.grad_norm < 10


def test_learns_what_can_be_learnt() -> None:
    trainer = Trainer(dataclasses.replace(RUN, lr=1e-2))
    tokens = trainer.batch()
    trainer.batch = lambda: tokens  # type: ignore[method-assign]
    losses = [trainer.step() for _ in range(40)]
    assert losses[-1] < losses[0] / 2


def test_resumes_with_the_same_bits(tmp_path: Path) -> None:
    alone = list(training.train(RUN))
    assert list(training.train(dataclasses.replace(RUN, steps=5), tmp_path)) == alone[:5]
    assert list(training.train(RUN, tmp_path)) == alone[4:]  # from the checkpoint of step 4
    assert list(training.train(RUN, tmp_path)) == []


@pytest.mark.parametrize("forgotten", ["model", "optimizer", "data_rng"])
def test_a_resume_needs_each_part(forgotten: str) -> None:
    first, second = Trainer(RUN), Trainer(dataclasses.replace(RUN, seed=1))
    first.step()
    first.step()
    second.restore({**first.state(), forgotten: second.state()[forgotten]})
    assert [first.step(), first.step()] != [second.step(), second.step()]


def test_a_refused_run_makes_no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "Trainer", lambda run: pytest.fail("a model was made"))
    with pytest.raises(RefusedError, match=r"train\.save_every"):
        next(training.train(dataclasses.replace(RUN, steps=5000, save_every=0)))
