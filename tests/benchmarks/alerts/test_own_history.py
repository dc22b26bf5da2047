"""This repository's own records of an H200: changes whose commit is known are found, with that commit as a suspect."""

from __future__ import annotations

import pytest

from benchmarks.alerts import movements
from benchmarks.alerts.commits import Commits
from benchmarks.alerts.movements import Movement
from benchmarks.history.store import Store
from harness import repository

RUNS = repository.ROOT / "results" / "runs" / "h200"
UNTIL = "20261124"
"""Runs of before: later ones may stand under other conditions."""
KNOWN = [
    ("prefill-forward/64x4x128/b1/s65536/bfloat16/cold/nsa", "81592acd9a", -0.4),
    ("decode/64x4x128/b1/s131072/bfloat16/cold/graph/nsa", "e524a5b35e", -0.8),
    ("prefill-forward/64x4x128/b1/s65536/bfloat16/cold/nsa", "8db5601068", -0.1),
    ("part-window/64x4x128/b1/s8192/bfloat16/cold/nsa", "8db5601068", -0.2),
    ("part-scores/64x4x128/b1/s8192/bfloat16/cold/nsa", "25d985ec78", -0.1),
    ("prefill-forward-backward/12x2x64/b1/s2048/bfloat16/nsa", "d2d5cb6064", -0.1),
]
"""(case, what made it faster, by so much at least): a new kernel, or fewer launches, as the commit says."""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[Movement]:
    """What the records show."""
    if repository.git("rev-parse", "--verify", f"{KNOWN[-1][1]}^{{commit}}") is None:
        pytest.skip("needs this repository's history, and git")
    results = tmp_path_factory.mktemp("results")
    (results / "runs" / "h200").mkdir(parents=True)
    for file in RUNS.glob("*.jsonl"):
        if file.name < UNTIL:
            (results / "runs" / "h200" / file.name).symlink_to(file)
    return movements.of_runs(Store(results), "h200", {}, Commits())


@pytest.mark.parametrize(("case", "commit", "change"), KNOWN, ids=[commit for _, commit, _ in KNOWN])
def test_a_known_change_is_found_with_its_commit(found: list[Movement], case: str, commit: str, change: float) -> None:
    suspected = [one for one in found if one.case.case == case and any(s.startswith(commit) for s in one.suspects)]
    assert len(suspected) == 1
    assert suspected[0].case.change <= change
    assert len(suspected[0].suspects) <= 8, "what lies between two runs"


def test_no_change_is_found_where_no_commit_changes_the_code(found: list[Movement]) -> None:
    assert [one.case.case for one in found if not one.suspects] == []
