"""A graph for each of two GPUs under DDP: the losses of the run without graphs, and a resume of it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.nsa.train import runs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.device_count() < 2, reason="needs two GPUs of one host"
    ),
]
_PATIENCE_S = 300.0
RUN = (
    *("--parallel", "ddp", "--set", "runtime.device=cuda", "--set", "runtime.precision=bf16"),
    *("--set", "model.d_k=32", "--set", "model.d_v=32", "--set", "train.lr_schedule=constant"),
    *("--set", "train.accumulate_grad_batches=2", "--set", "train.val_every=4"),
)


def _run(folder: Path, *arguments: str) -> None:
    child = runs.start(folder, *RUN, *arguments, ranks=2)
    output, _ = child.communicate(timeout=_PATIENCE_S)
    assert child.returncode == 0, output


def test_two_graphs_train_as_ddp_does(tmp_path: Path) -> None:
    """Observed steps, a validation and a resume among them."""
    plain, graphed = tmp_path / "plain", tmp_path / "graphed"
    plain.mkdir()
    graphed.mkdir()
    _run(plain)
    _run(graphed, "--set", "runtime.cuda_graph=true", "--steps", "5")
    _run(graphed, "--set", "runtime.cuda_graph=true", "--resume")
    one, other = runs.losses(plain / "run"), runs.losses(graphed / "run")
    assert sorted(other) == list(range(1, 9))
    assert [other[step] for step in sorted(other)] == pytest.approx([one[step] for step in sorted(one)], rel=2e-4)
    beats = {beat["step"]: beat for beat in runs.records(graphed / "run") if "loss" in beat}
    assert all((beat["forward_ms"] is None) == ("keys_read" not in beat) for beat in beats.values())
    assert any(beat["forward_ms"] is None for beat in beats.values())
