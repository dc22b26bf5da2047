"""The files of alerts: nothing is lost to two writers, a torn line or a full disk, and what is damaged is named."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from benchmarks.__main__ import main
from benchmarks.history import alerts
from benchmarks.history.alerts import Alert, AlertCase, AlertEvent, AlertState
from nsa.io import DiskFullError
from tests.benchmarks import stored
from tests.benchmarks.synthetic import key, passed

COMMITS = tuple(letter * 40 for letter in "abc")
CASE = AlertCase("decode/8x2x64/b4/s16384/float32/nsa", "A CPU", 0.1, (0.09, 0.11), "2026-03-01T00:00:00Z", "runs")
OPENED = AlertEvent(
    "2026-03-02T00:00:00Z", "cpu-cccccccccc", "cpu", AlertState.NEW, "1 case is slower", "0" * 40, COMMITS,
    "unknown: 3 commits", (CASE,),
)  # fmt: skip


def event(day: int, state: AlertState = AlertState.NEW, **changes: object) -> AlertEvent:
    """A later event of the same alert, without cases."""
    made = dataclasses.replace(OPENED, utc=f"2026-03-{day:02d}T00:00:00Z", state=state, why=f"day {day}", cases=())
    return dataclasses.replace(made, **changes)  # type: ignore[arg-type]


def added(results: Path, *events: AlertEvent) -> Alert:
    """The alert after these events."""
    for one in events:
        assert alerts.append(results, one, lambda _: True)
    ((found,), damaged) = alerts.read(results)
    assert damaged == []
    return found


def test_an_alert_is_what_its_events_say_in_any_order(tmp_path: Path) -> None:
    other = dataclasses.replace(CASE, case="part-window/8x2x64/b1/s4096/float32/nsa", change=0.2)
    confirmed = event(4, AlertState.CONFIRMED, suspects=COMMITS[2:], owner="A", good=COMMITS[1], cases=(other,))
    stale = event(5, AlertState.CONFIRMED, cases=(dataclasses.replace(CASE, change=0.12),))
    for number, events in enumerate([(OPENED, confirmed, stale), (stale, confirmed, OPENED)]):
        found = added(tmp_path / str(number), *events)
        assert (found.state, found.why, found.opened) == (AlertState.CONFIRMED, "day 5", OPENED.utc)
        assert (found.suspects, found.owner, found.good) == (COMMITS[2:], "A", COMMITS[1])
        assert [(case.case, case.change) for case in found.cases] == [(other.case, 0.2), (CASE.case, 0.12)]
        assert [one.why for one in found.history] == ["1 case is slower", "day 4", "day 5"]


def test_before_it_is_confirmed_the_newest_suspects_count(tmp_path: Path) -> None:
    assert added(tmp_path, OPENED, event(3, suspects=COMMITS[:1])).suspects == COMMITS[:1]
    assert added(tmp_path, event(4)).suspects == COMMITS


def test_of_one_moment_the_later_line_counts(tmp_path: Path) -> None:
    assert not added(tmp_path, OPENED, event(3, AlertState.CONFIRMED), event(3, AlertState.FIXED)).is_open


def test_two_writers_at_once_lose_nothing(tmp_path: Path) -> None:
    """Each opens every file for itself, as two processes would: the lock is the file's."""

    def write(number: int) -> int:
        opened = 0
        for i in range(30):
            name = f"cpu-{i:010d}"
            mine = dataclasses.replace(OPENED, alert=name, why=f"writer {number}")
            opened += alerts.append(tmp_path, mine, lambda now: now is None)
            case = dataclasses.replace(CASE, case=f"case of {number}")
            alerts.append(tmp_path, event(3 + number, alert=name, cases=(case,)), lambda _: True)
        return opened

    with ThreadPoolExecutor(2) as pool:
        assert sum(pool.map(write, range(2))) == 30, "each alert is opened by one of them"
    found, damaged = alerts.read(tmp_path)
    assert (len(found), damaged) == (30, [])
    assert all(len(one.history) == 3 for one in found)
    assert all({"case of 0", "case of 1"} < {case.case for case in one.cases} for one in found)


def test_the_second_of_two_that_open_one_alert_adds_nothing(tmp_path: Path) -> None:
    assert alerts.append(tmp_path, OPENED, lambda now: now is None)
    later = dataclasses.replace(OPENED, utc="2026-03-03T00:00:00Z")
    assert not alerts.append(tmp_path, later, lambda now: now is None)
    assert added(tmp_path).history == (OPENED,)


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        ('{"utc": "2026-', "cpu-cccccccccc.jsonl:2: JSONDecodeError"),
        ('{"utc": "2026-03-03T00:00:00Z"}', "event must have 'alert'"),
        (json.dumps({**dataclasses.asdict(OPENED), "state": "open"}), "'open' is not a valid AlertState"),
        (json.dumps({**dataclasses.asdict(OPENED), "alert": "../../x"}), "alert must be the machine's name"),
        (json.dumps({**dataclasses.asdict(OPENED), "alert": "cpu-dddddddddd"}), "an event of cpu-dddddddddd"),
    ],
    ids=["torn", "no event", "no state", "a name that leads elsewhere", "of another alert"],
)
def test_a_damaged_line_is_named_and_the_others_count(tmp_path: Path, damage: str, why: str) -> None:
    added(tmp_path, OPENED)
    path = alerts.folder(tmp_path) / "cpu-cccccccccc.jsonl"
    path.write_text(path.read_text() + damage)
    assert alerts.append(tmp_path, event(5), lambda now: now is not None and now.history == (OPENED,))
    ((found,), damaged) = alerts.read(tmp_path)
    assert [one.why for one in found.history] == ["1 case is slower", "day 5"]
    assert len(damaged) == 1
    assert why in damaged[0]


def test_an_alert_whose_cases_are_lost_can_be_opened_again(tmp_path: Path) -> None:
    path = alerts.folder(tmp_path) / "cpu-cccccccccc.jsonl"
    assert alerts.append(tmp_path, event(5), lambda now: now is None)
    assert alerts.read(tmp_path) == ([], [f"{path.name}: no event names a case"])
    assert alerts.append(tmp_path, OPENED, lambda now: now is None)
    assert len(added(tmp_path).history) == 2


def test_a_full_disk_leaves_the_file_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = added(tmp_path, OPENED)
    real = os.write

    def write(file: int, data: bytes) -> int:
        if len(data) < 20:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(file, data[: len(data) // 2])

    monkeypatch.setattr(os, "write", write)
    with pytest.raises(DiskFullError, match="make room and go on"):
        alerts.append(tmp_path, event(5), lambda _: True)
    monkeypatch.undo()
    assert added(tmp_path) == before


def test_merge_joins_the_events_of_two_runners(tmp_path: Path) -> None:
    first, second, results = (tmp_path / name for name in ("first", "second", "results"))
    added(first, OPENED, event(4, AlertState.CONFIRMED))
    added(second, OPENED, event(5, AlertState.FIXED))
    for runner in (first, second):
        stored.write(runner, passed(key()))
        for _ in range(2):
            assert main(["merge", str(runner), "--out", str(results)]) == 0
    assert [one.why for one in added(results).history] == ["1 case is slower", "day 4", "day 5"]
    path = alerts.folder(second) / "cpu-cccccccccc.jsonl"
    path.write_text(path.read_text() + '{"utc": "2026-03-03T00:00:00Z"}\n')
    assert main(["merge", str(second), "--out", str(results)]) == 1
