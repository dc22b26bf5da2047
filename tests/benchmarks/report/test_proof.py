"""The page of what is proven on which machine: from records, and nothing that no record says."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from benchmarks.ab import calibration
from benchmarks.history import conversion
from benchmarks.report.first_page import evidence
from benchmarks.report.further_pages import ledger, proof
from benchmarks.report.links import Repository
from benchmarks.report.pages import build
from benchmarks.report.table import BAD, GOOD, Cell
from harness import machines
from tests.benchmarks.full_results import SLOWER_FROM, write_accepted, write_calibration, write_incidents, write_runs
from tests.benchmarks.synthetic import FINGERPRINT

RUN = dataclasses.replace(FINGERPRINT, commit="c" * 40, utc="2026-02-03T00:00:00Z", dirty=True)
AT = "at ccccccc + changes, 2026-02-03"


def law(results: Path, name: str, utc: str, passed: int, failed: int = 0, **more: object) -> None:
    (results / "laws").mkdir(parents=True, exist_ok=True)
    counts = {"utc": utc, "passed": passed, "failed": failed, **more}
    (results / "laws" / f"{name}.json").write_text(json.dumps(counts))


def rows(results: Path, **cases: int) -> dict[str, dict[str, Cell]]:
    """By the family's title or the machine's name, then by column."""
    calibrated = [path.stem for path in calibration.path(results, "x").parent.glob("*.json")]
    runs = [(name, count, RUN) for name, count in cases.items()]
    found = proof.table(results, runs, ledger.read(results)[0], calibrated, Repository())
    return {row[0].text: dict(zip(found.head, row, strict=True)) for row in found.rows}


def test_without_records_every_family_stands_there_with_nothing(tmp_path: Path) -> None:
    found = rows(tmp_path)
    assert list(found) == [family.title for family in machines.families().values()]
    assert found["NVIDIA A100"]["compute capability"].text == "8.0"
    assert {cell.text for row in found.values() for name, cell in row.items() if name in proof.HEAD[2:]} == {"–"}


def test_a_compiled_architecture_is_that_of_every_family_that_has_it(tmp_path: Path) -> None:
    architectures = {"86": {"passed": 10, "skipped": 2}, "90": {"passed": 9, "failed": 1}, "80": {"skipped": 3}}
    law(tmp_path, "cpu-20260101-aaaaaaaaaa-compiled", "2026-01-01", 21, 1, architectures=architectures)
    law(tmp_path, "h200-20260102-bbbbbbbbbb-laws", "2026-01-02", 2561)
    found = rows(tmp_path)
    assert found["NVIDIA GeForce RTX 3090"]["compiled"].text == (
        "10 of 10 at aaaaaaa, 2026-01-01; 2 more are known to fail, or left out"
    )
    for title in ("NVIDIA H100", "NVIDIA H200"):
        assert (found[title]["compiled"].text, found[title]["compiled"].kind) == ("9 of 10 at aaaaaaa, 2026-01-01", BAD)
    assert found["NVIDIA A100"]["compiled"].text == "–"  # skipped is not tried
    assert found["h200"]["laws"].text == "2561 of 2561 at bbbbbbb, 2026-01-02"
    assert found["NVIDIA H100"]["laws"].text == "–"
    assert "the CPU" not in found  # what only compiled there ran no law


def test_what_ran_forced_is_not_what_ran_truly(tmp_path: Path) -> None:
    law(tmp_path, "h200-20260101-aaaaaaaaaa-laws-forced-sm86", "2026-01-01", 700)
    found = rows(tmp_path)
    forced = found["NVIDIA GeForce RTX 3090"]["on a newer GPU"]
    assert forced.text == "laws 700 of 700 at aaaaaaa, 2026-01-01, on h200"
    assert {row["laws"].text for row in found.values()} == {"–"}
    law(tmp_path, "h200-20251201-bbbbbbbbbb-laws", "2025-12-01", 600)
    assert rows(tmp_path)["h200"]["laws"].text.startswith("600 of 600 at bbbbbbb")


def test_laws_and_incidents_that_ran_forced_are_told_apart_by_memory(tmp_path: Path) -> None:
    law(tmp_path, "h200-20260101-aaaaaaaaaa-laws-forced-sm80-40gb", "2026-01-01", 700, 1)
    write_incidents(tmp_path, 6)
    folder = tmp_path / "regression"
    (own,) = folder.glob("h200/*.jsonl")
    forced = folder / "h200-forced-sm80-40gb" / own.name
    forced.parent.mkdir()
    forced.write_text(own.read_text().replace('"machine": "h200"', '"machine": "h200-forced-sm80-40gb"'))
    own.unlink()
    found = rows(tmp_path)
    cell = found["NVIDIA A100"]["on a newer GPU"]
    where = "on h200 with 40 GB"
    laws, replayed = "laws 700 of 701 at aaaaaaa, 2026-01-01", "incidents 4 green at 7c2b3ab, 2026-01-07"
    assert cell.text == f"{laws}, {where}; {replayed}, {where}"
    assert cell.kind == BAD
    assert {row["incidents"].text for row in found.values()} == {row["laws"].text for row in found.values()} == {"–"}
    entries = ledger.read(tmp_path)[0]
    assert evidence.laws(tmp_path, Repository()).text == "none recorded"
    assert evidence.incidents(entries, Repository(), "ledger.html").text == "none replayed"


def test_an_unlisted_gpu_that_ran_forced_is_no_gpu_that_is_not_listed(tmp_path: Path) -> None:
    law(tmp_path, "gpu-geforce-rtx-5090-20260101-aaaaaaaaaa-laws-forced-sm86", "2026-01-01", 700)
    assert "GPUs that are not listed" not in rows(tmp_path, **{"gpu-geforce-rtx-5090-forced-sm86": 3})


OF_A_MACHINE = proof.HEAD[4:]


def test_a_record_fills_the_row_of_its_machine_and_of_no_other_of_the_family(tmp_path: Path) -> None:
    law(tmp_path, "a100-80gb-sxm-mig-3g-40gb-20260101-aaaaaaaaaa-laws", "2026-01-01", 700)
    law(tmp_path, "a100-80gb-sxm-20260102-bbbbbbbbbb-laws", "2026-01-02", 800)
    benched = {"a100-80gb-sxm-mig-3g-40gb": 12, "3090-capped-280w": 3, "gpu-geforce-rtx-3090-laptop-gpu": 2}
    found = rows(tmp_path, **benched)
    assert list(found)[:4] == ["NVIDIA A100", "a100-80gb-sxm", "a100-80gb-sxm-mig-3g-40gb", "NVIDIA GeForce RTX 3090"]
    assert list(found)[4:6] == ["3090-capped-280w", "NVIDIA GeForce RTX 4090"]
    assert list(found)[-2:] == ["GPUs that are not listed", "gpu-geforce-rtx-3090-laptop-gpu"]
    told = {row: {name: cell.text for name, cell in cells.items()} for row, cells in found.items()}
    piece, whole = told["a100-80gb-sxm-mig-3g-40gb"], told["a100-80gb-sxm"]
    assert (piece["laws"], piece["bench"]) == ("700 of 700 at aaaaaaa, 2026-01-01", f"12 cases {AT}")
    assert (whole["laws"], whole["bench"]) == ("800 of 800 at bbbbbbb, 2026-01-02", "–")
    assert told["3090-capped-280w"]["bench"] == f"3 cases {AT}"
    assert told["gpu-geforce-rtx-3090-laptop-gpu"]["bench"] == f"2 cases {AT}"
    for family in ("NVIDIA A100", "NVIDIA GeForce RTX 3090", "GPUs that are not listed"):
        assert {told[family][name] for name in OF_A_MACHINE} == {""}, family
    assert {told["NVIDIA H100"][name] for name in OF_A_MACHINE} == {"–"}


def test_a_slice_s_incidents_calibration_and_baseline_are_not_its_board_s(tmp_path: Path) -> None:
    part = "a100-80gb-pcie-mig-1g-10gb"
    write_incidents(tmp_path, 6)
    write_accepted(tmp_path)
    for path in (*tmp_path.glob("regression/h200/*.jsonl"), *tmp_path.glob("baselines/*.jsonl")):
        path.write_text(path.read_text().replace('"h200"', f'"{part}"'))
    runs = [("a100-80gb-pcie", 4, RUN)]
    table = proof.table(tmp_path, runs, ledger.read(tmp_path)[0], [part], Repository())
    found = {row[0].text: [cell.text for cell in row[-5:]] for row in table.rows}
    assert found[part] == ["–", "4 green at 7c2b3ab, 2026-01-07", "–", "calibrated", "accepted"]
    assert found["a100-80gb-pcie"] == ["–", "–", f"4 cases {AT}", "–", "–"]
    assert "h200" not in found


def test_a_commit_says_how_far_back_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proof, "commits_since", {"a" * 10: 0, "b" * 10: 1, "c" * 40: 99}.get)
    architectures = {"86": {"passed": 10}}
    law(tmp_path, "cpu-20260101-dddddddddd-compiled", "2026-01-01", 10, architectures=architectures)
    law(tmp_path, "h200-20260102-bbbbbbbbbb-laws-forced-sm86-24gb", "2026-01-02", 700)
    law(tmp_path, "h200-20260103-aaaaaaaaaa-laws", "2026-01-03", 700)
    found = rows(tmp_path, h200=20)
    forced = found["NVIDIA GeForce RTX 3090"]["on a newer GPU"].text
    assert forced == "laws 700 of 700 at bbbbbbb, 2026-01-02, 1 commit ago, on h200 with 24 GB"
    assert found["h200"]["laws"].text == "700 of 700 at aaaaaaa, 2026-01-03, this commit"
    assert found["h200"]["bench"].text == f"20 cases {AT}, 99 commits ago"
    assert found["NVIDIA GeForce RTX 3090"]["compiled"].text == "10 of 10 at ddddddd, 2026-01-01"  # git knows none


def test_a_part_of_the_laws_does_not_hide_the_whole(tmp_path: Path) -> None:
    law(tmp_path, "h200-20260101-aaaaaaaaaa-laws", "2026-01-01", 1999, 1)
    law(tmp_path, "h200-20260102-bbbbbbbbbb-hopper", "2026-01-02", 264)
    assert rows(tmp_path)["h200"]["laws"].text == "1999 of 2000 at aaaaaaa, 2026-01-01"
    law(tmp_path, "h200-20260103-cccccccccc-laws", "2026-01-03", 2000)
    assert rows(tmp_path)["h200"]["laws"].kind == GOOD


def red(results: Path, name: str, utc: str, passed: int, *tests: str, skipped: int = 0) -> None:
    """Tests of tests.a failed, `passed` passed."""
    files = {"tests.a": {"passed": passed, "failed": len(tests), "skipped": skipped}}
    law(results, name, utc, passed, len(tests), failures=list(tests), files=files)


def test_a_failure_in_a_part_of_the_laws_is_named_until_its_test_has_passed(tmp_path: Path) -> None:
    law(tmp_path, "h200-20260101-aaaaaaaaaa-laws", "2026-01-01", 2000)
    red(tmp_path, "h200-20260102-bbbbbbbbbb-gpu", "2026-01-02", 9, "tests.a::test_x")
    whole = "2000 of 2000 at aaaaaaa, 2026-01-01"
    failing = Cell(f"{whole}; failed, not passed since: tests.a::test_x at bbbbbbb", BAD)
    assert rows(tmp_path)["h200"]["laws"] == failing
    law(tmp_path, "h200-20260103-cccccccccc-other", "2026-01-03", 30, files={"tests.b": {"passed": 30}})
    law(tmp_path, "h100-20260104-cccccccccc-gpu", "2026-01-04", 10, files={"tests.a": {"passed": 10}})
    forced = "h200-20260104-cccccccccc-gpu-forced-sm86"
    law(tmp_path, forced, "2026-01-04", 10, files={"tests.a": {"passed": 10}})
    red(tmp_path, "h200-20260105-cccccccccc-some", "2026-01-05", 9)  # not all of its file
    red(tmp_path, "h200-20260106-cccccccccc-skip", "2026-01-06", 10, skipped=1)
    assert rows(tmp_path)["h200"]["laws"] == failing
    red(tmp_path, "h200-20260107-dddddddddd-gpu", "2026-01-07", 9, "tests.a::test_y")
    found = rows(tmp_path)["h200"]["laws"]
    assert (found.text, found.kind) == (f"{whole}; failed, not passed since: tests.a::test_y at ddddddd", BAD)
    red(tmp_path, "h200-20260108-eeeeeeeeee-gpu", "2026-01-08", 10)
    assert rows(tmp_path)["h200"]["laws"] == Cell(whole, GOOD)


def test_a_failure_is_not_hidden_by_a_larger_summary_of_other_tests(tmp_path: Path) -> None:
    red(tmp_path, "h200-20260101-aaaaaaaaaa-gpu", "2026-01-01", 9, "tests.a::test_x")
    law(tmp_path, "h200-20260102-bbbbbbbbbb-laws", "2026-01-02", 2000, files={"tests.b": {"passed": 2000}})
    red(tmp_path, "h100-20260103-bbbbbbbbbb-gpu", "2026-01-03", 10)
    assert rows(tmp_path)["h200"]["laws"].kind == BAD
    headline = evidence.laws(tmp_path, Repository())
    assert (headline.text, headline.kind) == ("2000 passed, 1 failed in other records", BAD)
    assert headline.file == "laws/h200-20260101-aaaaaaaaaa-gpu.json"
    red(tmp_path, "h200-20260103-bbbbbbbbbb-gpu", "2026-01-03", 10)
    assert rows(tmp_path)["h200"]["laws"].kind == evidence.laws(tmp_path, Repository()).kind == GOOD


def test_what_failed_in_the_summary_that_is_shown_is_counted_and_not_named(tmp_path: Path) -> None:
    red(tmp_path, "h200-20260101-aaaaaaaaaa-laws", "2026-01-01", 9, "tests.a::test_x")
    assert rows(tmp_path)["h200"]["laws"] == Cell("9 of 10 at aaaaaaa, 2026-01-01", BAD)
    assert evidence.laws(tmp_path, Repository()).text == "1 of 10 failed"


def test_a_file_that_could_not_be_imported_has_passed_once_it_ran(tmp_path: Path) -> None:
    law(tmp_path, "h200-20260101-aaaaaaaaaa-laws", "2026-01-01", 2000)
    broken = {"failures": ["::tests.a"], "files": {"": {"failed": 1}}}
    law(tmp_path, "h200-20260102-bbbbbbbbbb-gpu", "2026-01-02", 0, 1, **broken)
    assert rows(tmp_path)["h200"]["laws"].kind == BAD
    red(tmp_path, "h200-20260103-cccccccccc-gpu", "2026-01-03", 3, skipped=1)
    assert rows(tmp_path)["h200"]["laws"].kind == GOOD


def test_of_many_failures_some_are_named(tmp_path: Path) -> None:
    law(tmp_path, "h200-20260101-aaaaaaaaaa-laws-forced-sm86", "2026-01-01", 2000)
    tests = [f"tests.a::test_{i}" for i in range(7)]
    red(tmp_path, "h200-20260102-bbbbbbbbbb-gpu-forced-sm86", "2026-01-02", 3, *tests)
    cell = rows(tmp_path)["NVIDIA GeForce RTX 3090"]["on a newer GPU"]
    named = ", ".join(f"{test} at bbbbbbb" for test in tests[:5])
    assert cell.text == (
        f"laws 2000 of 2000 at aaaaaaa, 2026-01-01, on h200; failed, not passed since: {named} and 2 more"
    )
    assert cell.kind == BAD


def test_what_ran_on_a_machine(tmp_path: Path) -> None:
    write_incidents(tmp_path, 6)
    write_calibration(tmp_path)
    write_accepted(tmp_path)
    found = rows(tmp_path, h200=20)
    told = {name: cell.text for name, cell in found["h200"].items()}
    assert (told["incidents"], told["bench"], told["baseline"], told["calibration"]) == (
        "4 green at 7c2b3ab, 2026-01-07",
        f"20 cases {AT}",
        "accepted",
        "–",
    )
    assert found["cpu"]["calibration"].text == "calibrated"
    write_incidents(tmp_path, SLOWER_FROM, red="window-leak")
    assert rows(tmp_path)["h200"]["incidents"].text.startswith("1 of 4 red at ")


def test_an_incident_that_was_skipped_is_named(tmp_path: Path) -> None:
    write_incidents(tmp_path, 6)
    (path,) = tmp_path.glob("regression/*/*.jsonl")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        if line["incident"] == "dup-blocks":
            line |= {"verdict": "SKIPPED", "ok": True}
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    told = rows(tmp_path)["h200"]["incidents"]
    assert (told.text, told.kind) == ("3 green, 1 skipped: dup-blocks, at 7c2b3ab, 2026-01-07", GOOD)


@pytest.mark.parametrize(
    "content",
    [
        b"[]",
        b"{",
        b'{"passed": "many", "failed": 0}',
        b'{"passed": true, "failed": 0}',
        b'{"passed": 1, "failed": -5}',
        b'{"passed": 1, "failed": 0, "architectures": {"86": {"passed": "x"}}}',
        b'{"passed": 1, "failed": 0, "architectures": []}',
        b'{"passed": 1, "failed": 1, "failures": [1]}',
        b'{"passed": 1, "failed": 0, "files": {"tests.a": 1}}',
        b"\xff",
    ],
)
def test_a_file_that_is_no_summary_proves_nothing(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "laws").mkdir()
    (tmp_path / "laws" / "h200-20260101-aaaaaaaaaa-laws.json").write_bytes(content)
    (tmp_path / "laws" / "anything.json").write_text('{"passed": 1, "failed": 0}')
    assert proof.law_records(tmp_path) == []


@pytest.mark.parametrize(("device", "other"), [("A CPU", False), ("Another CPU", True)])
def test_a_calibration_of_another_device_is_no_proof_and_is_said_to_be_one(
    device: str, other: bool, tmp_path: Path
) -> None:
    write_runs(tmp_path, 1, "cpu", device)
    write_calibration(tmp_path)  # of "A CPU"
    folder = build(tmp_path).index.parent
    assert ("calibrated" in (folder / "proof.html").read_text()) is not other
    said = " ".join((folder / "calibration.html").read_text().split())
    assert ("the newest figures under this name are of Another CPU" in said) is other


def test_the_first_page_leads_there(tmp_path: Path) -> None:
    write_runs(tmp_path, 1)
    index = build(tmp_path).index
    assert 'href="proof.html"' in index.read_text()
    assert "What is proven where" in (index.parent / "proof.html").read_text()


def test_a_summary_counts_what_was_compiled_for_each_architecture(tmp_path: Path) -> None:
    cases = [
        ("tests.a.test_compile", "test_every_kernel[86-heads0]", ""),
        ("tests.a.test_compile", "test_every_kernel[86-heads1]", "<skipped message='nightly'/>"),
        ("tests.a.test_decode_compile", "test_decode[90-a small group]", "<failure/>"),
        ("tests.a.test_compile", "test_what_does_not_fit", ""),
        ("tests.a.test_sizes", "test_sizes[86-24]", ""),
    ]
    inside = "".join(f"<testcase classname='{file}' name='{name}'>{end}</testcase>" for file, name, end in cases)
    (tmp_path / "x.xml").write_text(f"<testsuites><testsuite time='1'>{inside}</testsuite></testsuites>")
    found = conversion.summarize_junit(tmp_path / "x.xml")
    assert found["architectures"] == {"86": {"passed": 1, "skipped": 1}, "90": {"failed": 1}}
