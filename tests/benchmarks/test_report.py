"""The page stands on whatever records there are, escapes what they say, and shows no figure that did not pass."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path

from benchmarks import records
from benchmarks.records import Outcome, Record
from benchmarks.report import build
from tests.benchmarks.synthetic import failed, key, passed

PNG_MAGIC = b"\x89PNG"


class Page(HTMLParser):
    """Text and links of a page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.text = ""
        self.links: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_data(self, data: str) -> None:
        self.text += data + "\n"

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.links += [value for name, value in attributes if name in ("src", "href") and value]


def write(results: Path, *found: Record) -> None:
    path = records.create_run(results, found[0].fingerprint)
    for record in found:
        records.append(path, record)


def test_an_empty_folder_gives_a_page_that_says_so(tmp_path: Path) -> None:
    assert "No run is recorded yet" in Page(build(tmp_path)).text


def test_pictures_lie_beside_the_page(tmp_path: Path) -> None:
    for length in (64, 128, 256):
        write(
            tmp_path, passed(key(implementation="sdpa-flash", length=length), length / 10), passed(key(length=length))
        )
    index = build(tmp_path)
    links = Page(index).links
    assert links == ["cpu-prefill-forward.png", "cpu-prefill-forward.svg"]
    assert (index.parent / links[0]).read_bytes().startswith(PNG_MAGIC)
    assert "<svg" in (index.parent / links[1]).read_text(encoding="utf-8")


def test_no_name_is_read_as_a_formula(tmp_path: Path) -> None:
    for length in (64, 128):
        write(tmp_path, passed(key(implementation="$\\frac{$", length=length)), passed(key(length=length)))
    index = build(tmp_path)
    assert (index.parent / "cpu-prefill-forward.svg").is_file()
    assert "$\\frac{$" in Page(index).text


def test_a_foreign_machine_name_writes_nothing_elsewhere(tmp_path: Path) -> None:
    results = tmp_path / "a" / "results"
    for length in (64, 128):
        write(results, passed(key(length=length)))
    for path in (results / "runs" / "cpu").iterdir():
        path.write_text(path.read_text(encoding="utf-8").replace('"machine":"cpu"', '"machine":"../../x"'))
    text = Page(build(results)).text
    assert "fingerprint.machine must be of a-z" in text
    assert {path.name for path in (results / "report").iterdir()} == {"index.html"}
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["results"]


def test_one_length_is_a_row_and_no_picture(tmp_path: Path) -> None:
    write(tmp_path, passed(key(implementation="sdpa-flash"), 25.0), passed(key(), 10.0))
    page = Page(build(tmp_path))
    assert page.links == []
    assert "25 ms (2.50×)" in page.text


def test_says_what_was_not_measured_and_why(tmp_path: Path) -> None:
    reason = "o: error 1 > budget 0 <script>alert('&')</script>"
    write(tmp_path, failed(key(), Outcome.INCORRECT, reason))
    index = build(tmp_path)
    assert "<script" not in index.read_text(encoding="utf-8")
    text = Page(index).text
    assert reason in text
    assert "INCORRECT" in text
    assert "A CPU" in text


def test_damaged_lines_are_on_the_page(tmp_path: Path) -> None:
    write(tmp_path, passed(key()))
    (tmp_path / "runs" / "cpu" / "torn.jsonl").write_text('{"key":', encoding="utf-8")
    text = Page(build(tmp_path)).text
    assert "torn.jsonl" in text
    assert "JSONDecodeError" in text
