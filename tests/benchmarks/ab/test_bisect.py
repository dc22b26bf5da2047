"""The search for a slow commit, along first parents, past commits that give no answer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.__main__ import main
from benchmarks.ab import bisect, checkout, paired_run
from benchmarks.ab.checkout import Sources
from benchmarks.ab.result import CompareVerdict, ComparisonResult
from tests.benchmarks.comparisons import comparison_result
from tests.benchmarks.repository import Repository

COMMITS = [f"c{i}" for i in range(16)]
CASE = "decode/8x2x64/b4/s16384/float32/nsa"


@pytest.mark.parametrize("slow", range(16))
def test_finds_each_commit_in_few_questions(slow: int) -> None:
    asked = []

    def ask(commit: str) -> CompareVerdict:
        asked.append(commit)
        return CompareVerdict.SLOWER if COMMITS.index(commit) >= slow else CompareVerdict.SAME

    assert bisect.first_slow(COMMITS, ask).commits == (COMMITS[slow],)
    assert len(asked) <= 4
    assert len(set(asked)) == len(asked)


def test_passes_over_commits_that_give_no_answer() -> None:
    silent = {"c7": CompareVerdict.UNDECIDED, "c8": CompareVerdict.FAILED}
    found = bisect.first_slow(
        COMMITS, lambda c: silent.get(c, CompareVerdict.SLOWER if int(c[1:]) >= 9 else CompareVerdict.SAME)
    )
    assert found.commits == ("c7", "c8", "c9")  # c6 is good, c9 slow, and nobody knows about those between
    assert found.verdicts["c6"] is CompareVerdict.SAME
    found = bisect.first_slow(
        COMMITS, lambda c: silent.get(c, CompareVerdict.SLOWER if int(c[1:]) >= 4 else CompareVerdict.SAME)
    )
    assert found.commits == ("c4",)


def test_a_single_commit_needs_no_question() -> None:
    assert bisect.first_slow(["c0"], lambda _: pytest.fail("asked")).commits == ("c0",)


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Repository:
    made = Repository(tmp_path / "repository")
    monkeypatch.setattr(checkout, "REPOSITORY", made.folder)
    return made


def asked_sources(monkeypatch: pytest.MonkeyPatch, base_is_fast: str) -> list[tuple[str, str]]:
    """Replace the comparison: a version is slow where its nsa/ says so. What was compared, in order."""
    asked: list[tuple[str, str]] = []

    def judge(
        machine: object, keys: object, base: Sources, head: Sources, rules: object
    ) -> tuple[list[ComparisonResult], bool]:
        texts = [(side.folder / "nsa" / "__init__.py").read_text() for side in (base, head)]
        asked.append((texts[0], texts[1]))
        assert texts[0] == base_is_fast
        return [comparison_result(CompareVerdict.SLOWER if "slow" in texts[1] else CompareVerdict.SAME)], False

    monkeypatch.setattr(paired_run, "measure", judge)
    return asked


def test_the_command_asks_git_and_names_the_commit(
    repository: Repository, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    good = repository.commit("fast 0")
    for i in range(3):
        repository.commit(f"fast {i + 1}")
    pages = [repository.commit("fast 3", page=f"page {i}") for i in range(3)]
    culprit = repository.commit("slow 4", page="page 2")
    pages += [repository.commit("slow 4", page=f"page {i}") for i in range(3, 6)]
    repository.commit("slow 5", page="page 5")
    asked = asked_sources(monkeypatch, "fast 0")
    assert main(["bisect", good, "HEAD", "--case", CASE, "--gpu", "cpu", "--out", str(tmp_path)]) == 0
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert summary["suspects"] == [culprit]
    assert not set(pages) & set(summary["asked"])
    assert asked[0] == ("fast 0", "slow 5")
    assert len(list((tmp_path / "verdicts").glob("*.jsonl"))) == len(asked)


def test_refuses_a_range_without_a_slowdown(
    repository: Repository, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    good = repository.commit("fast 0")
    repository.commit("fast 1")
    asked_sources(monkeypatch, "fast 0")
    arguments = ["bisect", good, "HEAD", "--case", CASE, "--gpu", "cpu", "--out", str(tmp_path)]
    assert main(arguments) == 2
    assert f"BAD must be SLOWER than GOOD on {CASE}; HEAD is SAME" in capsys.readouterr().err
    arguments[1:3] = ["HEAD", good]
    assert main(arguments) == 2
    assert "changes nsa/ along the first parents" in capsys.readouterr().err
    arguments[1] = "nowhere"
    assert main(arguments) == 2
    assert "'nowhere' must name a commit" in capsys.readouterr().err


def test_needs_one_case_of_nsa(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bisect", "HEAD~1", "HEAD", "--case", "decode", "--gpu", "cpu", "--out", str(tmp_path)]) == 2
    assert "--case must name one case of NSA; 'decode' names" in capsys.readouterr().err
