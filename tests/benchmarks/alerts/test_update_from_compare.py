"""Alerts of `compare`: opened by a SLOWER at today's code, one with what the runs show, closed by later comparisons."""

from __future__ import annotations

import pytest

from benchmarks.ab.result import CompareVerdict
from tests.benchmarks.alerts.project import Project


def test_a_slower_of_compare_opens_an_alert(project: Project) -> None:
    commits = project.nights(4, 10.0)
    project.compared(commits[1], commits[3], CompareVerdict.SLOWER)
    assert project.update() == ["new"]
    alert = project.alert
    assert (alert.good, alert.suspects) == (commits[1], tuple(commits[2:]))
    assert alert.cases[0].interval == (pytest.approx(0.09), pytest.approx(0.11))
    assert project.update(day=2) == []


def test_compare_and_runs_that_show_the_same_slowdown_are_one_alert(project: Project) -> None:
    good = project.nights(6, 10.0, 10.0)[-1]
    slow = project.night(11.0, 11.0)
    project.compared(good, slow, CompareVerdict.SLOWER)
    project.update(day=1)
    assert len(project.alert.cases) == 1
    project.nights(2, 11.0, 11.0)
    assert project.update(day=2) == ["new"]
    assert [event.why for event in project.alert.history][1:] == ["1 case is slower too"]
    assert len(project.alert.cases) == 2


def test_a_comparison_of_other_code_than_todays_opens_none(project: Project) -> None:
    commits = project.nights(4, 10.0)
    project.compared(commits[0], commits[2], CompareVerdict.SLOWER)  # nsa/ has changed since
    project.repository.git("checkout", "--quiet", "-b", "experiment")
    other = project.repository.commit("an experiment")
    project.repository.git("checkout", "--quiet", "-")
    project.compared(commits[3], other, CompareVerdict.SLOWER)
    project.compared(commits[1], commits[3], CompareVerdict.UNDECIDED)
    assert project.update() == []


@pytest.mark.parametrize("undone", ["no slower than the good commit", "faster than the slow one"])
def test_an_alert_of_compare_is_fixed_by_a_later_comparison(project: Project, undone: str) -> None:
    good, slow = project.nights(2, 10.0)
    project.compared(good, slow, CompareVerdict.SLOWER)
    project.update(day=1)
    fix = project.night(10.0)
    project.compared(slow, fix, CompareVerdict.FASTER, change=-0.05, day=2)
    assert project.update(day=2) == [], "faster, but not by as much"
    if undone == "faster than the slow one":
        project.compared(slow, fix, CompareVerdict.FASTER, change=-0.09, day=3)
    else:
        project.compared(good, fix, CompareVerdict.SAME, change=0.0, day=3)
    assert project.update(day=3) == ["fixed"]
