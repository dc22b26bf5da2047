"""The model of an atlas: each call goes on where the one before ended, and ends in time with a checkpoint."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.atlas import corpus, training
from nsa.train.run import CHECKPOINTS
from tests.benchmarks.atlas import model


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(corpus, "roots", lambda: [model.sources(tmp_path / "sources")])
    return tmp_path / "atlas"


def test_calls_go_on_from_one_another(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    profile = str(model.profile(tmp_path))
    assert training.state(folder) is None
    first = training.train(folder, 128, 60.0, {"train.steps": 3}, profile)
    assert (first.step, first.tokens, first.seq_lens) == (3, 3 * 127, (128,))
    for code, message in ((2, "exit code 2"), (training.STOPPED, "--minutes must be more"), (-15, "--minutes must be")):
        with monkeypatch.context() as patched:
            patched.setattr(training, "_run_for", lambda command, seconds, code=code: code)
            with pytest.raises(ValueError, match=message):
                training.train(folder, 64, 60.0, {}, profile)
    second = training.train(folder, 256, 60.0, {"train.steps": 5, "train.batch_size": 2}, profile)
    assert (second.step, second.seq_lens) == (5, (128, 256))
    assert second.tokens == first.tokens + 2 * 2 * 255
    assert second.minutes > first.minutes > 0
    assert (second.settings.train.seq_len, second.settings.train.batch_size) == (256, 2)
    attempts = (folder / training.RUN / "attempts.jsonl").read_text().splitlines()
    assert [json.loads(line)["after_step"] for line in attempts][-1] == 3
    lm, stands = training.load(folder, torch.device("cpu"))
    assert stands == second
    assert not lm.training
    assert not any(parameter.requires_grad for parameter in lm.parameters())
    newest = folder / training.RUN / CHECKPOINTS / "step-00000005.ckpt"
    newest.write_bytes(newest.read_bytes()[:-1] + b"!")
    older, stood = training.load(folder, torch.device("cpu"))
    assert not torch.equal(older.embedding.weight, lm.embedding.weight)  # a damaged checkpoint is not believed
    assert (stood.step, stood.tokens, stood.seq_lens) == (3, first.tokens, (128,))


def test_there_is_no_model_before_the_first_call(folder: Path) -> None:
    with pytest.raises(ValueError, match="holds no checkpoint yet"):
        training.load(folder, torch.device("cpu"))


def test_a_longer_sequence_takes_as_many_tokens_a_step(folder: Path) -> None:
    for seq_len, batch in ((8192, 8), (32768, 2), (131072, 1)):
        settings = training.settings_of(folder, {}, seq_len, "h200_125m")
        assert (settings.train.seq_len, settings.train.batch_size) == (seq_len, batch)
        assert settings.train.lr_schedule == "constant"
        assert not settings.data.packing
    assert training.settings_of(folder, {"train.batch_size": 3}, 8192, "h200_125m").train.batch_size == 3
    with pytest.raises(ValueError, match=r"train\.lrr"):
        training.settings_of(folder, {"train.lrr": 1.0}, 8192, "h200_125m")


SAVES_ON_SIGTERM = """
import pathlib, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
pathlib.Path(sys.argv[1]).touch()
time.sleep(600)
"""


def test_time_ends_it_and_it_may_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ready = tmp_path / "ready"

    class Clock:
        @staticmethod
        def monotonic() -> float:
            return 61.0 if ready.exists() else 0.0

    monkeypatch.setattr(training, "time", Clock)
    assert training._run_for([sys.executable, "-c", SAVES_ON_SIGTERM, str(ready)], 60.0) == training.STOPPED


def test_one_that_does_not_save_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ready = tmp_path / "ready"
    ignores = SAVES_ON_SIGTERM.replace("lambda *_: sys.exit(143)", "signal.SIG_IGN")

    class Clock:
        @staticmethod
        def monotonic() -> float:
            return 61.0 if ready.exists() else 0.0

    monkeypatch.setattr(training, "time", Clock)
    monkeypatch.setattr(training, "SAVING_S", 0.1)
    with pytest.raises(ValueError, match="was killed"):
        training._run_for([sys.executable, "-c", ignores, str(ready)], 60.0)


def test_the_text_is_every_source_once_in_an_order_of_its_content(tmp_path: Path) -> None:
    root = model.sources(tmp_path / "a", files=60)
    (root / "copy.py").write_bytes((root / "package_0" / "module_0.py").read_bytes())
    (root / "latin.py").write_bytes(b"# \xe9\n")
    (root / "long.py").write_text("#" * (corpus.MOST_BYTES + 1))
    (root / "empty.py").touch()
    made = corpus.prepare(tmp_path / "one", [root])
    texts = [json.loads(line)["text"] for line in made.path.read_text().splitlines()]
    assert sorted(texts) == sorted({path.read_text() for path in root.glob("package_*/*.py")})
    assert made.num_bytes == sum(map(len, texts))
    moved = tmp_path / "b"
    root.rename(moved)
    again = corpus.prepare(tmp_path / "two", [moved])
    assert again.path.read_bytes() == made.path.read_bytes()
    assert corpus.prepare(tmp_path / "one", [tmp_path / "nowhere"]) == made  # it is there already


def test_held_out_bytes_are_those_that_training_leaves_out(tmp_path: Path) -> None:
    from nsa.train.data.packing import Documents
    from nsa.train.settings import Data

    made = corpus.prepare(tmp_path / "one", [model.sources(tmp_path / "a")])
    documents = Documents(Data(dataset="files", path=str(made.path)), held_out=True)
    first: list[str] = []
    for text in documents:
        if documents.epoch:
            break
        first.append(text)
    assert 0 < sum(map(len, first)) == made.held_out_bytes < made.num_bytes / 10


def test_a_text_that_cannot_be_had_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no Python sources below"):
        corpus.prepare(tmp_path / "one", [tmp_path])
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / corpus.ABOUT).write_text("{")
    with pytest.raises(ValueError, match="damaged"):
        corpus.prepare(tmp_path / "one", [tmp_path])
