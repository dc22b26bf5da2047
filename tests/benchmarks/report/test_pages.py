"""The pages stand on whatever there is, escape what it says, and show no figure that did not pass."""

from __future__ import annotations

import dataclasses
import json
import re
import time
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest

from benchmarks.cases.outcome import CaseOutcome
from benchmarks.history import run_file
from benchmarks.history.records import Record
from benchmarks.report import folder
from benchmarks.report.pages import ReportSettings, build
from tests.benchmarks import full_results, stored
from tests.benchmarks.synthetic import failed, key, passed

PICTURES = ReportSettings(script=False)
HOSTILE = "<script>alert('&')</script>"


class Page(HTMLParser):
    """Text and links of a page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.text = ""
        self.links: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))
        self.text = re.sub(r"\s+", " ", self.text)

    def handle_data(self, data: str) -> None:
        self.text += data

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.links += [value for name, value in attributes if name in ("src", "href") and value]


def write(results: Path, *found: Record) -> None:
    path = run_file.create(results, found[0].fingerprint)
    for record in found:
        run_file.append(path, record)


def machine_page(results: Path, name: str = "cpu") -> Path:
    return build(results).index.with_name(f"machine-{name}.html")


def test_an_empty_folder_gives_a_page_that_says_so(tmp_path: Path) -> None:
    assert "No run is recorded yet" in Page(build(tmp_path).index).text


def test_a_machine_s_page_says_what_its_recorded_inputs_follow(tmp_path: Path) -> None:
    followed = {"recorded": "at 64 tokens: a study <b>", "random": None}
    write(tmp_path, *(dataclasses.replace(passed(key(inputs=x)), inputs_follow=y) for x, y in followed.items()))
    found, damaged = run_file.read_all(tmp_path)
    assert not damaged
    assert {record.key.inputs: record.inputs_follow for record in found} == followed
    assert "recorded at 64 tokens: a study <b>" in Page(build(tmp_path).index.parent / "machine-cpu.html").text


def test_pictures_lie_beside_the_page(tmp_path: Path) -> None:
    for length in (64, 128, 256):
        write(
            tmp_path, passed(key(implementation="sdpa-flash", length=length), length / 10), passed(key(length=length))
        )
    report = build(tmp_path, PICTURES).index.parent
    svg = "cpu-prefill-forward-4x2x16-float32-random-inputs.svg"
    assert svg in Page(report / "cpu-prefill-forward-4x2x16.html").links
    assert "<svg" in (report / svg).read_text(encoding="utf-8")


@pytest.mark.parametrize("settings", [ReportSettings(), PICTURES], ids=["script", "pictures"])
def test_every_link_leads_to_a_file_beside_the_page(settings: ReportSettings, tmp_path: Path) -> None:
    for day in (1, 2):
        for length in (64, 128):
            write(tmp_path, *stored.run(day, passed(key(length=length))))
    report = build(tmp_path, settings).index.parent
    for path in report.glob("*.html"):
        files = [link.partition("#")[0] for link in Page(path).links if not link.startswith("data:")]
        assert all((report / link).is_file() for link in files if link), path


def test_without_a_script_there_is_none_and_with_one_no_picture_of_a_chart(tmp_path: Path) -> None:
    for length in (64, 128):
        write(tmp_path, passed(key(length=length)))
    report = build(tmp_path, PICTURES).index.parent
    assert not any("<script" in path.read_text() for path in report.glob("*.html"))
    assert {path.suffix for path in report.iterdir()} == {".html", ".svg", ".json"}
    build(tmp_path)
    assert {path.suffix for path in report.iterdir()} == {".html", ".js", ".json"}
    assert 'src="plotly.min.js"' in (report / "cpu-prefill-forward-4x2x16.html").read_text()
    assert "plotly" not in (report / "index.html").read_text(), "the first page need not load it"


def test_the_same_records_give_the_same_bytes_and_leftovers_go(tmp_path: Path) -> None:
    for length in (64, 128):
        write(tmp_path, passed(key(length=length)))
    report = build(tmp_path).index.parent
    listed = json.loads((report / folder.MANIFEST).read_text())
    (tmp_path / "beside.html").write_text("not of a report")
    (report / folder.MANIFEST).write_text(json.dumps([*listed, "old-picture.png", "../beside.html", 3]))
    (report / "old-picture.png").write_bytes(b"")
    (report / "photo.png").write_text("of a person")
    first = {path.name: path.read_bytes() for path in report.iterdir()}
    build(tmp_path)
    again = {path.name: path.read_bytes() for path in report.iterdir()}
    del first["old-picture.png"]
    assert again.pop(folder.MANIFEST) == json.dumps(listed, indent=0).encode() + b"\n"
    del first[folder.MANIFEST]
    assert again == first
    assert (tmp_path / "beside.html").is_file()
    (report / folder.MANIFEST).write_text("torn")
    build(tmp_path)
    assert json.loads((report / folder.MANIFEST).read_text()) == listed


def test_no_name_is_read_as_a_formula_or_a_path(tmp_path: Path) -> None:
    name = "$\\frac{$/../../\x00é漢"
    for length in (64, 128):
        write(tmp_path, passed(key(implementation=name, length=length)), passed(key(length=length, model=name)))
        write(tmp_path, passed(key(implementation=name, length=length)), passed(key(length=length)))
    for settings in (PICTURES, ReportSettings()):
        report = build(tmp_path, settings).index.parent
        assert "$\\frac{$" in Page(report / "machine-cpu.html").text
        assert (report / "cpu-prefill-forward-4x2x16.html").is_file()
        assert (report / "cpu-prefill-forward-4x2x16-float32-random-inputs.svg").is_file() == (not settings.script)
    assert {path.name for path in tmp_path.iterdir()} == {"runs", "report"}


def test_a_foreign_machine_name_writes_nothing_elsewhere(tmp_path: Path) -> None:
    results = tmp_path / "a" / "results"
    for length in (64, 128):
        write(results, passed(key(length=length)))
    for path in (results / "runs" / "cpu").iterdir():
        path.write_text(path.read_text(encoding="utf-8").replace('"machine":"cpu"', '"machine":"../../x"'))
    index = build(results).index
    assert "fingerprint.machine must be of a-z" in Page(index).text
    assert not list(index.parent.glob("*.svg"))
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["results"]


def test_one_length_is_a_row_and_no_picture(tmp_path: Path) -> None:
    write(tmp_path, passed(key(implementation="sdpa-flash"), 25.0), passed(key(), 10.0))
    page = Page(machine_page(tmp_path))
    assert not [link for link in page.links if link.endswith(".svg")]
    assert "25 ms (2.50×)" in page.text


def test_says_what_was_not_measured_and_why(tmp_path: Path) -> None:
    reason = f"o: error 1 > budget 0 {HOSTILE}"
    write(tmp_path, failed(key(), CaseOutcome.INCORRECT, reason))
    page = machine_page(tmp_path)
    for path in page.parent.glob("*.html"):
        assert "<script>alert" not in path.read_text(encoding="utf-8"), path
    text = Page(page).text
    assert reason in text
    assert "INCORRECT" in text
    assert "A CPU" in text
    assert "NSA is wrong on prefill-forward/4x2x16/b1/s64/float32" in Page(page.with_name("index.html")).text


def test_damaged_lines_are_on_the_page(tmp_path: Path) -> None:
    write(tmp_path, passed(key()))
    (tmp_path / "runs" / "cpu" / "torn.jsonl").write_text('{"key":', encoding="utf-8")
    text = Page(build(tmp_path).index).text
    assert "torn.jsonl:1: JSONDecodeError" in text


def test_a_reservation_is_told(tmp_path: Path) -> None:
    write(tmp_path, dataclasses.replace(passed(key()), unmet="half width 3 % > 1 %"))
    assert "half width 3 % > 1 %" in Page(machine_page(tmp_path)).text
    write(tmp_path, dataclasses.replace(passed(key(length=128)), queued_ahead=False))
    assert "the device waited for the host: the figure holds launches too" in Page(machine_page(tmp_path)).text
    write(tmp_path, dataclasses.replace(passed(key(length=256)), queued_ahead=True))
    assert Page(machine_page(tmp_path)).text.count("the device waited for the host") == 1


def test_ten_thousand_records_make_a_report_in_five_seconds(tmp_path: Path) -> None:
    """From nothing but the runs, on a core that takes 0.27 s for `parse`; what else the host does slows both."""
    count = sum(write_many_runs(tmp_path, machine, 66) for machine in ("a100", "h200"))
    assert count >= 10_000
    before_s = cpu_s(parse)
    build_s = cpu_s(lambda: build(tmp_path))
    after_s = cpu_s(parse)
    print(f"{build_s:.1f} s; parsing {before_s:.2f} s before, {after_s:.2f} s after")
    host = (before_s + after_s) / 2 / 0.27
    assert build_s < 5 * host  # it takes a quarter of that
    build(tmp_path, PICTURES)
    assert len(list((tmp_path / "report").glob("*-trend-*.svg"))) >= 10


def parse() -> None:
    """A yardstick of the host: 10,000 lines of a kilobyte, none of which is kept for the garbage collector."""
    line = json.dumps([number / 7 for number in range(60)])
    for _ in range(10_000):
        json.loads(line)


def cpu_s(call: Callable[[], object]) -> float:
    """CPU time of this process alone."""
    begin = time.process_time()
    call()
    return time.process_time() - begin


def write_many_runs(results: Path, machine: str, runs: int) -> int:
    """One run, and the same again under other dates and commits; how many records that is."""
    full_results.write_runs(results, 1, machine, machine)
    first = full_results.run_of(0, machine)
    (path,) = (results / "runs" / machine).iterdir()
    text = path.read_text()
    for number in range(1, runs):
        other = full_results.run_of(number, machine)
        again = text.replace(first.utc, other.utc).replace(str(first.commit), str(other.commit))
        run_file.create(results, other).write_text(again)
    return runs * (text.count("\n") - 1)
