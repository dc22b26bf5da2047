"""After an upgrade `run` measures an earlier commit too, by today's benches; a run loses nothing without it."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks import anchors, runner, worker
from benchmarks.__main__ import main
from benchmarks.ab import checkout
from benchmarks.cases.key import Key
from benchmarks.cases.outcome import CaseOutcome
from benchmarks.history import run_file
from benchmarks.history.anchor_plan import AnchorPlan, AnchorRequest
from benchmarks.history.records import Anchor, Record
from benchmarks.runner import Measurement
from benchmarks.workloads import suite
from harness import fingerprint, repository
from tests.benchmarks.repository import Repository
from tests.benchmarks.stored import write
from tests.benchmarks.synthetic import FINGERPRINT, failed, passed
from tests.harness.test_package_folder import EDITABLE

NAME = "prefill-forward/8x2x64/b1/s512/float32/nsa"
SLOWED_MS = 200.0
SLOW = """

import pathlib as _pathlib
import time as _time

_fast = nsa_attention


def nsa_attention(*inputs, **settings):
    _pathlib.Path({called!r}).touch()
    _time.sleep({slowed_s})
    return _fast(*inputs, **settings)
"""


def the_key() -> Key:
    keys = suite.planned(suite.table("cpu"), quick=True, backend="auto", on_gpu=False)
    return next(key for key in keys if key.name == NAME)


@pytest.fixture
def earlier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Anchor:
    """A commit whose attention is slower and leaves a file, and results in which a run under another PyTorch measured
    it."""
    theirs = Repository(tmp_path / "repository")
    shutil.copytree(repository.ROOT / "nsa", theirs.folder / "nsa", dirs_exist_ok=True)
    slow = SLOW.format(called=str(called_file(tmp_path)), slowed_s=SLOWED_MS / 1e3)
    commit = theirs.commit((repository.ROOT / "nsa" / "__init__.py").read_text() + slow)
    monkeypatch.setattr(checkout, "REPOSITORY", theirs.folder)
    anchor = Anchor(commit, fingerprint.sources_sha256(theirs.folder / "nsa"))
    record_run(tmp_path / "results", anchor)
    return anchor


def called_file(tmp_path: Path) -> Path:
    return tmp_path / "called"


def record_run(results: Path, of: Anchor) -> None:
    where = dataclasses.replace(fingerprint.take("cpu", "cpu"), utc="2026-01-02T03:04:05Z", torch="2.0.0", dirty=False)
    where = dataclasses.replace(where, commit=of.commit, nsa_sha256=of.nsa_sha256)
    write(results, dataclasses.replace(passed(the_key(), SLOWED_MS), fingerprint=where))


def run(results: Path, *more: str) -> int:
    return main(["run", "--quick", "--gpu", "cpu", "--cases", NAME, "--out", str(results), *more])


def measured_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """The run's own case is not measured: it is not what is tested."""

    def measure(keys: list[Key], *arguments: object, **options: object) -> Iterator[Measurement]:
        where = arguments[2]
        assert isinstance(where, fingerprint.Fingerprint)
        yield from (Measurement(dataclasses.replace(passed(key), fingerprint=where)) for key in keys)

    monkeypatch.setattr(worker, "run", measure)


def newest(results: Path) -> list[Record]:
    path = max((results / "runs" / "cpu").glob("*.jsonl"))
    return [found for found in run_file.read(path) if isinstance(found, Record)]


def test_after_an_upgrade_the_commit_of_the_last_run_is_measured_by_its_own_sources(
    earlier: Anchor, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    measure, called_by_ours = anchors.measure, []

    def watched(*arguments: Any) -> Iterator[Record]:
        called_by_ours.append(called_file(tmp_path).exists())
        return measure(*arguments)

    monkeypatch.setattr(anchors, "measure", watched)
    assert run(tmp_path / "results") == 0
    assert called_by_ours == [False]
    assert called_file(tmp_path).exists()
    said = capsys.readouterr()
    assert f"Anchors: 1 cases at {earlier.commit[:10]} (torch 2.0.0 -> " in said.out
    assert json.loads(said.out.splitlines()[-1])["anchors"] == {"PASSED": 1}
    ours, theirs = newest(tmp_path / "results")
    assert (ours.anchor, theirs.anchor) == (None, earlier)
    assert theirs.fingerprint == ours.fingerprint
    assert theirs.latency_ms is not None
    assert theirs.latency_ms > SLOWED_MS
    assert theirs.command.endswith(f" --anchors {earlier.commit} --cases {NAME}")


@pytest.mark.parametrize("fault", ["other sources", "a commit that is not here"])
def test_a_commit_that_cannot_be_had_is_named_and_the_run_stands(
    fault: str, earlier: Anchor, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    measured_here(monkeypatch)
    wrong = {"nsa_sha256": "f" * 16} if fault == "other sources" else {"commit": "f" * 40}
    results = tmp_path / "others"
    record_run(results, dataclasses.replace(earlier, **wrong))
    assert run(results) == 0
    said = capsys.readouterr()
    assert json.loads(said.out.splitlines()[-1])["anchors"] == {}
    why = "is not what the earlier runs measured" if fault == "other sources" else "must name a commit of"
    (line,) = [line for line in said.err.splitlines() if "no anchors at" in line]
    assert why in line
    assert "git fetch --unshallow" in line
    assert [record.anchor for record in newest(results)] == [None]


def test_anchors_can_be_left_out_or_asked_for_at_any_commit(
    earlier: Anchor, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    measured_here(monkeypatch)
    assert run(tmp_path / "results", "--anchors", "none") == 0
    assert [record.anchor for record in newest(tmp_path / "results")] == [None]
    assert run(tmp_path / "results", "--anchors", "HEAD") == 0
    assert [record.anchor for record in newest(tmp_path / "results")] == [None, earlier]
    capsys.readouterr()
    before = list((tmp_path / "results" / "runs" / "cpu").iterdir())
    assert run(tmp_path / "results", "--anchors", "no-such-commit") == 2
    assert "'no-such-commit' must name a commit of" in capsys.readouterr().err
    assert list((tmp_path / "results" / "runs" / "cpu").iterdir()) == before


def test_where_a_commit_gives_no_figure_the_next_one_is_measured(
    earlier: Anchor, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    measured_here(monkeypatch)
    broken = dataclasses.replace(earlier, commit="a" * 40)
    plans = tuple(AnchorPlan(one.commit, one.nsa_sha256, (the_key(),)) for one in (broken, earlier, earlier))
    monkeypatch.setattr(anchors, "find", lambda *_: AnchorRequest((), plans))

    def measure(plan: AnchorPlan, *arguments: object) -> Iterator[Record]:
        now = arguments[2]
        assert isinstance(now, fingerprint.Fingerprint)
        good = plan.commit == earlier.commit
        record = passed(the_key()) if good else failed(the_key(), CaseOutcome.CRASHED, "too old")
        yield dataclasses.replace(record, fingerprint=now, anchor=earlier if good else broken)

    monkeypatch.setattr(anchors, "measure", measure)
    assert run(tmp_path / "results") == 0
    assert [record.anchor for record in newest(tmp_path / "results")] == [None, broken, earlier]
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["anchors"] == {"CRASHED": 1, "PASSED": 1}


def test_a_commit_that_is_too_old_for_the_benches_is_named_and_the_next_one_is_measured(
    earlier: Anchor, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It lacks modules that the installed nsa/ has, whose finder answers for them (as an editable installation's)."""
    measured_here(monkeypatch)
    folder = tmp_path / "repository"
    shutil.rmtree(folder / "nsa" / "train")
    init = (folder / "nsa" / "__init__.py").read_text()
    old = Repository(folder).commit(EDITABLE.format(package=str(repository.ROOT / "nsa")) + init)
    plans = tuple(AnchorPlan(commit, None, (the_key(),)) for commit in (old, earlier.commit))
    monkeypatch.setattr(anchors, "find", lambda *_: AnchorRequest((), plans))

    assert run(tmp_path / "results") == 0
    said = capfd.readouterr()
    (line,) = [line for line in said.err.splitlines() if "no anchors at" in line]
    assert f"no anchors at {old[:10]}: its nsa/ is too old for today's benches" in line
    assert "No module named 'nsa.train'" in line
    assert "unshallow" not in line
    assert "Traceback" not in said.err
    assert json.loads(said.out.splitlines()[-1])["anchors"] == {"PASSED": 1}
    assert [record.anchor for record in newest(tmp_path / "results")] == [None, earlier]


def test_interrupted_among_the_anchors_a_run_keeps_all_that_it_measured(
    earlier: Anchor, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    measured_here(monkeypatch)

    def interrupted(*arguments: object) -> Iterator[Record]:
        now = arguments[3]
        assert isinstance(now, fingerprint.Fingerprint)
        yield dataclasses.replace(passed(the_key()), fingerprint=now, anchor=earlier)
        raise KeyboardInterrupt

    monkeypatch.setattr(anchors, "measure", interrupted)
    assert run(tmp_path / "results") == 130
    assert "interrupted; 1 of 1 measurements are in " in capsys.readouterr().err
    assert [record.anchor for record in newest(tmp_path / "results")] == [None, earlier]


def test_a_process_that_finds_another_nsa_gives_no_figure(tmp_path: Path) -> None:
    path = (tmp_path, repository.ROOT)
    (found,) = worker.run([the_key()], "cpu", runner.QUICK, FINGERPRINT, lambda _: "c", seed=7, path=path)
    assert found.record.outcome is CaseOutcome.CRASHED
    assert f"which is not of {tmp_path}" in str(found.record.reason)
