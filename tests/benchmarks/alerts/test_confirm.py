"""A paired re-run says if an alert holds, and which commit it is: the real command, with `compare` replaced."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import pytest

from benchmarks.__main__ import main
from benchmarks.ab import result
from benchmarks.ab.checkout import Sources
from benchmarks.ab.device_code import DeviceCode
from benchmarks.ab.result import CompareVerdict
from benchmarks.alerts import confirm
from benchmarks.cases.key import Key
from benchmarks.commands import alerts as command
from benchmarks.commands import compare, options
from benchmarks.history.alerts import AlertState
from harness import machines
from tests.benchmarks.alerts.project import CASES, DEVICE, Project, answer_compare, comparison

CPU = machines.machine("cpu", None)
DECODE, PREFILL = (options.nsa_cases(CPU, [mode])[0] for mode in ("decode", "prefill-forward"))


@pytest.fixture
def slower(project: Project) -> Project:
    """Two cases of the CPU's suite became slower at the third of four commits that no run saw apart."""
    for latency_ms in (10.0, 11.0):
        project.repository.commit(f"before {latency_ms}")
        for _ in range(3):
            project.night(measured=False)
        last = project.night(measured=False)
        for _ in range(5):
            project.run(last, latency_ms, latency_ms + 0.2, cases=(DECODE, PREFILL))
    return project


def alerts(project: Project, *words: str) -> int:
    return main(["alerts", *words, "--gpu", "cpu", "--out", str(project.results)])


def test_the_whole_life_of_an_alert(
    slower: Project, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    good, culprit, last = slower.commits[3], slower.commits[6], slower.commits[7]
    asked = answer_compare(monkeypatch, [culprit, last])
    assert alerts(slower, "confirm") == 0
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    alert = slower.alert
    assert summary["open"] == [alert.id]
    assert summary["events"] == [f"{alert.id}: new", f"{alert.id}: confirmed", f"{alert.id}: confirmed"]
    assert asked[0] == (last, (DECODE.name, PREFILL.name))
    assert {names for _, names in asked[1:]} == {(DECODE.name,)}
    assert (alert.state, alert.suspects, alert.good) == (AlertState.CONFIRMED, (culprit,), slower.commits[5])
    assert alert.owner == "Test"
    assert [round(case.change, 2) for case in alert.cases] == [0.12, 0.12]
    assert alert.history[1].why == f"{last[:10]} beside {good[:10]}: 2 SLOWER"
    assert alert.why.startswith(f"bisect on {DECODE.name}: found, asked ")
    assert len(result.read(slower.results)[0]) == len(asked) + 1  # each answer is kept, two of the first
    assert alerts(slower, "confirm") == 0
    assert alert == slower.alert, "what is confirmed is not measured again"
    for latency_ms in (10.0, 10.0):
        slower.run(slower.night(measured=False), latency_ms, latency_ms + 0.2, cases=(DECODE, PREFILL))
    assert alerts(slower) == 0
    assert slower.alert.state is AlertState.FIXED


@pytest.mark.parametrize("verdict", [CompareVerdict.SAME, CompareVerdict.FASTER])
def test_what_does_not_come_again_is_not_reproduced(
    slower: Project, verdict: CompareVerdict, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = answer_compare(monkeypatch, [], verdict)
    assert alerts(slower, "confirm") == 0
    assert slower.alert.state is AlertState.NOT_REPRODUCED
    assert slower.alert.why.endswith(f": 2 {verdict.value}")
    assert alerts(slower, "confirm") == 0
    assert len(asked) == 1
    assert len(slower.alert.history) == 2


def test_a_later_comparison_that_is_slower_opens_it_again(slower: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    answer_compare(monkeypatch, [])
    alerts(slower, "confirm")
    one = comparison(slower.commits[3], slower.commits[7], CompareVerdict.SLOWER, DECODE, utc="2100-01-01T00:00:00Z")
    path = result.path(slower.results, one.utc, one.base, one.head)
    path.write_text(json.dumps(dataclasses.asdict(one)) + "\n")
    assert alerts(slower) == 0
    assert (slower.alert.state, slower.alert.why) == (
        AlertState.NEW,
        "opened again; a later comparison is SLOWER",
    )


def test_what_is_not_decided_stays_and_says_so_once(
    slower: Project, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = answer_compare(monkeypatch, [], CompareVerdict.UNDECIDED)
    for _ in range(2):
        assert alerts(slower, "confirm") == 0
    assert len(asked) == 2
    assert [event.state for event in slower.alert.history] == [AlertState.NEW] * 2
    assert slower.alert.why.endswith(": 2 UNDECIDED"), "no figures, which differ each night"
    assert "not decided" in capsys.readouterr().out


def test_one_slower_case_confirms_and_the_failed_ones_decide_nothing(slower: Project) -> None:
    slower.update()
    alert = slower.alert
    for verdicts, state in (("SLOWER SAME", AlertState.CONFIRMED), ("FAILED SAME", AlertState.NEW)):
        found = [
            comparison(alert.good or "", alert.suspects[-1], CompareVerdict(verdict), case)
            for verdict, case in zip(verdicts.split(), (DECODE, PREFILL), strict=True)
        ]
        event, shown = confirm.confirm(
            alert, lambda good, other, names, found=found: found, lambda: "2026-09-01T00:00:00Z"
        )
        assert event.state is state
        assert (shown is not None) == (state is AlertState.CONFIRMED)


def test_the_same_code_is_not_measured(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = project.nights(6, 10.0)[-1]
    for _ in range(3):
        project.run(commit, 11.0)
    asked = answer_compare(monkeypatch, [])
    assert alerts(project, "confirm") == 0
    assert asked == []
    assert project.alert.state is AlertState.NOT_REPRODUCED
    assert "the code is the same" in project.alert.why


def test_cases_that_the_suite_has_no_more_decide_nothing(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    project.nights(6, 10.0)
    project.nights(3, 11.0)
    asked = answer_compare(monkeypatch, [])
    assert alerts(project, "confirm") == 0
    assert asked == []
    assert project.alert.state is AlertState.NEW
    assert "today's suite has none of its cases" in project.alert.why


def test_a_commit_that_is_not_here_is_said_and_the_next_alert_is_tried(
    slower: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    slower.update()
    (path,) = (slower.results / "alerts").glob("*.jsonl")
    path.write_text(path.read_text().replace(slower.commits[3], "f" * 40))
    asked = answer_compare(monkeypatch, [])
    assert alerts(slower, "confirm") == 0
    assert asked == []
    assert slower.alert.state is AlertState.NEW
    assert "must name a commit" in slower.alert.why


def test_an_alert_of_another_machine_is_left_alone(
    slower: Project, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    slower.update()
    (path,) = (slower.results / "alerts").glob("*.jsonl")
    path.write_text(path.read_text().replace(json.dumps(DEVICE)[1:-1], "Another CPU"))
    shutil.rmtree(slower.results / "runs")
    asked = answer_compare(monkeypatch, [])
    assert alerts(slower, "confirm", "--alert", path.stem) == 2
    assert f"--alert must name an open alert of cpu on {DEVICE}" in capsys.readouterr().err
    assert asked == []


def test_the_command_refuses_what_it_cannot_do(
    slower: Project, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert alerts(slower, "--alert", "cpu-0123456789") == 2
    assert "--alert goes with `alerts confirm`" in capsys.readouterr().err
    assert alerts(slower, "confirm", "--alert", "cpu-0123456789") == 2
    assert "--alert must name an open alert" in capsys.readouterr().err


def test_an_interrupt_keeps_what_was_measured(slower: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    slower.update()

    def measure(machine: object, keys: list[Key], *_: object) -> tuple[list[object], bool]:
        found = [comparison("a" * 40, "b" * 40, CompareVerdict.UNDECIDED, one) for one in keys]
        return list(found), True

    monkeypatch.setattr("benchmarks.ab.paired_run.measure", measure)
    assert alerts(slower, "confirm") == 130
    assert len(result.read(slower.results)[0]) == 2
    assert slower.alert.state is AlertState.NEW


def test_the_slowest_case_of_each_mode_comes_first(project: Project) -> None:
    cases = (*CASES[:6], DECODE, PREFILL)
    project.nights(6, *[10.0] * 6) and [project.run(project.commits[-1], *[10.0] * 8, cases=cases) for _ in range(5)]
    slow = project.night(measured=False)
    for _ in range(3):
        project.run(slow, 13.0, 14.0, 12.0, 12.0, 12.0, 12.0, 11.0, 12.5, cases=cases)
    project.update()
    names = confirm.worst(project.alert)
    assert len(names) == confirm.MOST_CASES
    assert names == [CASES[1].name, DECODE.name, CASES[0].name, PREFILL.name]


def codes(table: dict[str, str]) -> tuple[list[str], confirm.Compile]:
    """(commits that were compiled, a compiler that says this of each)."""
    compiled: list[str] = []

    def compile_(commit: str, key: Key) -> DeviceCode:
        compiled.append(commit)
        return DeviceCode(table.get(commit))

    return compiled, compile_


def test_commits_with_the_kernels_of_the_good_or_the_slow_one_are_not_measured(slower: Project) -> None:
    slower.update()
    alert = slower.alert
    good, (*_, culprit, last) = alert.good or "", alert.suspects
    shown = comparison(good, last, CompareVerdict.SLOWER, DECODE)
    same = dict.fromkeys([good, *alert.suspects[:-2]], "fast")
    asked: list[str] = []

    def compare(_: str, commit: str, names: object) -> list[result.ComparisonResult]:
        asked.append(commit)
        slow = commit in (culprit, last)
        return [comparison(good, commit, CompareVerdict.SLOWER if slow else CompareVerdict.SAME, DECODE)]

    utc = lambda: "2026-09-01T00:00:00Z"  # noqa: E731
    found = confirm.find_commit(alert, shown, compare, codes({**same, culprit: "slow", last: "slow"})[1], utc)
    assert (found.suspects, asked) == ((culprit,), [])
    assert found.why.endswith("of them have the same kernels as the good or the slow commit and were not measured")
    for told in ({**same, culprit: "other", last: "slow"}, {}, dict.fromkeys([*same, culprit, last], "equal")):
        asked.clear()
        found = confirm.find_commit(alert, shown, compare, codes(told)[1], utc)
        assert found.suspects == (culprit,)
        assert culprit in asked, "neither the one nor the other: it is measured"
    compiled, compile_ = codes({})
    assert not DeviceCode(None).same(DeviceCode(None))
    confirm.find_commit(alert, shown, compare, compile_, utc)
    assert set(compiled) == {good, last}, "where the good one is not known no other is asked"


def test_only_a_gpu_has_device_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rules = compare.rules_for(tmp_path, CPU, result.Rules.interim_analyses[-1])
    assert command._Remeasure(CPU, options.RESULTS, rules).compile is None
    on_gpu = command._Remeasure(dataclasses.replace(CPU, device="cuda"), options.RESULTS, rules)
    asked: list[tuple[str, str]] = []

    def device_code(side: Sources, key: Key, gpu: int) -> str:
        asked.append((side.side.ref, key.name))
        return f"code {gpu}"

    monkeypatch.setattr(command.device_code, "of", device_code)
    monkeypatch.setattr(command.device_code, "visible_gpu", lambda: 90)
    key = options.nsa_cases(CPU, ["decode"])[0]
    assert on_gpu.compile is not None
    assert [on_gpu.compile("HEAD", key) for _ in range(2)] == ["code 90"] * 2
    assert asked == [("HEAD", key.name)], "a commit is compiled once"
