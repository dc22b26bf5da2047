"""The page of the atlas: nothing that no record says, and everything that one does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.atlas import record, task_record
from benchmarks.atlas.task_record import TaskRecord, TaskResult, TaskScore
from benchmarks.report.further_pages import atlas
from benchmarks.report.pages import build
from benchmarks.report.table import BAD, GOOD, PLAIN
from tests.benchmarks.atlas import model
from tests.benchmarks.synthetic import FINGERPRINT


def asked(nsa: int, dense: int, task: str = "needle") -> TaskRecord:
    scores = (TaskScore(right, 400, 0.1) for right in (nsa, dense))
    result = TaskResult(task, 2 * (task == "tracking"), 32, 8192, 2000, 10**8, 7, *scores)
    return TaskRecord(1, FINGERPRINT, FINGERPRINT.commit, {}, 0.125, (result,))


def test_without_a_record_the_page_says_how_to_make_one(tmp_path: Path) -> None:
    index = build(tmp_path).index
    assert 'href="atlas.html"' in index.read_text()
    page = index.with_name("atlas.html").read_text()
    assert "There is no atlas yet" in page
    assert "python -m benchmarks atlas --minutes 8" in page
    assert "Not measured yet" in page
    assert "<img" not in page
    assert "docs/atlas.md" in page


def test_the_newest_atlas_is_drawn_and_every_one_is_listed(tmp_path: Path) -> None:
    record.write(tmp_path, model.atlas("2026-11-19T10:00:00.000Z", seed=41))
    record.write(tmp_path, model.atlas("2026-11-20T10:00:00.000Z", seed=42))
    page = build(tmp_path).index.with_name("atlas.html").read_text()
    assert "100,000,000 tokens in 15.5 minutes at 8k, then 32k tokens a sequence, seed 42" in page
    assert page.count("<figure>") == 8
    for picture in (tmp_path / "report").glob("atlas-*.svg"):
        assert picture.name in page
    assert page.index(">42<") < page.index(">41<")
    assert "0.475\u00a0(0.415\u00a0to\u00a00.535)" in page


def test_a_record_cannot_put_markup_on_the_page(tmp_path: Path) -> None:
    evil = "<script>alert(1)</script>"
    one = model.atlas()
    record.write(tmp_path, replace(one, trained=replace(one.trained, text=evil), model={"n_layers": evil}))
    page = build(tmp_path).index.with_name("atlas.html").read_text()
    assert evil not in page
    assert "&lt;script&gt;" in page


def test_a_damaged_file_is_named_on_the_first_page(tmp_path: Path) -> None:
    (tmp_path / "atlas").mkdir()
    (tmp_path / "atlas" / "bad.json").write_text("{")
    index = build(tmp_path).index
    assert "bad.json" in index.read_text()
    assert "There is no atlas yet" in index.with_name("atlas.html").read_text()


@pytest.mark.parametrize(
    ("nsa", "dense", "kind", "text"),
    [
        (100, 199, PLAIN, "no evidence: both below 50%"),
        (100, 390, BAD, "NSA is right less often"),
        (389, 390, GOOD, "no difference seen: the intervals overlap"),
    ],
)
def test_no_evidence_looks_like_none(nsa: int, dense: int, kind: str, text: str) -> None:
    (row,) = atlas.tasks([asked(nsa, dense)]).rows
    (cell,) = [cell for cell in row if cell.text == text]
    assert cell.kind == kind


def test_tasks_stand_side_by_side(tmp_path: Path) -> None:
    task_record.write(tmp_path, asked(380, 400))
    task_record.write(tmp_path, asked(20, 60, "tracking"))
    page = build(tmp_path).index.with_name("atlas.html").read_text()
    assert "95.0\u00a0% (" in page
    assert "100.0\u00a0% (" in page
    assert "tracking, 2 hops" in page
    assert "guessing is right in 12.5" in page
    assert "no evidence: both below 50%" in page
    assert "There is no atlas yet" in page


def test_that_nsa_is_right_less_often_is_said_in_words(tmp_path: Path) -> None:
    """Rows without evidence are not counted."""
    equal, worse, nothing = asked(390, 392), asked(100, 390), asked(20, 60)
    assert atlas.less_often([equal, nothing]) is None
    assert atlas.less_often([equal, worse, nothing]) == "NSA is right less often than its dense twin in 1 of 2 rows."
    task_record.write(tmp_path, worse)
    page = build(tmp_path).index.with_name("atlas.html").read_text()
    assert "NSA is right less often than its dense twin in 1 of 1 rows." in page
    assert "2,000\u00a0steps,\u00a0100M\u00a0tokens" in page
