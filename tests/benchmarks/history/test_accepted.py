"""A baseline moves only with a reason, by appending; drifts, new and missing cases show beside it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.__main__ import main
from benchmarks.cases.key import Key
from benchmarks.history import accepted, run_file
from benchmarks.history.accepted import Acceptance
from benchmarks.history.records import Record
from benchmarks.history.samples import SampleSummary
from benchmarks.history.store import Store
from benchmarks.report import changes
from harness import jsonl
from tests.benchmarks.synthetic import key, passed

A, B, NEW = key("decode", length=128), key("decode", length=256), key("decode", length=512)


def utc(day: int) -> str:
    return f"2026-01-{day + 1:02}T00:00:00Z"


def write_run(results: Path, day: int, *latencies_ms: tuple[Key, float]) -> None:
    found: Sequence[Record] = [passed(the_key, latency_ms, utc(day)) for the_key, latency_ms in latencies_ms]
    path = run_file.create(results, dataclasses.replace(found[0].fingerprint, utc=utc(day)))
    for record in found:
        run_file.append(path, record)


@pytest.fixture
def results(tmp_path: Path) -> Path:
    for day in range(6):
        write_run(tmp_path, day, (A, 10.0 + 0.0625 * (day % 2)), (B, 20.0))
    return tmp_path


def accept(results: Path, case: str = "decode", reason: str = "measured twice") -> int:
    return main(["accept", "--case", case, "--reason", reason, "--gpu", "cpu", "--out", str(results)])


def last_line(capsys: pytest.CaptureFixture[str]) -> dict[str, object]:
    summary: dict[str, object] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return summary


def test_who_accepts_is_named_as_git_does(monkeypatch: pytest.MonkeyPatch, results: Path) -> None:
    monkeypatch.setenv("GIT_AUTHOR_NAME", "A Name")
    monkeypatch.setenv("GIT_AUTHOR_EMAIL", "a@host")
    assert accept(results) == 0
    found, _ = accepted.read(results)
    assert {one.who for one in found} == {"A Name <a@host>"}


def test_who_has_no_name_is_told_how_to_give_one(
    monkeypatch: pytest.MonkeyPatch, results: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a container the user's number has no name; that ended in a traceback."""

    def unknown() -> str:
        raise KeyError("getpwuid(): uid not found: 4242")

    monkeypatch.setattr("harness.repository.git", lambda *_: None)
    monkeypatch.setattr("getpass.getuser", unknown)
    assert accept(results) == 2
    assert "git config user.name NAME" in capsys.readouterr().err
    assert accepted.read(results)[0] == []


def test_appends_who_when_and_why(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert accept(results, reason="first level") == 0
    summary = last_line(capsys)
    assert summary["accepted"] == [A.name, B.name]
    assert summary["states"] == {"AT_BASELINE": 2}
    (first, second), damaged = accepted.read(results)
    assert damaged == []
    assert (first.case, first.latency_ms, first.previous_ms, first.reason) == (A.name, 10.03125, None, "first level")
    assert first.who
    assert first.utc.endswith("Z")
    assert second.latency_ms == 20.0


def test_a_later_acceptance_is_appended_and_counts(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    accept(results)
    before = accepted.path(results).read_bytes()
    for day in range(6, 10):
        write_run(results, day, (A, 12.0), (B, 20.0))
    assert accept(results, A.name, "keys are checked now") == 0
    assert accepted.path(results).read_bytes().startswith(before)
    entry = accepted.read(results)[0][-1]
    assert (entry.latency_ms, entry.previous_ms) == (12.0, 10.03125)
    assert last_line(capsys)["states"] == {"AT_BASELINE": 2}
    assert accepted.current(results)["cpu", "A CPU", A.name] == entry


@pytest.mark.parametrize("reason", ["", "  "])
def test_refuses_to_move_without_a_reason(results: Path, capsys: pytest.CaptureFixture[str], reason: str) -> None:
    assert accept(results, reason=reason) == 2
    assert "--reason must say why the baseline moves" in capsys.readouterr().err
    assert not accepted.path(results).exists()
    with pytest.raises(SystemExit) as caught:
        main(["accept", "--case", "decode", "--gpu", "cpu", "--out", str(results)])
    assert caught.value.code == 2
    with pytest.raises(ValueError, match="reason must say why"):
        Acceptance("", "", reason, "cpu", "A CPU", A.name, 1.0, None)


def test_refuses_a_level_that_one_run_alone_has_seen(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(results, 6, (A, 15.0), (B, 20.0))
    assert accept(results) == 2
    said = capsys.readouterr().err
    assert f"the last run of {A.name} differs by +49.5% from its level of 10.03 ms; a second run must confirm" in said
    assert not accepted.path(results).exists()
    write_run(results, 7, (A, 15.0), (B, 20.0))
    assert accept(results) == 0


def test_the_first_baselines_of_a_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One run: what is trustworthy is accepted, the rest is named; a second time there is nothing left to accept."""
    doubted = dataclasses.replace(passed(B, 20.0, utc(0)), other_load=1.7)
    path = run_file.create(tmp_path, doubted.fingerprint)
    for record in (passed(A, 10.0, utc(0)), doubted):
        run_file.append(path, record)
    words = ["accept", "--first", "--reason", "first contact", "--gpu", "cpu", "--out", str(tmp_path)]
    assert main(words) == 0
    said = capsys.readouterr().out
    assert json.loads(said.splitlines()[-1])["accepted"] == [A.name]
    assert f"not accepted: 1 of the 1 run(s) in the level of {B.name} are not trustworthy" in said
    assert main(words) == 2
    assert "--first: no case can be accepted; the lines above say why" in capsys.readouterr().err
    assert main([*words, "--despite", "busy on purpose"]) == 0
    assert [entry.case for entry in accepted.read(tmp_path)[0]] == [A.name, B.name]
    assert main(words) == 2
    assert "that has no baseline yet" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([*words, "--case", "decode"])


def test_refuses_a_case_that_was_never_measured(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert accept(results, "decode,train-step") == 2
    assert "--case: no case of NSA that cpu has measured is named 'train-step'" in capsys.readouterr().err


@pytest.mark.parametrize("name", [A.name, A.case])
def test_takes_the_names_that_a_run_prints(results: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert accept(results, name) == 0
    assert last_line(capsys)["accepted"] == [A.name]


DOUBTED: list[tuple[dict[str, Any], str]] = [
    ({"unmet": "median known to 9.00%, wanted 2.00%"}, "unmet precision (median known to 9.00%, wanted 2.00%)"),
    ({"samples": SampleSummary.of((1.0, 2.0))}, "only 2 sample(s)"),
    ({"other_load": 1.7}, "load 1.7 of other processes on the cores of 2 thread(s)"),
]


@pytest.mark.parametrize(("doubt", "why"), DOUBTED, ids=["unmet", "few samples", "load"])
def test_refuses_what_is_not_trustworthy_unless_told_why(
    doubt: dict[str, Any], why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for day in range(2):
        record = dataclasses.replace(passed(A, 10.0, utc(day)), **doubt)
        run_file.append(run_file.create(tmp_path, record.fingerprint), record)
    assert accept(tmp_path) == 2
    said = capsys.readouterr().err
    assert f"2 of the 2 run(s) in the level of {A.name} are not trustworthy: {why}." in said
    assert not accepted.path(tmp_path).exists()
    words = ["accept", "--case", "decode", "--reason", "first", "--gpu", "cpu", "--out", str(tmp_path), "--despite"]
    assert main([*words, " "]) == 2
    assert main([*words, "the only machine is a busy one"]) == 0
    (entry,), _ = accepted.read(tmp_path)
    assert entry.despite == "the only machine is a busy one"


def test_one_doubted_run_among_many_is_no_reason_to_refuse(results: Path) -> None:
    record = dataclasses.replace(passed(A, 10.0, utc(6)), other_load=2.0)
    run_file.append(run_file.create(results, record.fingerprint), record)
    assert accept(results, A.name) == 0


def test_new_missing_slower_and_faster_cases_are_reported(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    accept(results)
    gone = Acceptance(utc(0), "A Person", "once", "cpu", "A CPU", "decode/gone/nsa", 3.0, None)
    jsonl.append(accepted.path(results), gone)
    for day in range(6, 26):  # half a percent a run, far below what a single step may be
        write_run(results, day, (A, 10.0 * 1.005 ** (day - 5)), (NEW, 5.0))
    capsys.readouterr()
    assert accept(results, NEW.name) == 0
    said = capsys.readouterr().out
    summary = json.loads(said.splitlines()[-1])
    assert summary["states"] == {"SLOWER": 1, "MISSING": 2, "AT_BASELINE": 1}
    assert summary["missing"] == [B.name, "decode/gone/nsa"]
    assert f"SLOWER         {A.name}" in said


def test_a_new_case_is_reported_until_it_is_accepted(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    accept(results, A.name)
    summary = last_line(capsys)
    assert (summary["new"], summary["states"]) == ([B.name], {"AT_BASELINE": 1, "NEW": 1})


def test_a_level_under_other_conditions_is_not_called_slower(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    accept(results, A.name)
    (entry,) = accepted.read(results)[0]
    assert (entry.path, entry.fingerprint) == ("torch", passed(A, utc=utc(5)).fingerprint)
    elsewhere = dataclasses.replace(passed(A, utc=utc(6)).fingerprint, torch="2.14.0")
    path = run_file.create(results, elsewhere)
    for latency_ms in (15.0, 15.0):
        run_file.append(path, dataclasses.replace(passed(A, latency_ms), fingerprint=elsewhere))
    capsys.readouterr()
    accept(results, B.name)
    said = capsys.readouterr().out
    assert "SLOWER" not in said
    assert f"NOT_COMPARABLE {A.name}" in said
    assert "(torch 2.13.0 -> 2.14.0)" in said
    opened = Store(results)
    history = opened.history("cpu")
    other_path = dataclasses.replace(entry, path="triton", fingerprint=elsewhere)
    (standing, _) = accepted.standings("cpu", history, {("cpu", "A CPU", A.name): other_path})
    assert standing.differences == ("path triton -> torch",)
    (row,) = changes.standings([standing]).rows
    assert row[1].text == "NOT_COMPARABLE; path triton -> torch"
    unknown = dataclasses.replace(entry, path=None, fingerprint=None)  # a line of before
    (standing, _) = accepted.standings("cpu", history, {("cpu", "A CPU", A.name): unknown})
    assert standing.state is accepted.State.SLOWER


def test_an_incomplete_line_costs_itself_alone(results: Path) -> None:
    accept(results, A.name)
    with accepted.path(results).open("a") as file:
        file.write('{"utc": "2026-')
    accept(results, B.name)
    entries, damaged = accepted.read(results)
    assert [entry.case for entry in entries] == [A.name, B.name]
    (what,) = damaged
    assert what.startswith("accepted.jsonl:2: ")
