"""The records of the mutants come back as written; the ledger shows the share of each area, and what nothing saw."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from benchmarks.history import merge, mutants
from benchmarks.history.mutants import Header, MutantOutcome, MutantResult
from benchmarks.report.further_pages import mutants as pages
from benchmarks.report.pages import build
from benchmarks.report.table import BAD, GOOD
from tests.benchmarks.report.test_pages import Page
from tests.benchmarks.synthetic import FINGERPRINT

BEGIN = Header(FINGERPRINT, "t" * 16, {"train": 20, "attention": 1})


def line(
    number: int, outcome: MutantOutcome = MutantOutcome.KILLED, *, drawn: bool = False, area: str = "train"
) -> MutantResult:
    said = "tests/test_a.py::test_a" if outcome is MutantOutcome.KILLED else None
    return MutantResult(f"mutant-{number}", area, outcome, 1.5, said, drawn)


def write(results: Path, *lines: MutantResult, begin: Header = BEGIN) -> Path:
    path = mutants.create(results, begin)
    for one in lines:
        mutants.append(path, one)
    return path


def cells(results: Path) -> list[dict[str, str]]:
    table = pages.rows(pages.read(results)[0])
    return [dict(zip(table.head, (cell.text.replace("\xa0", " ") for cell in row), strict=True)) for row in table.rows]


def test_round_trip_of_a_file_whose_last_line_is_incomplete(tmp_path: Path) -> None:
    path = write(tmp_path, line(1, MutantOutcome.ERROR), line(2), line(1))
    with path.open("a") as file:
        file.write('{"id":"mut')
    assert mutants.read(path) == (BEGIN, [line(1), line(2)])
    assert mutants.newest(tmp_path, BEGIN.tree_sha256) == path
    assert mutants.newest(tmp_path, "another") is None


@pytest.mark.parametrize(
    ("survivors", "errors", "enough"), [(0, 0, True), (1, 0, True), (2, 0, False), (0, 1, False)]
)  # of 20: 95 % are 19
def test_ninety_five_in_a_hundred_are_enough_and_an_error_never_is(survivors: int, errors: int, enough: bool) -> None:
    outcomes = [MutantOutcome.SURVIVED] * survivors + [MutantOutcome.ERROR] * errors
    outcomes += [MutantOutcome.TIMEOUT] + [MutantOutcome.KILLED] * (19 - len(outcomes))
    (rate,) = mutants.rates([line(i, outcome) for i, outcome in enumerate(outcomes)])
    assert rate.share == pytest.approx(1 - (survivors + errors) / 20)
    assert rate.enough is enough


def test_the_ledger_says_where_nothing_was_tried(tmp_path: Path) -> None:
    text = Page(build(tmp_path).index.with_name("ledger.html")).text
    assert "No mutant was tried yet: nox -s mutants does it." in text


def test_the_ledger_shows_each_area_and_what_nothing_saw(tmp_path: Path) -> None:
    shown = [line(i) for i in range(17)]
    write(
        tmp_path,
        *shown,
        line(18, MutantOutcome.SURVIVED, drawn=True),
        line(19, drawn=True),
        line(20, MutantOutcome.EQUIVALENT),
    )
    attention, train = cells(tmp_path)
    assert (attention["area"], attention["seen"], attention["not tried"]) == ("attention", "–", "1")
    assert (train["seen"], train["of the drawn"], train["not tried"]) == ("94.7% (18 of 19)", "1 of 2", "1")
    assert train["equivalent"] == "1"
    unseen = pages.unseen(pages.read(tmp_path)[0])
    assert [[cell.text for cell in row[1:]] for row in unseen.rows] == [
        ["train", "mutant-18", "SURVIVED", "every test passed"]
    ]
    text = Page(build(tmp_path).index.with_name("ledger.html")).text
    assert "95% of each must be seen" in text
    assert "mutant-18" in text


def test_shards_of_a_night_are_one_row_per_area_and_later_lines_count(tmp_path: Path) -> None:
    for second, lines in enumerate([[line(1, MutantOutcome.SURVIVED), line(2)], [line(1), line(3, area="attention")]]):
        later = dataclasses.replace(FINGERPRINT, utc=f"2026-11-23T00:00:0{second}.000Z")
        write(tmp_path, *lines, begin=dataclasses.replace(BEGIN, fingerprint=later))
    assert [(row["area"], row["seen"]) for row in cells(tmp_path)] == [
        ("attention", "100.0% (1 of 1)"),
        ("train", "100.0% (2 of 2)"),
    ]
    good = pages.rows(pages.read(tmp_path)[0]).rows
    assert [row[3].kind for row in good] == [GOOD, GOOD]
    assert [row[8].kind for row in good] == ["plain", BAD]


def test_runners_are_merged_and_a_damaged_file_is_named(tmp_path: Path) -> None:
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    path = write(theirs, line(1))
    merged = merge.MergeResult()
    merge.merge(theirs, ours, merged)
    assert (merged.new_lines, merged.refused) == (2, [])
    assert [row["seen"] for row in cells(ours)] == ["–", "100.0% (1 of 1)"]
    path.write_text(path.read_text().replace('"KILLED"', '"FINE"'))
    merge.merge(theirs, ours, merged)
    assert len(merged.refused) == 1
    assert "FINE" in merged.refused[0]
    path.write_text("[]\n")
    assert "mutants/" in pages.read(theirs)[1][0]
