"""Launches per call over the runs: what is recorded is read again, and one launch more is a change."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from benchmarks.history import launches, record_line
from benchmarks.history.store import CaseVisit, Store
from benchmarks.report.links import Repository
from benchmarks.report.machine_pages.launches import table
from tests.benchmarks import stored
from tests.benchmarks.synthetic import FINGERPRINT, key, passed

HOST = key("host-prefill-forward")


def visits(*counts: int | None, path: str = "torch") -> dict[str, list[CaseVisit]]:
    found = []
    for day, count in enumerate(counts, start=1):
        where = dataclasses.replace(FINGERPRINT, utc=f"2026-01-{day:02}T00:00:00Z", commit=f"{day:040}")
        found.append(CaseVisit(where.utc, where, path, None, None, None, None, count))
    return {HOST.name: found, key(implementation="sdpa-flash").name: found}


@pytest.mark.parametrize(
    ("counts", "now", "before", "day", "grew"),
    [
        ((57,), 57, None, 1, False),
        ((57, 57), 57, None, 1, False),
        ((57, 5, 5), 5, 57, 2, False),
        ((5, 5, 6), 6, 5, 3, True),
        ((5, 6, None, 6), 6, 5, 2, True),
        ((5, 6, 5), 5, 6, 3, False),
    ],
)
def test_any_other_count_is_a_change(
    counts: tuple[int | None, ...], now: int, before: int | None, day: int, grew: bool
) -> None:
    (found,) = launches.trends(visits(*counts))
    assert (found.name, found.now, found.before, found.grew) == (HOST.name, now, before, grew)
    assert found.since.fingerprint.commit == f"{day:040}"


def test_another_path_launches_other_things_and_is_no_change() -> None:
    older, newer = visits(57, path="torch"), visits(5, path="triton")
    (found,) = launches.trends({HOST.name: [*older[HOST.name], *newer[HOST.name]]})
    assert (found.now, found.before) == (5, None)


def test_where_nothing_was_counted_there_is_no_trend() -> None:
    assert launches.trends(visits(None, None)) == []


def test_a_count_is_in_the_record_its_line_and_the_store(tmp_path: Path) -> None:
    record = dataclasses.replace(passed(HOST), launches_per_call=57, tokens_per_s=None)
    assert '"launches_per_call":57' in record_line.encode(record, with_command=True)
    assert "launches_per_call" not in record_line.encode(passed(HOST), with_command=True)
    with pytest.raises(ValueError, match="launches_per_call must be finite and at least 0"):
        dataclasses.replace(record, launches_per_call=-1)
    stored.write(tmp_path, record)
    (visit,) = Store(tmp_path).visits("cpu")[HOST.name]
    assert visit.launches_per_call == 57


def test_more_launches_stand_first_on_the_page() -> None:
    grown = launches.trends(visits(5, 6))
    other = dataclasses.replace(launches.trends(visits(5))[0], name="a/nsa")
    rows = table([other, *grown], Repository()).rows
    assert [row[1].text for row in rows] == ["more launches", "the same"]
