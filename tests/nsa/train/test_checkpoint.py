"""Checkpoints: what was saved comes back, a changed byte is refused by name, latest.ckpt never leads to less."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from nsa.train import checkpoint
from nsa.train.checkpoint import DamagedCheckpointError

STATE: dict[str, Any] = {"step": 3, "weights": torch.arange(1000.0), "nested": {"lr": [1e-3, None]}}


def test_comes_back_bit_for_bit(tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path / "new folder", 3, STATE)
    loaded = checkpoint.load(path)
    assert torch.equal(loaded.pop("weights"), STATE["weights"])
    assert loaded == {"step": 3, "nested": {"lr": [1e-3, None]}}


def test_latest_is_the_last_one_saved(tmp_path: Path) -> None:
    assert checkpoint.latest(tmp_path) is None
    first = checkpoint.save(tmp_path, 3, STATE)
    assert checkpoint.latest(tmp_path) == first.resolve()
    second = checkpoint.save(tmp_path, 6, STATE)
    assert checkpoint.latest(tmp_path) == second.resolve()
    assert sorted(path.name for path in tmp_path.iterdir()) == [checkpoint.LATEST, first.name, second.name]


@pytest.mark.parametrize("place", ["cut", "first", "middle", "last", "empty"])
def test_damage_is_refused_by_name(place: str, tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path, 3, STATE)
    whole = bytearray(path.read_bytes())
    if place in ("cut", "empty"):
        whole = whole[: len(whole) // 2 if place == "cut" else 0]
    else:
        whole[{"first": 0, "middle": len(whole) // 2, "last": -1}[place]] ^= 1
    path.write_bytes(whole)
    with pytest.raises(DamagedCheckpointError, match=path.name):
        checkpoint.load(path)


@pytest.mark.parametrize(("call", "which"), [("fsync", 0), ("fsync", 1), ("fsync", 2), ("replace", 0), ("replace", 1)])
def test_dying_anywhere_in_a_save_leaves_the_one_before(
    call: str, which: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An exception at the n-th fsync or rename: whatever did not happen then did not happen in a kill either."""
    before = checkpoint.save(tmp_path, 3, STATE)
    healthy, calls = getattr(os, call), 0

    def dies(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > which:
            raise KeyboardInterrupt
        return healthy(*arguments)

    monkeypatch.setattr(os, call, dies)
    with pytest.raises(KeyboardInterrupt):
        checkpoint.save(tmp_path, 6, STATE)
    newest = checkpoint.latest(tmp_path)
    assert newest is not None
    last_sync_only = (call, which) == ("fsync", 2)  # the link has moved by then, to a whole file
    assert newest.name == ("step-00000006.ckpt" if last_sync_only else before.name)
    checkpoint.load(newest)


def test_only_the_newest_stay(tmp_path: Path) -> None:
    for name in (".step-00000001.ckpt-of-a-kill.new", ".link-of-a-kill", ".partial-of-a-kill"):
        (tmp_path / name).touch()
    for step in range(1, 6):
        checkpoint.save(tmp_path, step, STATE, keep=2)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == [checkpoint.LATEST, "step-00000004.ckpt", "step-00000005.ckpt"]


def test_the_newest_whole_one_is_found_behind_damaged_ones(tmp_path: Path) -> None:
    assert checkpoint.newest_intact(tmp_path) is None
    paths = [checkpoint.save(tmp_path, step, {**STATE, "step": step}) for step in (3, 6, 9)]
    paths[2].write_bytes(paths[2].read_bytes()[:-1])
    found = checkpoint.newest_intact(tmp_path)
    assert found is not None
    assert (found.path, found.state["step"]) == (paths[1], 6)
    assert paths[2].name in found.refused[0]
    for path in paths:
        path.write_bytes(b"")
    with pytest.raises(DamagedCheckpointError, match=r"no checkpoint is whole: .*step-00000009.*step-00000003"):
        checkpoint.newest_intact(tmp_path)


def test_what_was_given_up_does_not_push_out_what_is_used(tmp_path: Path) -> None:
    """A run that goes on from step 3, with damaged checkpoints of steps 6 and 9 beside it."""
    for step in (3, 6, 9):
        checkpoint.save(tmp_path, step, STATE)
    checkpoint.save(tmp_path, 4, STATE, keep=2)
    assert {path.name for path in tmp_path.glob("step-*")} >= {"step-00000003.ckpt", "step-00000004.ckpt"}
    assert checkpoint.latest(tmp_path) == (tmp_path / "step-00000004.ckpt").resolve()
