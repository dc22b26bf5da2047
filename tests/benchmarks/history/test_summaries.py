"""Evidence in small says what the whole said: totals, failures, reasons, medians."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.__main__ import main
from benchmarks.history import conversion

JUNIT = """<testsuites><testsuite name="pytest" time="1.5" timestamp="2026-11-22T00:00:00+00:00">
<testcase classname="tests.a" name="one" time="1"/>
<testcase classname="tests.a" name="two"><failure message="wrong">where</failure></testcase>
<testcase classname="tests.b" name="three"><skipped message="needs a GPU"/></testcase>
<testcase classname="tests.b" name="four"><error message="no fixture"/></testcase>
<testcase time="0.001"/>
</testsuite></testsuites>"""


def test_junit_in_small(tmp_path: Path) -> None:
    """The last test had not ended when its run was interrupted."""
    (tmp_path / "a.xml").write_text(JUNIT)
    assert conversion.summarize_junit(tmp_path / "a.xml") == {
        "utc": "2026-11-22T00:00:00+00:00",
        "seconds": 1.5,
        "passed": 1,
        "failed": 2,
        "skipped": 1,
        "failures": ["tests.a::two", "tests.b::four"],
        "skipped_because": {"needs a GPU": 1},
        "architectures": {},
        "files": {"tests.a": {"passed": 1, "failed": 1}, "tests.b": {"skipped": 1, "failed": 1}},
    }


def test_heartbeats_in_small() -> None:
    lines = [
        {"step": n, "rank": 0, "utc": f"t{n}", "loss": 10.0 - n, "step_ms": None, "tokens_seen": 8 * n, "life": life}
        for life, numbers in ((1, range(1, 21)), (2, range(11, 28)))
        for n in numbers
    ]
    alarm = {"event": "alarm", "step": 20, "says": "slower"}
    first, second, event = map(json.loads, conversion.summarize_heartbeats([*lines[:20], alarm, *lines[20:]]))
    assert first == {"first_step": 1, "last_step": 25, "utc": "t25", "loss": -3.0, "tokens_seen": 200, "life": 2}
    assert second == {"first_step": 26, "last_step": 27, "utc": "t27", "loss": -16.5, "tokens_seen": 216, "life": 2}
    assert event == alarm


def test_convert_keeps_what_is_no_evidence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, text in (("good", JUNIT), ("torn", JUNIT[:100]), ("empty", "<testsuites/>")):
        (tmp_path / "laws").mkdir(exist_ok=True)
        (tmp_path / "laws" / f"{name}.xml").write_text(text)
    run = tmp_path / "train" / "two" / "a"
    run.mkdir(parents=True)
    (run / "heartbeat_rank0.jsonl").write_text('{"step": 1, "loss": 2.5}\n')
    assert main(["convert", "--out", str(tmp_path)]) == 1
    told = capsys.readouterr()
    assert json.loads(told.out) == {"files": 2, "records": 0, "refused": 2}
    assert "torn.xml" in told.err
    assert "empty.xml" in told.err
    assert sorted(path.name for path in (tmp_path / "laws").iterdir()) == ["empty.xml", "good.json", "torn.xml"]
    assert json.loads((run / "medians_rank0.jsonl").read_text())["loss"] == 2.5


def test_a_summary_is_never_replaced_by_another(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    heartbeats = tmp_path / "train" / "heartbeat_rank0.jsonl"
    heartbeats.parent.mkdir()
    heartbeats.write_text('{"step": 1, "loss": 2.5}\n')
    assert main(["convert", "--out", str(tmp_path)]) == 0
    heartbeats.write_text('{"step": 26, "loss": 1.5}\n')
    assert main(["convert", "--out", str(tmp_path)]) == 1
    assert "medians_rank0.jsonl is there already" in capsys.readouterr().err
    assert json.loads((heartbeats.parent / "medians_rank0.jsonl").read_text())["first_step"] == 1
    assert heartbeats.is_file()


@pytest.mark.parametrize("line", ["{torn", "3", "[" * 100_000])
def test_a_damaged_heartbeat_is_named_and_the_rest_is_converted(
    line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, text in (("a", f'{{"step": 1, "loss": NaN}}\n{line}\n'), ("b", '{"step": 1, "loss": NaN}\n')):
        (tmp_path / "train" / name).mkdir(parents=True)
        (tmp_path / "train" / name / "heartbeat_rank0.jsonl").write_text(text)
    assert main(["convert", "--out", str(tmp_path)]) == 1
    assert f"{tmp_path / 'train' / 'a' / 'heartbeat_rank0.jsonl'}:2: " in capsys.readouterr().err
    assert json.loads((tmp_path / "train" / "b" / "medians_rank0.jsonl").read_text()) == {
        "first_step": 1,
        "last_step": 1,
    }


@pytest.mark.parametrize(
    "change", [('time="1.5"', 'time="abc"'), ("<testsuites>", '<?xml version="1.0" encoding="foo"?><testsuites>')]
)
def test_odd_junit_is_named(change: tuple[str, str], tmp_path: Path) -> None:
    (tmp_path / "a.xml").write_text(JUNIT.replace(*change))
    with pytest.raises(ValueError, match=r"a\.xml is no JUnit XML"):
        conversion.summarize_junit(tmp_path / "a.xml")
