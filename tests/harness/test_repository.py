"""A run leaves `git status` clean: what it writes is ignored, what a person decides is not."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from harness import repository
from harness.repository import ROOT

pytestmark = pytest.mark.skipif(repository.commit() is None, reason="needs git and its history")

AUTHOR = ["-c", "user.name=a", "-c", "user.email=a@b"]


def ignored(path: str) -> bool:
    return subprocess.run(["git", "-C", str(ROOT), "check-ignore", "--quiet", path]).returncode == 0


@pytest.mark.parametrize(
    "path",
    [
        "results/runs/cpu/20260102T030405Z-0123456789.jsonl",
        "results/runs/cpu/20260102T030405Z-0123456789.raw.jsonl.gz",
        "results/regression/cpu/20260102T030405Z-0123456789.jsonl",
        "results/verdicts/20260102T030405Z-a-b.jsonl",
        "results/mutants/20260102T030405Z-0123456789.jsonl",
        "results/report/index.html",
        "results/pipeline/bench.log",
        ".nox/suites/bin/python",
    ],
)
def test_what_a_run_writes_is_ignored(path: str) -> None:
    assert ignored(path)


@pytest.mark.parametrize(
    "path", ["results/baselines/accepted.jsonl", "results/calibration/a-machine.json", "results/tuning/sm90.jsonl"]
)
def test_what_a_person_decides_is_not(path: str) -> None:
    assert not ignored(path)


def test_commits_since_counts_to_the_working_tree_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repository, "ROOT", tmp_path)
    made = []
    for command in (["init", "-q"], *(["commit", "-q", "--allow-empty", "-m", f"{n}"] for n in range(3))):
        subprocess.run(["git", "-C", str(tmp_path), *AUTHOR, *command], check=True)
        made.append(repository.commit())
    assert [repository.commits_since(str(one)) for one in made[1:]] == [2, 1, 0]
    assert repository.commits_since(str(made[1])[:10]) == 2
    for unknown in ("0123456789", "--all", "HEAD", ""):
        assert repository.commits_since(unknown) is None
