"""Alerts follow the records: one per cause, opened once, closed where the level is back or a person accepted it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.ab import checkout
from benchmarks.ab.result import CompareVerdict
from benchmarks.history import alerts
from benchmarks.history.alerts import Alert, AlertEvent, AlertState
from tests.benchmarks.alerts.project import CASES, Project

ALL = len(CASES)


def test_nineteen_cases_at_one_commit_are_one_alert(project: Project) -> None:
    before = project.nights(6, *[10.0] * ALL)
    slow = project.nights(3, *[11.0] * ALL)
    assert project.update() == ["new"]
    alert = project.alert
    assert (alert.state, alert.machine, alert.id) == (AlertState.NEW, "cpu", f"cpu-{slow[0][:10]}")
    assert (alert.good, alert.suspects, alert.owner) == (before[-1], (slow[0],), "Test")
    assert len(alert.cases) == ALL
    assert alert.why == "19 cases are slower, the worst by 10.0%"
    (first, *_) = alert.cases
    assert first.change == pytest.approx(0.1)
    assert first.interval is not None
    assert 0.07 < first.interval[0] < 0.1 < first.interval[1] < 0.13
    (command,) = alert.commands
    assert command.startswith(f"python -m benchmarks compare {before[-1]} {slow[0]} --gpu cpu --cases prefill-forward/")


def test_the_same_records_again_change_nothing(project: Project) -> None:
    project.nights(6, 10.0, 10.0)
    project.nights(3, 11.0, 12.0)
    project.update(day=1)
    before = project.alert
    assert project.update(day=2) == []
    assert project.alert == before


def test_two_causes_at_neighbouring_commits_stay_two(project: Project) -> None:
    project.nights(6, 10.0, 10.0, 10.0)
    first = project.night(11.0, 10.0, 11.5)
    second = project.night(11.0, 12.0, 11.5)
    project.nights(3, 11.0, 12.0, 11.5)
    assert project.update() == ["new", "new"]
    by_cause = {alert.suspects: [case.case for case in alert.cases] for alert in project.alerts}
    assert by_cause == {(first,): [CASES[2].name, CASES[0].name], (second,): [CASES[1].name]}
    assert project.update(day=2) == []


def test_a_case_with_a_wider_range_of_suspects_belongs_to_the_commit_that_the_others_know(project: Project) -> None:
    """A case that a quick run left out was last fast some commits earlier."""
    project.nights(6, 10.0, 10.0)
    project.night(10.0)
    before = project.night(10.0)
    slow = project.night(11.0, 11.0)
    project.nights(3, 11.0, 11.0)
    project.update()
    assert (project.alert.good, project.alert.suspects) == (before, (slow,))
    assert len(project.alert.cases) == 2


def test_several_commits_between_two_runs_are_all_suspect(project: Project) -> None:
    good = project.nights(6, 10.0)[-1]
    between = [project.night(measured=False) for _ in range(2)]
    slow = project.nights(3, 11.0)[0]
    project.update()
    alert = project.alert
    assert (alert.good, alert.suspects, alert.owner) == (good, (*between, slow), "unknown: 3 commits")
    assert alert.commands[1] == f"python -m benchmarks bisect {good} {slow} --gpu cpu --case {CASES[0].name}"


def test_a_commit_that_leaves_the_code_alone_is_not_suspect(project: Project) -> None:
    good = project.nights(6, 10.0)[-1]
    page = project.repository.commit("version 5", page="a page")
    project.run(page, 11.0)
    for _ in range(2):
        project.run(page, 11.0)
    project.update()
    assert (project.alert.suspects, project.alert.owner) == ((), "unknown: no commit")
    assert project.alert.good == good
    assert project.alert.commands == ()
    assert project.update(day=2) == []


def test_neither_a_single_run_nor_a_speed_up_opens_an_alert(project: Project) -> None:
    project.nights(6, 10.0, 10.0)
    project.nights(3, 10.0, 8.0)
    project.night(12.0, 8.0)
    assert project.update() == []


def test_runs_of_changed_sources_name_no_commit(project: Project) -> None:
    good = project.nights(6, 10.0)[-1]
    project.run(good, 10.0, dirty=True)
    project.run(good, 11.0, dirty=True)
    slow = project.nights(2, 11.0)[0]
    project.update()
    assert (project.alert.good, project.alert.suspects) == (good, (slow,))


def test_a_slowdown_that_was_over_before_the_first_update_opens_none(project: Project) -> None:
    for latency_ms in (10.0, 11.0, 10.0):
        project.nights(5, latency_ms)
    assert project.update() == []


def test_an_alert_is_fixed_when_every_case_is_back(project: Project) -> None:
    project.nights(6, 10.0, 10.0)
    project.nights(3, 11.0, 12.0)
    project.update(day=1)
    project.nights(3, 10.0, 12.0)
    assert project.update(day=2) == []
    project.nights(3, 10.0, 10.1)
    assert project.update(day=3) == ["fixed"]
    assert not project.alert.is_open
    assert project.update(day=4) == []
    project.nights(3, 11.0, 10.0)
    assert project.update(day=5) == ["new"], "another commit, another alert"
    assert len(project.alerts) == 2


def test_a_clock_that_is_behind_that_of_another_runner_closes_an_alert_all_the_same(project: Project) -> None:
    project.nights(6, 10.0)
    project.nights(3, 11.0)
    project.update(day=20)
    project.nights(3, 10.0)
    assert project.update(day=19) == ["fixed"]
    assert not project.alert.is_open
    assert project.update(day=21) == []


@pytest.mark.parametrize(("between_ms", "suspects"), [((10.55, 10.45), 2), ((10.45, 11.0), 1)])
def test_noise_that_moves_where_a_change_is_found_makes_no_second_alert(
    project: Project, between_ms: tuple[float, float], suspects: int
) -> None:
    """Of the run between, which was half as slow, one case is found to be fast and the other slow."""
    noise_ms = (0.2, -0.2, 0.1, -0.15, 0.2, -0.1, 0.15, -0.2)
    for noise in noise_ms:
        project.night(10.0 + noise, 10.0 + noise)
    first = project.night(*between_ms)
    after = [project.night(11.0 + noise, 11.0 + noise) for noise in noise_ms]
    project.update()
    assert project.alert.suspects == (first, after[0])[:suspects]
    assert len(project.alert.cases) == 2


def test_an_alert_is_accepted_with_the_reason_that_a_person_gave(project: Project) -> None:
    project.nights(6, 10.0, 10.0)
    project.nights(3, 11.0, 12.0)
    project.update(day=1)
    project.accept(CASES[0], 11.0)
    assert project.update(day=2) == []
    project.accept(CASES[1], 12.0, "gradients are checked too")
    assert project.update(day=3) == ["accepted"]
    who = "A Maintainer <a@example.org>"
    assert project.alert.why == f"gradients are checked too ({who}); keys are checked now ({who})"
    assert project.update(day=4) == []
    project.nights(4, 11.0, 13.0)
    assert project.update(day=5) == ["new"], "slower than accepted"


def test_a_further_case_joins_the_alert_of_its_commit_and_opens_it_again(project: Project) -> None:
    project.nights(6, 10.0, 10.0)
    slow = project.night(11.0, 12.0)
    project.nights(2, 11.0)
    project.update(day=1)
    assert [case.case for case in project.alert.cases] == [CASES[0].name]
    project.accept(CASES[0], 11.0)
    assert project.update(day=2) == ["accepted"]
    project.nights(2, 11.0, 12.0)
    assert project.update(day=3) == ["new"]
    assert project.alert.why == "opened again; 1 case is slower too"
    assert [case.case for case in project.alert.cases] == [CASES[1].name, CASES[0].name]
    assert project.alert.suspects == (slow,)


def test_a_wider_range_of_a_further_case_widens_no_alert_that_is_confirmed(project: Project) -> None:
    project.nights(6, 10.0, 10.0)
    culprit = project.night(measured=False)
    project.nights(3, 11.0)
    project.update(day=1)
    event = replace(project.alert.history[0], utc="2026-08-02T00:00:00Z", state=AlertState.CONFIRMED, cases=())
    assert alerts.append(project.results, replace(event, suspects=(culprit,)), lambda _: True)
    project.nights(2, 11.0, 12.0)
    assert project.update(day=3) == ["confirmed"]
    assert (project.alert.suspects, len(project.alert.cases)) == ((culprit,), 2)
    assert project.update(day=4) == []


def test_a_drift_away_from_the_accepted_level_is_an_alert_since_that_commit(project: Project) -> None:
    project.night(measured=False)
    project.accept(CASES[0], 10.0)
    first = project.nights(6, 10.6)[0]
    assert project.update() == ["new"]
    alert = project.alert
    assert (alert.good, alert.suspects, alert.cases[0].interval) == (project.commits[0], (first,), None)
    assert project.update(day=2) == []


def test_a_change_that_is_found_one_run_later_is_still_its_alert(project: Project) -> None:
    before, good = project.nights(6, 10.0)[-2:]
    project.nights(3, 11.0)
    project.update(day=1)
    stored = project.alert
    early = replace(stored.history[0], good=before, suspects=(good,))
    alerts.folder(project.results).joinpath(f"{stored.id}.jsonl").unlink()
    assert alerts.append(project.results, early, lambda now: now is None)
    assert project.update(day=2) == ["new"]
    assert project.alert.suspects == stored.suspects
    assert project.update(day=3) == []


def test_a_second_cause_that_ends_at_the_commit_of_a_narrowed_alert_has_a_file_of_its_own(project: Project) -> None:
    project.nights(6, 10.0, 10.0)
    culprit = project.night(measured=False)
    last = project.nights(1, 11.0, 10.0)[0]
    project.run(last, 11.0, 10.0)
    project.update(day=1)
    alert = project.alert
    narrowed = replace(alert.history[0], utc="2026-08-02T00:00:00Z", state=AlertState.CONFIRMED)
    assert alerts.append(project.results, replace(narrowed, suspects=(culprit,), cases=()), lambda _: True)
    project.compared(culprit, last, CompareVerdict.SLOWER, CASES[1])
    assert project.update(day=3) == ["new"]
    assert {one.id: one.suspects for one in project.alerts} == {alert.id: (culprit,), f"{alert.id}.2": (last,)}
    assert project.update(day=4) == []


def test_a_record_whose_commit_is_no_name_reaches_neither_git_nor_another_folder(project: Project) -> None:
    project.nights(6, 10.0)
    for letter, hostile in (("d", "--output=x"), ("e", "../../../x")):
        project.run(letter * 40, 11.0)
        newest = max((project.results / "runs" / "cpu").iterdir())
        newest.write_text(newest.read_text().replace(letter * 40, hostile))
    assert project.update() == ["new"]
    assert (project.alert.suspects, project.alert.id) == ((), "cpu-20260207T000000.000Z")
    assert list(project.results.parent.rglob("x*")) == []


def test_without_git_the_first_slow_commit_is_suspect(
    project: Project, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    good = project.nights(6, 10.0)[-1]
    slow = project.nights(3, 11.0)[0]
    monkeypatch.setattr(checkout, "REPOSITORY", tmp_path)
    assert project.update() == ["new"]
    assert (project.alert.good, project.alert.suspects) == (good, (slow,))
    assert project.alert.owner == "unknown: git does not know the commit"


@pytest.mark.parametrize("other", [AlertState.NEW, AlertState.FIXED])
def test_what_another_writer_did_meanwhile_is_seen_before_the_next_event(
    project: Project, other: AlertState, monkeypatch: pytest.MonkeyPatch
) -> None:
    project.nights(6, 10.0, 10.0)
    project.nights(3, 11.0, 11.0)
    project.update(day=1)
    project.nights(3, 10.0, 10.0)
    append, others = alerts.append, [replace(project.alert.history[0], utc="2026-08-02T00:00:00Z", state=other)]

    def first(results: Path, event: AlertEvent, wanted: Callable[[Alert | None], bool]) -> bool:
        if others:
            append(results, others.pop(), lambda _: True)
        return append(results, event, wanted)

    monkeypatch.setattr(alerts, "append", first)
    assert project.update(day=3) == (["fixed"] if other is AlertState.NEW else [])
    assert len(project.alert.history) == (3 if other is AlertState.NEW else 2)
    assert project.alert.state is AlertState.FIXED
