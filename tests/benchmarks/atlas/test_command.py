"""`python -m benchmarks atlas` from training to the record, on a tiny model; and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.__main__ import main, parser
from benchmarks.atlas import choices, corpus, observe, record, session, task_record, training
from benchmarks.commands import atlas
from nsa.train import profile, tasks
from tests.benchmarks.atlas import model


def said(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return found


def test_from_training_to_the_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(corpus, "roots", lambda: [model.sources(tmp_path / "sources")])
    monkeypatch.setattr(session, "TOKENS_EACH", 512)
    monkeypatch.setattr(observe.measure, "__kwdefaults__", {"steps": 4})
    out, folder = tmp_path / "results", tmp_path / "folder"
    words = ["--gpu", "cpu", "--folder", str(folder), "--out", str(out)]
    few = ["--profile", str(model.profile(tmp_path)), "--set", "train.steps=2", "--minutes", "60"]
    assert main(["atlas", *words, *few, "--seq-lens", "128", "--lengths", "256,512"]) == 0
    summary = said(capsys)
    found = record.read(Path(summary["atlas"]))
    assert (found.trained.tokens, found.trained.seq_lens, found.trained.seed) == (summary["tokens"], (128,), 1337)
    assert found.trained.loss == pytest.approx(summary["loss"], abs=1e-3)
    assert [length.seq_len for length in found.lengths] == [256, 512]
    assert choices.read(out, Path(summary["atlas"]).name, 512).seq_len == 512
    assert found.model["n_layers"] == 2
    assert "150 files" in found.trained.text
    assert found.fingerprint.machine == "cpu"

    monkeypatch.setattr(observe, "measure", too_large_beyond(256, observe.measure))
    assert main(["atlas", "measure", *words, "--lengths", "256,512"]) == 0
    assert said(capsys)["left_out"] == [512]
    assert len(record.read_all(out)[0]) == 2  # the first was not replaced
    assert main(["atlas", "measure", *words, "--lengths", "512"]) == 2
    assert "fits in the GPU's memory" in capsys.readouterr().err
    assert main(["atlas", "measure", *words, "--lengths", "65536"]) == 2
    assert "the held-out text has" in capsys.readouterr().err
    assert main(["atlas", "measure", *words, "--lengths", "128"]) == 2
    assert "seq_len must be at least" in capsys.readouterr().err


def too_large_beyond(length: int, measure: Any) -> Any:
    def fake(lm: Any, sequences: Sequence[Any], *, seed: int) -> Any:
        if sequences[0].tokens.shape[1] > length:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return measure(lm, sequences, seed=seed, steps=4)

    return fake


def test_tasks_from_training_to_the_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    task = replace(tasks.TRACKING, chains=2)
    small = tasks.model(task, replace(tasks.model(task).nsa, l=8, d=4, l_sel=8, n_sel=4, w=8), dim=16, head_dim=8)
    monkeypatch.setitem(tasks.TASKS, "tracking", task)
    monkeypatch.setattr(tasks, "model", lambda *arguments: small)
    out = tmp_path / "results"
    words = ["--gpu", "cpu", "--out", str(out), "--task", "tracking", "--steps", "4", "--tokens-per-step", "64"]
    assert main(["atlas", "tasks", *words, "--lengths", "64,96", "--texts", "6", "--seed", "9"]) == 0
    assert task_record.read_all(out)[1] == []
    (found,) = task_record.read_all(out)[0]
    assert Path(said(capsys)["tasks"]).is_file()
    assert [(one.task, one.length, one.hops, one.seed) for one in found.results] == [
        ("tracking", 64, 2, 9),
        ("tracking", 96, 2, 9),
    ]
    assert all(one.nsa.asked == one.dense.asked == 6 for one in found.results)
    assert found.model["parameters"] > found.model["parameters_dense"] > 0
    assert main(["atlas", "tasks", *words, "--lengths", "20"]) == 2
    assert "tracking needs" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--minutes", "0"], "above 0"),
        (["--minutes", "nan"], "above 0"),
        (["--lengths", "2,1"], "ascending lengths"),
        (["--seq-lens", "many"], "ascending lengths"),
        (["--texts", "0"], "whole number above 0"),
        (["--task", "other"], "invalid choice"),
        (["everything"], "invalid choice"),
        (["--length=8192"], "did you mean --lengths"),
    ],
)
def test_a_wrong_argument_is_named(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parser().parse_args(["atlas", *words])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_what_cannot_be_is_said_in_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--gpu", "cpu", "--out", str(tmp_path), "--folder", str(tmp_path / "none")]
    assert main(["atlas", "measure", *words]) == 2
    assert "holds no checkpoint yet" in capsys.readouterr().err
    assert main(["atlas", "train", *words, "--set", "train.steps"]) == 2
    assert "--set must be like" in capsys.readouterr().err
    assert main(["atlas", "train", *words, "--gpu", "h200"]) == 2


def test_an_interrupt_ends_the_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(corpus, "roots", lambda: [model.sources(tmp_path / "sources", files=3)])
    monkeypatch.setattr(training, "_run_for", lambda command, seconds: 130)
    words = ["--gpu", "cpu", "--out", str(tmp_path), "--folder", str(tmp_path / "none")]
    assert main(["atlas", "train", *words]) == 130
    assert "interrupted" in capsys.readouterr().err


def test_the_choices_are_what_there_is() -> None:
    assert set(atlas.TASKS) == set(tasks.TASKS)
    assert atlas.PROFILE in profile.names()
