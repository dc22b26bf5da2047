"""Ranks that share each sequence: the losses of one over ten steps, and checkpoints that go on under any number."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from nsa.train import checkpoint
from nsa.train.distributed import Ranks
from tests.nsa.train import runs
from tests.nsa.train.runs import settings, train

STEADY = ("--set", "train.lr_schedule=constant", "--set", "train.val_every=5")
SHARED = ("--set", "runtime.context_parallel=2")
_PATIENCE_S = 900.0


def _run(folder: Path, *arguments: str, ranks: int) -> str:
    child = runs.start(folder, *arguments, ranks=ranks)
    output, _ = child.communicate(timeout=_PATIENCE_S)
    assert child.returncode == 0, output
    return output


def test_two_ranks_share_sequences_and_have_the_losses_of_one(tmp_path: Path) -> None:
    """Under FSDP2, from a checkpoint of one; theirs goes on in one, which ends where a run of one alone does."""
    alone, shared = tmp_path / "alone", tmp_path / "shared"
    alone.mkdir()
    shared.mkdir()
    steady = {"train__lr_schedule": "constant", "train__val_every": 5}
    train(settings(alone, **steady, train__steps=12))
    train(settings(shared, **steady, train__steps=3))
    _run(shared, *STEADY, *SHARED, "--resume", "--steps", "10", "--parallel", "fsdp2", ranks=2)
    train(settings(shared, **steady, train__steps=12), resume=True)
    one, two = runs.losses(alone / "run"), runs.losses(shared / "run")
    assert sorted(two) == list(range(1, 13))
    assert [two[step] for step in sorted(two)] == pytest.approx([one[step] for step in sorted(one)], rel=2e-5)
    states = [checkpoint.newest_intact(folder / "run" / "checkpoints") for folder in (alone, shared)]
    assert states[0] is not None
    assert states[1] is not None
    assert states[0].state["tokens_seen"] == states[1].state["tokens_seen"]
    ten = checkpoint.load(shared / "run" / "checkpoints" / "step-00000010.ckpt")
    assert len(ten["ranks"]) == 1  # both read the same data
    observed = [x for x in runs.records(shared / "run") if "keys_read" in x and x["step"] <= 10]
    assert observed
    for record in observed:  # a rank's own, predicted from where they stand
        assert record["keys_read"] == record["keys_predicted"]


def test_four_ranks_of_two_by_two(tmp_path: Path) -> None:
    """Two read each batch's half, and pairs of them share its sequences, under DDP."""
    one, four = tmp_path / "one", tmp_path / "four"
    one.mkdir()
    four.mkdir()
    train(settings(one, train__lr_schedule="constant", train__steps=3))
    _run(four, *STEADY, *SHARED, "--steps", "3", "--parallel", "ddp", ranks=4)
    losses = [runs.losses(folder / "run") for folder in (one, four)]
    assert [losses[1][step] for step in (1, 2, 3)] == pytest.approx([losses[0][step] for step in (1, 2, 3)], rel=2e-5)


def test_a_lost_rank_ends_those_that_share_with_it(tmp_path: Path) -> None:
    from tests.nsa.train.test_distributed import LONG, _child_of

    launcher = runs.start(tmp_path, *LONG, *SHARED, ranks=2)
    end = time.monotonic() + _PATIENCE_S
    while max(runs.losses(tmp_path / "run"), default=0) < 2:
        assert time.monotonic() < end
        assert launcher.poll() is None
        time.sleep(0.02)
    os.kill(_child_of(launcher.pid, 1), signal.SIGKILL)
    output, _ = launcher.communicate(timeout=_PATIENCE_S)
    assert launcher.returncode != 0
    stopped = [record["why"] for record in runs.records(tmp_path / "run") if record.get("event") == "stopped"]
    assert stopped, output
    assert "rank 0 of 2 lost another rank in step" in stopped[0]


def test_settings_that_cannot_be_shared(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"runtime\.context_parallel must divide the 3 ranks; got 2"):
        Ranks(0, 3, 0, 2)
    with pytest.raises(ValueError, match=r"runtime\.context_parallel must be 1 with model\.attention dense; got 2"):
        settings(tmp_path, runtime__context_parallel=2, model__attention="dense")
    with pytest.raises(ValueError, match=r"train\.seq_len must be a multiple of runtime\.context_parallel, 5"):
        settings(tmp_path, runtime__context_parallel=5, data__packing=False)
    with pytest.raises(ValueError, match=r"runtime\.context_parallel must be at least 1; got 0"):
        settings(tmp_path, runtime__context_parallel=0)
    assert [(Ranks(r, 4, r, 2).data_rank, Ranks(r, 4, r, 2).data_ranks) for r in range(4)] == [(0, 2)] * 2 + [
        (1, 2)
    ] * 2
