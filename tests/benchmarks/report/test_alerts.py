"""Open alerts on the first page: the number, and a row each with its cause, its owner and its age."""

from __future__ import annotations

import dataclasses
from datetime import datetime, timezone
from pathlib import Path

import pytest

from benchmarks.history import alerts as kept
from benchmarks.history.alerts import Alert, AlertState
from benchmarks.report.first_page import alerts
from benchmarks.report.links import Repository
from benchmarks.report.pages import ReportSettings, build
from tests.benchmarks.history.test_alerts import CASE, COMMITS, OPENED, event
from tests.benchmarks.report.test_pages import HOSTILE, Page
from tests.benchmarks.stored import write
from tests.benchmarks.synthetic import key, passed

GITHUB = Repository("https://github.com/owner/name")
NOW = datetime(2026, 3, 20, 12, tzinfo=timezone.utc)
NEW = Alert((OPENED,))
CONFIRMED = Alert((OPENED, event(4, AlertState.CONFIRMED, suspects=COMMITS[:1], owner="A. Writer")))
FIXED = Alert((OPENED, event(5, AlertState.FIXED)))


@pytest.mark.parametrize(
    ("stored", "text", "kind"),
    [
        ([], "0", "plain"),
        ([FIXED], "0", "good"),
        ([NEW, FIXED], "1, 0 confirmed", "plain"),
        ([NEW, CONFIRMED], "2, 1 confirmed", "bad"),
    ],
)
def test_the_number_is_red_where_one_is_confirmed(stored: list[Alert], text: str, kind: str) -> None:
    found = alerts.headline(stored)
    assert (found.text, found.kind) == (text, kind)
    assert (found.href is None) == (text == "0")


def test_a_row_has_state_cause_owner_cases_and_age() -> None:
    same = Alert((dataclasses.replace(OPENED, suspects=()),))
    rows = alerts.table([NEW, CONFIRMED, FIXED, same], GITHUB, NOW).rows
    assert [[cell.text for cell in row] for row in rows] == [
        ["confirmed", "cpu", "aaaaaaa", "A. Writer", CASE.case, "+10.0\u00a0%", "18 days"],
        ["new", "cpu", "aaaaaaa..ccccccc (3)", "unknown: 3 commits", CASE.case, "+10.0\u00a0%", "18 days"],
        ["new", "cpu", "no commit", "unknown: 3 commits", CASE.case, "+10.0\u00a0%", "18 days"],
    ]
    assert [row[2].href for row in rows] == [
        f"https://github.com/owner/name/commit/{COMMITS[0]}",
        f"https://github.com/owner/name/compare/{'0' * 40}...{COMMITS[2]}",
        None,
    ]


def test_the_first_page_shows_the_open_alerts_and_escapes_them(tmp_path: Path) -> None:
    write(tmp_path, passed(key()))
    settings = ReportSettings(script=False, repository=GITHUB, now=NOW)
    assert "Open alerts0" in Page(build(tmp_path, settings).index).text
    kept.append(tmp_path, dataclasses.replace(OPENED, owner=HOSTILE, why=HOSTILE), lambda _: True)
    (path,) = kept.folder(tmp_path).iterdir()
    path.write_text(path.read_text() + "{}\n")
    index = build(tmp_path, settings).index
    page = Page(index)
    assert "Open alerts1, 0 confirmed" in page.text
    assert "#alerts" in page.links
    assert HOSTILE in page.text
    assert HOSTILE not in index.read_text()
    assert "cpu-cccccccccc.jsonl:2: ValueError: alertevent must have 'utc'" in page.text


def test_the_share_that_is_not_judged_and_overdue_machines_are_numbers_of_the_first_page(tmp_path: Path) -> None:
    write(tmp_path, passed(key()))
    text = Page(build(tmp_path, ReportSettings(script=False, now=NOW)).index).text
    assert "Not judged100 %1: too few runs so far" in text.replace("\u00a0", " ")
    assert "Machines overdue1 of 1" in text
