"""What a resume brings back: every figure of a run that was left alone, not the loss alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from nsa.train import checkpoint, run_folder
from nsa.train.data.loader import Shard, SyntheticBatches
from nsa.train.distributed import Ranks
from nsa.train.trainer import Trainer
from tests.nsa.train import runs
from tests.nsa.train.runs import settings, train

CPU = torch.device("cpu")
FIGURES = ("step", "loss", "lr", "grad_norm", "tokens_seen")


def _figures(folder: Path) -> dict[int, dict[str, Any]]:
    """By step, of a step that was taken twice the last."""
    beats = [record for record in runs.records(folder) if "loss" in record]
    return {beat["step"]: {name: beat[name] for name in FIGURES} for beat in beats}


def test_a_resumed_run_has_the_figures_of_one_left_alone(tmp_path: Path) -> None:
    """Learning rate, norms and tokens too; the first attempt is a kill's: its schedule is that of the whole run."""
    alone, ended = tmp_path / "alone", tmp_path / "ended"
    for folder in (alone, ended):
        folder.mkdir()
    rows = {"data__packing": False, "train__warmup_steps": 4}
    train(settings(alone, **rows))
    train(settings(ended, **rows))
    for step in (7, 8):  # all that a kill after step 6 leaves behind
        (ended / "run" / "checkpoints" / f"step-{step:08}.ckpt").unlink(missing_ok=True)
    train(settings(ended, **rows), resume=True)
    attempts = [record["attempt"] for record in runs.records(ended / "run") if "loss" in record]
    assert attempts == [1] * 8 + [2] * 2
    assert _figures(ended / "run") == _figures(alone / "run")
    metrics = [runs.record(folder / "run" / "metrics.json")["tokens_seen"] for folder in (alone, ended)]
    assert metrics[0] == metrics[1] == 8 * 2 * 47


def test_a_run_of_an_earlier_version_goes_on_counting_its_attempts(tmp_path: Path) -> None:
    """They stood in lives.jsonl."""
    train(settings(tmp_path, train__steps=2))
    (tmp_path / "run" / "attempts.jsonl").rename(tmp_path / "run" / "lives.jsonl")
    train(settings(tmp_path, train__steps=2), resume=True)
    assert run_folder.read_run(tmp_path / "run").attempts == 2
    assert not (tmp_path / "run" / "attempts.jsonl").exists()


@pytest.mark.parametrize(("steps", "kept"), [(7, [3, 6, 7]), (6, [3, 6]), (8, [3, 6, 8]), (2, [2])])
def test_the_last_step_is_always_saved(steps: int, kept: list[int], tmp_path: Path) -> None:
    """Also one step after a periodic checkpoint, and no checkpoint is written twice."""
    train(settings(tmp_path, data__packing=False, train__steps=steps))
    folder = tmp_path / "run" / "checkpoints"
    assert sorted(int(path.stem[5:]) for path in folder.glob("step-*")) == kept
    newest = checkpoint.newest_intact(folder)
    assert newest is not None
    assert newest.state["step"] == steps
    assert newest.state["tokens_seen"] == steps * 2 * 47
    saved = [record["step"] for record in runs.records(tmp_path / "run") if record.get("event") == "saved"]
    assert saved == kept


def _stepped(folder: Path, seed: int, **overrides: Any) -> Trainer:
    trainer = Trainer(settings(folder, train__seed=seed, data__packing=False, **overrides), CPU, Ranks())
    trainer.step([SyntheticBatches(trainer.settings, Shard()).next()])
    return trainer


def test_the_scaler_comes_back(tmp_path: Path) -> None:
    """Its scale, which took steps to find, and how long it has stood."""
    first, second = (_stepped(tmp_path, seed, runtime__precision="fp16") for seed in (0, 1))
    hook = next(first.lm.parameters()).register_hook(lambda grad: torch.full_like(grad, torch.inf))
    batch = SyntheticBatches(first.settings, Shard()).next()
    first.step([batch])
    hook.remove()
    first.step([batch])
    second.restore(first.state({}))
    assert second.scaler.get_scale() == first.scaler.get_scale() == 2.0**15
    assert second.scaler.state_dict() == first.scaler.state_dict()


def test_random_numbers_and_counts_come_back(tmp_path: Path) -> None:
    first = _stepped(tmp_path, 0)
    first.tokens_seen = 94
    kept = first.state({"source": "synthetic", "at": 1})
    drawn = torch.rand(4)
    second = _stepped(tmp_path, 1)
    assert second.restore(kept) == {"source": "synthetic", "at": 1}
    assert torch.equal(torch.rand(4), drawn)
    assert (second.done, second.tokens_seen) == (1, 94)
