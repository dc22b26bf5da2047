"""The issues of alerts: one each, opened once, kept up to date, closed when the alert ends; the steps as written."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import __main__ as bench
from benchmarks.alerts import issue
from benchmarks.history import alerts
from benchmarks.history.alerts import Alert, AlertEvent, AlertState
from benchmarks.report.links import Repository
from tests.benchmarks.history.test_alerts import CASE, OPENED
from tests.containers import fake_github
from tests.containers.fake_github import REPOSITORY, Runner, evaluate, event, pull_request, runner

__all__ = ["runner"]  # the fixture
PUSH = event("push")
SITE = Repository(f"https://github.com/{REPOSITORY}")
CLOSED = (AlertState.FIXED, AlertState.ACCEPTED, AlertState.NOT_REPRODUCED)


def stored(at: Runner, *events: AlertEvent) -> None:
    """Events on the branch, as the runners' jobs have left them."""
    for one in events:
        assert alerts.append(at.checkout / "joined" / "results", one, lambda _: True)


def later(day: int, state: AlertState, why: str = "because", of: AlertEvent = OPENED) -> AlertEvent:
    return dataclasses.replace(of, utc=f"2026-03-{day:02d}T00:00:00Z", state=state, why=why, cases=())


def publish(at: Runner, code: int = 0, *, as_written: bool = False) -> list[dict[str, Any]]:
    """Runs both steps, the first one in this process unless `as_written`; every issue afterwards."""
    at.program("gh", fake_github.GH_ISSUES)
    if as_written:
        done = at.run_step("gpu", "publish", "Issues of the alerts", PUSH)
        assert done.returncode == 0, done.stderr
    else:
        out, file = at.checkout / "joined" / "results", at.checkout / "alerts.json"
        assert bench.main(["alerts", "--out", str(out), "--file", str(file), "--repository-url", str(SITE.url)]) == 0
    done = at.run_step("gpu", "publish", "An issue for each alert", PUSH)
    assert done.returncode == code, done.stderr
    file = at.programs / "issues.json"
    found: list[dict[str, Any]] = json.loads(file.read_text()) if file.exists() else []
    return found


def written(at: Runner) -> list[str]:
    """What was asked of the site that changes something."""
    lines = (at.programs / "asked").read_text().splitlines()
    return [line for line in lines if not line.startswith("GET")]


def test_an_alert_has_one_issue_that_is_kept_up_to_date_and_closed(runner: Runner) -> None:
    stored(runner, OPENED)
    (first,) = publish(runner, as_written=True)
    assert first["path"] == f"repos/{REPOSITORY}/issues"
    assert (first["state"], first["labels"]) == ("open", ["slower"])
    assert first["body"].startswith(f"<!-- nsa alert: {OPENED.alert} -->\n")
    assert publish(runner) == [first]
    assert len(written(runner)) == 1, "nothing new, nothing written"
    stored(runner, later(5, AlertState.CONFIRMED, "2 SLOWER"))
    (second,) = publish(runner)
    assert (second["number"], second["state"]) == (first["number"], "open")
    assert "**confirmed**: `2 SLOWER`" in second["body"]
    stored(runner, later(6, AlertState.FIXED))
    (third,) = publish(runner)
    assert third["state"] == "closed"
    assert "Fixed: **fixed**" in third["body"]
    publish(runner)
    assert len(written(runner)) == 3
    stored(runner, later(7, AlertState.NEW, "opened again"))
    (fourth,) = publish(runner)
    assert (fourth["number"], fourth["state"]) == (first["number"], "open")


def test_an_alert_that_ended_without_an_issue_gets_none(runner: Runner) -> None:
    for number, state in enumerate(CLOSED):
        one = dataclasses.replace(OPENED, alert=f"cpu-{number:010d}")
        stored(runner, one, later(5, state, of=one))
    assert publish(runner) == []


def test_without_alerts_nothing_is_written(runner: Runner) -> None:
    assert publish(runner) == []


def test_an_issue_of_somebody_else_is_left_alone(runner: Runner) -> None:
    mine = {"number": 1, "state": "open", "title": "mine", "body": f"<!-- nsa alert: {OPENED.alert} -->"}
    strangers = [{**mine, "user": {"login": "somebody"}}, {**mine, "number": 2, "body": None, "user": {"login": "x"}}]
    (runner.programs / "issues.json").write_text(json.dumps(strangers))
    stored(runner, OPENED)
    found = publish(runner)
    assert found[:2] == strangers
    assert len(found) == 3


def test_what_the_site_refuses_is_said_and_the_others_are_written(runner: Runner) -> None:
    other = dataclasses.replace(OPENED, alert="h200-cccccccccc", machine="h200")
    stored(runner, OPENED, other)
    (runner.programs / "refused").write_text("Slower on cpu")
    (found,) = publish(runner, code=1)
    assert found["title"].startswith("Slower on h200: ")


def test_the_issue_says_what_to_do() -> None:
    found = issue.of(Alert((OPENED,)), SITE)
    assert found.title == f"Slower on cpu: {CASE.case}, +10.0\u00a0% at worst (aaaaaaaaaa..cccccccccc)"
    assert "one of 3 commits: [`aaaaaaa`](https://github.com/owner/Name/commit/" in found.body
    assert f"python -m benchmarks bisect {'0' * 40} {'c' * 40} --gpu cpu --case {CASE.case}" in found.body
    assert f"| `{CASE.case}` | +10.0\u00a0% | +9.0\u00a0% to +11.0\u00a0% |" in found.body
    assert "- 2026-03-02T00:00 new: `1 case is slower`" in found.body
    many = dataclasses.replace(OPENED, cases=tuple(dataclasses.replace(CASE, case=f"case {i}") for i in range(40)))
    assert "and 10 more cases" in issue.of(Alert((many,)), SITE).body


def test_no_text_of_a_record_mentions_anybody_or_holds_markup() -> None:
    hostile = "` @everyone <img src=x>\n# a title | a cell"
    of_records = dataclasses.replace(
        OPENED, owner=hostile, why=hostile, cases=(dataclasses.replace(CASE, case=hostile),)
    )
    found = issue.of(Alert((of_records,)), Repository())
    safe = "`@everyone <img src=x> # a title a cell`"
    assert "@everyone" not in found.body.replace(safe, "")
    assert "\n" not in found.title
    assert found.body.count(safe) >= 3


@pytest.mark.parametrize(
    ("contexts", "wanted"), [(PUSH, True), (event("schedule"), True), (pull_request("synchronize", "gpu"), False)]
)
def test_a_runner_confirms_the_alerts_of_main(runner: Runner, contexts: dict[str, Any], wanted: bool) -> None:
    name = "Alerts, and a paired re-run"
    condition = fake_github.step("gpu", "suites", name)["if"]
    assert bool(evaluate(condition, contexts, failed=True)) == wanted
    runner.program("nox", '#!/bin/sh\nprintf "%s\\n" "$*"\n')
    done = runner.run_step("gpu", "suites", name, contexts)
    assert done.stdout == "-s alerts -- confirm --engine docker --family a100 --gpu a100\n"


def test_alerts_travel_with_the_records(runner: Runner) -> None:
    """From the runner's results, as an artefact, to the branch."""
    assert runner.run_step("gpu", "suites", "Records of all earlier runs", PUSH).returncode == 0
    assert alerts.append(runner.checkout / "results", OPENED, lambda _: True)
    assert runner.run_step("gpu", "suites", "What this run has written", PUSH).returncode == 0
    (runner.checkout / "artefacts").mkdir()
    (runner.checkout / "fresh").rename(runner.checkout / "artefacts" / "records-a100")
    done = runner.run_step("gpu", "publish", "Join this run's records", PUSH)
    assert done.returncode == 0, done.stderr
    assert f"results/alerts/{OPENED.alert}.jsonl" in runner.branch()
    (path,) = Path(runner.checkout / "joined/results/alerts").iterdir()
    assert alerts.read(path.parent.parent)[0] == [Alert((OPENED,))]
