"""One optimiser step by its consequences: norms as float32 has them, weights that move by the learning rate."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from nsa.loss import IGNORED
from nsa.train.data.loader import Shard, SyntheticBatches
from nsa.train.data.packing import Batch
from nsa.train.distributed import Ranks
from nsa.train.trainer import Trainer
from tests.nsa.train.runs import settings

CPU = torch.device("cpu")
ROWS = {"data__packing": False, "model__n_layers": 1}


def _trainer(folder: Path, **overrides: Any) -> Trainer:
    return Trainer(settings(folder, **{**ROWS, **overrides}), CPU, Ranks())


def _batches(trainer: Trainer, count: int = 1) -> list[Batch]:
    source = SyntheticBatches(trainer.settings, Shard())
    return [source.next() for _ in range(count)]


def _weights(trainer: Trainer) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in trainer.lm.parameters()])


def _gradients(trainer: Trainer) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in trainer.lm.parameters() if p.grad is not None])


@pytest.mark.parametrize("clip", [0.0, 0.01])
def test_the_scaler_of_fp16_is_in_no_norm_and_no_gradient(clip: float, tmp_path: Path) -> None:
    """It multiplies the loss by 65,536; whoever clips or logs before it is taken out is as far off."""
    found = {}
    for precision in ("fp32", "fp16"):
        trainer = _trainer(tmp_path, runtime__precision=precision, train__grad_clip=clip)
        stepped = trainer.step(_batches(trainer))
        found[precision] = float(stepped.grad_norm), _gradients(trainer)
    (norm, gradients), (low_norm, low_gradients) = found["fp32"], found["fp16"]
    assert norm > 0.05
    assert low_norm == pytest.approx(norm, rel=0.05)
    assert (low_gradients - gradients).norm() < 0.1 * gradients.norm()
    if clip:
        assert float(low_gradients.norm()) == pytest.approx(clip, rel=0.01)


def test_a_step_that_overflows_changes_no_weight_and_halves_the_scale(tmp_path: Path) -> None:
    trainer = _trainer(tmp_path, runtime__precision="fp16")
    hook = next(trainer.lm.parameters()).register_hook(lambda grad: torch.full_like(grad, torch.inf))
    scale, before = trainer.scaler.get_scale(), _weights(trainer)
    stepped = trainer.step(_batches(trainer))
    assert not stepped.grad_norm.isfinite()
    assert torch.equal(_weights(trainer), before)
    assert trainer.scaler.get_scale() == scale / 2
    hook.remove()
    trainer.step(_batches(trainer))
    assert not torch.equal(_weights(trainer), before)


def test_weights_move_by_the_learning_rate_of_their_step(tmp_path: Path) -> None:
    """AdamW's first step moves each weight by its learning rate, whatever the gradient; here it warms up."""
    trainer = _trainer(tmp_path, train__lr=1e-2, train__warmup_steps=10, train__weight_decay=0.0)
    before = _weights(trainer)
    stepped = trainer.step(_batches(trainer))
    moved = (_weights(trainer) - before).abs()
    assert float(moved.max()) == pytest.approx(1e-3, rel=0.01)
    assert stepped.lr == pytest.approx(1e-3)
    assert trainer.step(_batches(trainer)).lr == pytest.approx(2e-3)


def test_weights_decay_and_biases_do_not(tmp_path: Path) -> None:
    """By the steps of two trainers that differ in the decay alone."""
    after = {}
    for decay in (0.0, 0.5):
        trainer = _trainer(tmp_path, train__weight_decay=decay, train__lr=1e-2)
        before = {name: p.detach().clone() for name, p in trainer.lm.named_parameters()}
        trainer.step(_batches(trainer))
        after[decay] = dict(trainer.lm.named_parameters())
    for name, weight in before.items():
        shrunk = after[0.0][name] - after[0.5][name]
        wanted = 1e-2 * 0.5 * weight if weight.dim() >= 2 else torch.zeros_like(weight)
        assert torch.allclose(shrunk, wanted, atol=1e-6), name


def test_a_step_knows_nothing_of_the_gradients_before_it(tmp_path: Path) -> None:
    trainer, fresh = (_trainer(tmp_path, train__grad_clip=0.0) for _ in range(2))
    first, second = _batches(trainer, 2)
    trainer.step([first])
    fresh.lm.load_state_dict(trainer.lm.state_dict())
    norms = [float(each.step([second]).grad_norm) for each in (trainer, fresh)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)


def _with_targets(batch: Batch, kept: int) -> Batch:
    """The same tokens, of which only so many have a target."""
    targets = torch.full_like(batch.targets, IGNORED)
    targets[0, :kept] = batch.targets[0, :kept]
    return dataclasses.replace(batch, targets=targets, num_targets=kept)


def test_a_validation_is_the_mean_over_targets_and_leaves_no_trace(tmp_path: Path) -> None:
    """Also of batches that have unequally many."""
    trainer = _trainer(tmp_path)
    first, second = _batches(trainer, 2)
    few, many = _with_targets(first, 5), _with_targets(second, 40)
    each = [trainer.validate([batch]) for batch in (few, many)]
    assert trainer.validate([few, many]) == pytest.approx((5 * each[0] + 40 * each[1]) / 45, rel=1e-5)
    assert trainer.lm.training
    assert all(p.grad is None for p in trainer.lm.parameters())
    assert trainer.done == 0


def test_the_loss_of_a_step_is_the_mean_over_targets(tmp_path: Path) -> None:
    trainer, other = (_trainer(tmp_path) for _ in range(2))
    first, second = _batches(trainer, 2)
    parts = [_with_targets(first, 5), _with_targets(second, 40)]
    stepped = trainer.step(parts)
    assert float(stepped.loss) == pytest.approx(other.validate(parts), rel=1e-5)
    assert float(stepped.targets) == 45
