"""Whole runs: every artefact, and whatever ends one before its time, the next goes on with the same bits."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from nsa.io import read_json_lines
from nsa.train import checkpoint, report, run_folder
from nsa.train.__main__ import main
from nsa.train.checkpoint import DamagedCheckpointError
from nsa.train.monitoring.watchdog import EXIT_STALLED
from nsa.train.preflight import RefusedError
from nsa.train.run_folder import InUseError, Table
from tests.nsa.train import runs
from tests.nsa.train.runs import settings, train

SAVE_EVERY = 4
_PATIENCE_S = 60.0


def _text(folder: Path) -> dict[str, Any]:
    """Overrides for a run on documents of its own."""
    path = folder / "text.jsonl"
    words = random.Random(0)
    lines = [{"text": " ".join(words.choices(["native", "sparse", "attention"], k=40))} for _ in range(40)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return {"data__dataset": "files", "data__path": str(path), "train__save_every": SAVE_EVERY}


def _arguments(overrides: dict[str, Any]) -> list[str]:
    named = {name.replace("__", "."): value for name, value in overrides.items()}
    return [part for name, value in named.items() for part in ("--set", f"{name}={json.dumps(value)}")]


def _wait_for_step(child: subprocess.Popen[str], folder: Path, step: int) -> None:
    end = time.monotonic() + _PATIENCE_S
    while child.poll() is None and max(runs.losses(folder), default=0) < step:
        assert time.monotonic() < end, "no step came"
        time.sleep(0.005)


def _survives(kills: int, seed: int, folder: Path) -> None:
    """Kill a run so many times, let it end, and compare every loss with those of a run that was left alone."""
    chance = random.Random(seed)
    alone, killed = folder / "alone", folder / "killed"
    alone.mkdir()
    killed.mkdir()
    steps = SAVE_EVERY * (kills + 3) + 1
    overrides = {**_text(folder), "train__steps": steps, "data__packing": True}
    train(settings(alone, **overrides))
    expected = runs.losses(alone / "run")
    arguments = [*_arguments(overrides), "--resume"]
    before = 0
    for _ in range(kills):
        child = runs.start(killed, *arguments)
        _wait_for_step(child, killed / "run", before + chance.randint(1, SAVE_EVERY + 1))
        time.sleep(chance.uniform(0, 0.1))
        child.kill()
        child.communicate()
        reached = max(runs.losses(killed / "run"), default=0)
        found = checkpoint.newest_intact(killed / "run" / "checkpoints")
        kept = 0 if found is None else found.state["step"]
        assert found is None or found.refused == ()
        assert reached - kept <= SAVE_EVERY + 1  # a step of which the heartbeat was written, but not yet its checkpoint
        before = kept
    last = runs.start(killed, *arguments)
    output, _ = last.communicate(timeout=_PATIENCE_S)
    assert last.returncode == 0, output
    assert runs.losses(killed / "run") == expected
    assert sorted(expected) == list(range(1, steps + 1))
    tables = [[(row["step"], row["loss"]) for row in Table.rows(f / "run" / "training.csv")] for f in (alone, killed)]
    assert tables[0] == tables[1]


def test_a_run_that_is_killed_ends_with_the_same_bits(tmp_path: Path) -> None:
    _survives(2, seed=1, folder=tmp_path)


@pytest.mark.nightly
def test_a_run_that_is_killed_ten_times_ends_with_the_same_bits(tmp_path: Path) -> None:
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    _survives(10, seed=seed, folder=tmp_path)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_resumes_with_the_same_bits_in_every_precision(precision: str, tmp_path: Path) -> None:
    """What a kill leaves behind is what a shorter run leaves behind: a checkpoint of step 6."""
    whole, half = tmp_path / "whole", tmp_path / "half"
    for folder in (whole, half):
        folder.mkdir()
    chosen = {"runtime__precision": precision, "train__lr_schedule": "constant"}
    train(settings(whole, **chosen))
    train(settings(half, **chosen, train__steps=6))
    train(settings(half, **chosen), resume=True)
    assert runs.losses(half / "run") == runs.losses(whole / "run")


def test_sigterm_saves_and_ends(tmp_path: Path) -> None:
    child = runs.start(tmp_path, "--steps", "4000", "--set", "train.save_every=400", "--allow-toy")
    _wait_for_step(child, tmp_path / "run", 3)
    child.send_signal(signal.SIGTERM)
    output, _ = child.communicate(timeout=_PATIENCE_S)
    assert child.returncode == 143, output
    found = checkpoint.newest_intact(tmp_path / "run" / "checkpoints")
    assert found is not None
    assert found.state["step"] == max(runs.losses(tmp_path / "run"))
    assert "signal 15 after step" in output


STALL = """
import sys, time
from nsa.train import trainer
from nsa.train.__main__ import main
healthy = trainer.Trainer.step
def stalls(self, *given, **named):
    if self.done == 6:
        time.sleep(30)
    return healthy(self, *given, **named)
trainer.Trainer.step = stalls
sys.exit(main(sys.argv[1:]))
"""


def test_a_stall_ends_the_run_with_its_own_code_and_leaves_the_stacks(tmp_path: Path) -> None:
    arguments = [*runs.command(tmp_path)[3:], "--set", "telemetry.stall_floor_s=2"]
    variables = {**os.environ, "PYTHONPATH": str(runs.ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", STALL, *arguments],
        env=variables, capture_output=True, text=True, timeout=_PATIENCE_S, check=False,
    )  # fmt: skip
    run = tmp_path / "run"
    assert done.returncode == EXIT_STALLED, done.stderr
    assert "rank 0 stalled: no heartbeat for" in done.stderr
    assert "in stalls" in (run / "stacks_rank0.txt").read_text()
    assert runs.records(run)[-1]["event"] == "stalled"
    assert max(runs.losses(run)) == 6
    assert report.text(run).startswith("NO-GO")
    train(settings(tmp_path), resume=True)
    assert max(runs.losses(run)) == 8


@pytest.mark.parametrize("damage", ["half-written", "flipped"])
def test_a_damaged_checkpoint_is_refused_by_name_and_the_one_before_is_used(
    damage: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(settings(tmp_path))
    expected = runs.losses(tmp_path / "run")
    newest = checkpoint.latest(tmp_path / "run" / "checkpoints")
    assert newest is not None
    whole = bytearray(newest.read_bytes())
    if damage == "flipped":
        whole[len(whole) // 2] ^= 1
    newest.write_bytes(whole if damage == "flipped" else whole[: len(whole) // 2])
    capsys.readouterr()
    train(settings(tmp_path), resume=True)
    said = capsys.readouterr().out
    assert f"refused: {newest} is damaged" in said
    assert "resumed after step 6" in said
    assert runs.losses(tmp_path / "run") == expected
    assert f"{newest} is damaged" in list(read_json_lines(tmp_path / "run" / "attempts.jsonl"))[-1]["refused"][0]


def test_a_run_does_not_begin_anew_in_silence(tmp_path: Path) -> None:
    train(settings(tmp_path))
    for path in (tmp_path / "run" / "checkpoints").glob("step-*"):
        path.write_bytes(b"")
    with pytest.raises(DamagedCheckpointError, match="no checkpoint is whole"):
        train(settings(tmp_path), resume=True)


def test_leaves_every_artefact(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    chosen = settings(tmp_path, telemetry__tensorboard=True, train__val_every=4, train__keep_checkpoints=2)
    outcome = train(chosen)
    assert (outcome.reason, outcome.step) == ("done", 8)
    run = tmp_path / "run"
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == [
        "latest.ckpt", "step-00000006.ckpt", "step-00000008.ckpt",
    ]  # fmt: skip
    assert list((run / "tb").glob("events.out.tfevents.*"))
    assert [row["step"] for row in Table.rows(run / "training.csv")] == ["1", "2", "4", "6", "8"]
    assert [row["step"] for row in Table.rows(run / "val.csv")] == ["4", "8"]
    metrics, env = runs.record(run / "metrics.json"), runs.record(run / "env.json")
    assert (metrics["state"], metrics["step"], metrics["non_finite_steps"]) == ("done", 8, 0)
    assert env["parameters"] == metrics["parameters"]
    assert env["settings"]["train.out_dir"] == {"value": str(run), "origin": "command line"}
    assert env["data_source"] == "synthetic"
    beats = [record for record in runs.records(run) if "loss" in record]
    assert [beat["step"] for beat in beats] == list(range(1, 9))
    assert all(beat["rss_gib"] == pytest.approx(beat["rss_mib"] / 1024) for beat in beats)
    assert [beat["step"] for beat in beats if "keys_read" in beat] == [1, 2, 4, 6, 8]
    assert all(beat["fallbacks"] == 0 for beat in beats if "keys_read" in beat)
    targets = 2 * 48 - 4  # two rows of two documents, whose last tokens have no next one
    assert [beat["tokens_seen"] for beat in beats] == [targets * step for step in range(1, 9)]


def test_the_step_that_compiles_is_not_observed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is compiled with an observer in the middle would stay in pieces for the rest of the run."""
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self: None)
    train(settings(tmp_path, train__steps=3, train__log_every=1, runtime__compile=True))
    beats = [record for record in runs.records(tmp_path / "run") if "loss" in record]
    assert ["backends" in beat for beat in beats] == [False, True, True]


def test_what_is_switched_off_is_not_written(tmp_path: Path) -> None:
    train(settings(tmp_path, telemetry__csv=False, telemetry__statistics=False, train__steps=2))
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert not names & {"training.csv", "val.csv", "tb"}
    assert not any("keys_read" in record for record in runs.records(tmp_path / "run"))


def test_a_dense_model_runs_in_the_same_trainer(tmp_path: Path) -> None:
    assert train(settings(tmp_path, model__attention="dense")).reason == "done"


@pytest.mark.parametrize(
    ("overrides", "field"),
    [
        ({"train__steps": 5000}, "runtime.gradient_checkpointing"),
        ({"train__steps": 5000, "train__save_every": 0}, "train.save_every"),
        ({"runtime__precision": "fp16", "runtime__fp32_master_weights": False}, "runtime.fp32_master_weights"),
    ],
)
def test_preflight_stands_before_the_run(overrides: dict[str, Any], field: str, tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match=field.replace(".", r"\.")):
        train(settings(tmp_path, **overrides))
    assert not (tmp_path / "run" / "env.json").exists()


def test_what_was_overridden_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from nsa.train import preflight

    monkeypatch.setattr(preflight, "LONG_STEPS", 8)
    train(settings(tmp_path), allow_toy=True)
    overridden = runs.record(tmp_path / "run" / "env.json")["preflight"]["allow_toy"]
    assert any("train.save_every" in reason for reason in overridden)


def test_a_run_that_turns_out_to_be_long_is_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from nsa.train import preflight

    monkeypatch.setattr(preflight, "LONG_HOURS", 1e-5)
    with pytest.raises(RefusedError, match=r"(?s)60 steps.*train\.save_every"):
        train(settings(tmp_path, train__steps=60, train__save_every=50))
    assert 9 < max(runs.losses(tmp_path / "run")) < 13


def test_two_runs_do_not_share_a_folder(tmp_path: Path) -> None:
    train(settings(tmp_path, train__steps=2))
    with pytest.raises(RefusedError, match=r"train\.out_dir must be a new folder, or --resume"):
        train(settings(tmp_path, train__steps=2))
    in_use = pytest.raises(InUseError, match=r"train\.out_dir must not be in use")
    with run_folder.folder_lock(tmp_path / "run"), in_use:
        train(settings(tmp_path), resume=True)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["run", "--profile", "train_showcas"], "did you mean 'train_showcase'"),
        (["run", "--profile", "train_showcase", "--set", "train.step=3"], "did you mean 'train.steps'"),
        (["run", "--profile", "train_showcase", "--set", "train.steps"], "--set must be like"),
        (["run", "--profile", "train_showcase", "--steps", "5000", "--dataset", "synthetic"], "--allow-toy"),
        (["status", "/nowhere"], "no run has written in /nowhere"),
        (["preflight", "m7c_3090_smoke", "--set", "runtime.fp32_master_weights=false"], "runtime.fp32_master_weights"),
    ],
)
def test_the_command_says_what_is_wrong(
    arguments: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CONFIG", raising=False)
    assert main(arguments) == 2
    assert says in capsys.readouterr().err


def test_preflight_lets_a_sound_profile_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["preflight", "m7c_125m_1xa100_prod_v1", "--dataset", "synthetic"]) == 0
    said = capsys.readouterr().out
    assert "78,404,784 parameters, 8,192 tokens per step" in said
    assert "may start: 50,000 steps" in said
    assert os.listdir(tmp_path) == []
