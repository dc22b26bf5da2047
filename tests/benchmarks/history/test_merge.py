"""Results of several runners: all of it, once, nothing that is damaged, nothing that leads elsewhere."""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path

import pytest

from benchmarks.__main__ import main
from benchmarks.history import merge, run_file
from tests.benchmarks import stored
from tests.benchmarks.synthetic import key, passed


def lines(results: Path) -> list[str]:
    return sorted(map(run_file.full_line, run_file.read_all(results)[0]))


def joined(source: Path, results: Path) -> merge.MergeResult:
    merged = merge.MergeResult()
    merge.merge(source, results, merged)
    return merged


@pytest.fixture
def two_runners(tmp_path: Path) -> tuple[Path, Path]:
    """Two folders of artefacts, a run of its own in each and one that both have."""
    first, second = tmp_path / "first", tmp_path / "second"
    for number, results in enumerate((first, second)):
        stored.write(results, *stored.run(1, passed(key())))
        stored.write(results, *stored.run(2 + number, passed(key())))
    return first, second


def test_every_line_comes_along_once(two_runners: tuple[Path, Path], tmp_path: Path) -> None:
    wanted = sorted({*lines(two_runners[0]), *lines(two_runners[1])})
    results = tmp_path / "results"
    added = [joined(folder, results).new_lines for folder in (*two_runners, *two_runners)]
    assert lines(results) == wanted
    assert added == [2, 1, 0, 0]
    assert len(stored.everything(results)) == 3


def test_artefacts_lie_one_folder_below(two_runners: tuple[Path, Path], tmp_path: Path) -> None:
    assert joined(two_runners[0].parent, tmp_path / "results").new_lines == 3


def test_a_longer_version_of_a_file_adds_its_lines(tmp_path: Path) -> None:
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    (path,) = (stored.write(ours, *stored.run(1, passed(key()))),)
    other = theirs / path.relative_to(ours)
    other.parent.mkdir(parents=True)
    other.write_text(path.read_text() + "\n".join(run_file.lines_of(stored.run(4, passed(key())))) + "\n")
    before = path.read_text()
    assert joined(theirs, ours).new_lines == 1
    assert path.read_text().startswith(before)
    assert len(lines(ours)) == 2


@pytest.mark.parametrize(
    ("broken", "why"),
    [
        (lambda line: line[: len(line) // 2], "truncated"),
        (lambda line: line.replace('"correctness":[8', '"correctness":["8"'), "$.correctness[0]"),
        (lambda line: line.replace('"correctness"', '"outcome":"FINE","correctness"'), "FINE"),
    ],
    ids=["torn", "of another type", "no outcome"],
)
def test_a_damaged_line_is_refused_by_name_and_the_others_come(
    two_runners: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], broken: object, why: str
) -> None:
    kept, lost = stored.run(7, passed(key())), stored.run(7, passed(key(length=128)))
    path = stored.write(two_runners[0], *kept, *lost)
    run_line, whole, bad = path.read_text().splitlines()
    path.write_text(f"{run_line}\n{whole}\n{broken(bad)}\n")  # type: ignore[operator]
    results = tmp_path / "results"
    assert main(["merge", str(two_runners[0]), "--out", str(results)]) == 1
    told = capsys.readouterr()
    assert f"{path}:3: " in told.err
    assert why in told.err
    assert json.loads(told.out.splitlines()[-1])["refused"] == 1
    assert run_file.full_line(kept[0]) in lines(results)
    assert len(lines(results)) == 3


def incident_line(name: str, **changes: object) -> str:
    where = {"machine": "cpu", "device": "A CPU", "cpu": "A CPU"}
    judged = {"part": "product", "expects": "PASSED", "verdict": "PASSED", "ok": True}
    found = {"fingerprint": where, "incident": name, **judged, "schema_version": 1, **changes}
    return json.dumps({field: value for field, value in found.items() if value is not None})


def test_lines_of_incidents_come_along_once(tmp_path: Path) -> None:
    """Both where the target has the file already and where two runners bring it."""
    for folder, names in (("first", "ab"), ("second", "bc")):
        file = tmp_path / folder / "regression" / "cpu" / "run.jsonl"
        file.parent.mkdir(parents=True)
        file.write_text("".join(f"{incident_line(name)}\n" for name in names))
    results = tmp_path / "results"
    added = [joined(tmp_path / folder, results).new_lines for folder in ("first", "second", "first", "second")]
    assert added == [2, 1, 0, 0]
    assert (results / "regression/cpu/run.jsonl").read_text().splitlines() == [incident_line(name) for name in "abc"]


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (incident_line("b")[:20], "JSONDecodeError"),
        ("[1, 2]", "a line must be a JSON object"),
        (incident_line("b", verdict=None), "a replayed incident must have verdict"),
    ],
    ids=["torn", "no object", "no verdict"],
)
def test_a_damaged_line_of_an_incident_is_refused_by_name(tmp_path: Path, bad: str, why: str) -> None:
    file = tmp_path / "theirs" / "regression" / "cpu" / "run.jsonl"
    file.parent.mkdir(parents=True)
    file.write_text(f"{incident_line('a')}\n{bad}\n{incident_line('c')}\n")
    results = tmp_path / "results"
    (refused,) = joined(tmp_path / "theirs", results).refused
    assert refused.startswith(f"{file}:2: ")
    assert why in refused
    assert (results / "regression/cpu/run.jsonl").read_text().splitlines() == [incident_line(name) for name in "ac"]


def test_a_record_of_another_machine_is_refused(tmp_path: Path) -> None:
    path = stored.write(tmp_path / "theirs", *stored.run(1, passed(key(), machine="h200")))
    (path.parent.parent / "cpu").mkdir()
    path = path.rename(path.parent.parent / "cpu" / path.name)
    (refused,) = joined(tmp_path / "theirs", tmp_path / "ours").refused
    assert refused == f"{path}:2: a record of 'h200' must not lie in cpu/"
    assert stored.everything(tmp_path / "theirs") == []
    assert "'h200'" in stored.damaged(tmp_path / "theirs")[0].why


def test_a_target_without_a_whole_record_keeps_what_it_holds(tmp_path: Path) -> None:
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    path = stored.write(theirs, *stored.run(1, passed(key())))
    target = ours / path.relative_to(theirs)
    target.parent.mkdir(parents=True)
    target.write_text("torn\n")
    assert joined(theirs, ours).new_lines == 1
    assert target.read_text().startswith("torn\n")
    assert len(stored.everything(ours)) == 1


def test_what_leads_elsewhere_is_refused(tmp_path: Path) -> None:
    source, secret = tmp_path / "source", tmp_path / "secret.jsonl"
    secret.write_text('{"a":1}\n')
    (source / "verdicts").mkdir(parents=True)
    (source / "verdicts" / "a.jsonl").symlink_to(secret)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "b.jsonl").write_text('{"a":1}\n')
    (source / "runs").mkdir()
    (source / "runs" / "cpu").symlink_to(tmp_path / "elsewhere")
    (source / "laws").mkdir()
    (source / "laws" / "-x y.json").write_text("{}")
    merged = joined(source, tmp_path / "results")
    assert merged.new_files == 0
    assert len(merged.refused) == 3


def test_a_whole_file_is_never_overwritten(tmp_path: Path) -> None:
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    for results, text in ((ours, "{}"), (theirs, '{"a":1}')):
        (results / "calibration").mkdir(parents=True)
        (results / "calibration" / "cpu.json").write_text(text)
    (refused,) = joined(theirs, ours).refused
    assert "differs from" in refused
    assert (ours / "calibration" / "cpu.json").read_text() == "{}"


def test_the_newest_backtest_of_a_machine_counts(tmp_path: Path) -> None:
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    texts = [f'{{"utc": "2026-01-0{day}T00:00:00.000Z"}}' for day in (1, 2)]
    for results, text in zip((ours, theirs), texts, strict=True):
        (results / "calibration").mkdir(parents=True)
        (results / "calibration" / "cpu.backtest.json").write_text(text)
    assert joined(theirs, ours).refused == []
    assert (ours / "calibration" / "cpu.backtest.json").read_text() == texts[1]


def test_a_folder_without_results_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    for folder, why in ((tmp_path / "empty", "holds no results"), (tmp_path / "none", "is none")):
        assert main(["merge", str(folder), "--out", str(tmp_path / "results")]) == 2
        assert why in capsys.readouterr().err


def test_two_merges_at_once_add_a_line_once(two_runners: tuple[Path, Path], tmp_path: Path) -> None:
    results = tmp_path / "results"
    results.mkdir()
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        pool.starmap(joined, [(two_runners[0], results)] * 6)
    assert lines(results) == lines(two_runners[0])
