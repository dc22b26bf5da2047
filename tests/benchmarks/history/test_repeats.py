"""Figures come again where runs of the same sources agree; what differs in sources or conditions is no repetition."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import pytest

from benchmarks.history import repeats
from benchmarks.history.store import LatencySeries, Point
from benchmarks.report.machine_pages.repeats import table
from harness.fingerprint import Fingerprint
from harness.nvml import GpuSettings
from tests.benchmarks.synthetic import FINGERPRINT, key, passed


def run(day: int, board: str | None = None, **changes: Any) -> Fingerprint:
    settings = GpuSettings(None, None, None, None, None, None, board)
    return dataclasses.replace(FINGERPRINT, utc=f"2026-01-{day:02}T00:00:00Z", gpu_settings=settings, **changes)


def history(*runs: tuple[Fingerprint, Mapping[int, float]]) -> list[LatencySeries]:
    """A series for each length, of runs that measured these lengths."""
    lengths = sorted({length for _, measured in runs for length in measured})
    return [
        LatencySeries(
            passed(key(length=length)),
            [Point(one.utc, found[length], None, None, one) for one, found in runs if length in found],
        )
        for length in lengths
    ]


def test_each_later_run_stands_beside_the_first() -> None:
    found = repeats.find(
        history((run(1), {64: 1.0, 128: 1.0}), (run(2), {64: 1.02, 128: 1.04, 256: 9.0}), (run(3), {64: 0.9}))
    )
    assert [(one.second.utc[8:10], one.again, len(one.changes)) for one in found] == [("03", 0, 1), ("02", 1, 2)]
    ((case, change),) = found[1].far
    assert (case, round(change, 6)) == (key(length=128).case, 0.04)


@pytest.mark.parametrize("changes", [{"nsa_sha256": "f" * 16}, {"benchmarks_sha256": "f" * 16}, {"torch": "2.14.0"}])
def test_other_sources_and_other_conditions_are_no_repetition(changes: dict[str, str]) -> None:
    assert repeats.find(history((run(1), {64: 1.0}), (run(2, **changes), {64: 1.0}))) == []
    assert repeats.find(history((run(1), {64: 1.0}), (run(2), {128: 1.0}))) == []


@pytest.mark.parametrize(
    ("boards", "other"), [(("a", "b"), True), (("a", "a"), False), ((None, "a"), None), (("a", None), None)]
)
def test_whether_it_was_another_board(boards: tuple[str | None, str | None], other: bool | None) -> None:
    (found,) = repeats.find(history((run(1, boards[0]), {64: 1.0}), (run(2, boards[1]), {64: 1.0})))
    assert found.other_board is other


def test_a_share_below_the_goal_is_marked_and_the_furthest_case_comes_first() -> None:
    first, again = dict.fromkeys(range(64, 84), 1.0), dict.fromkeys(range(64, 84), 1.0)
    (row,) = table(repeats.find(history((run(1), first), (run(2), {**again, 64: 1.1})))).rows
    assert (row[4].text, row[4].kind) == ("19 of 20", "good")
    (row,) = table(repeats.find(history((run(1), first), (run(2), {**again, 64: 1.05, 70: 0.8})))).rows
    assert (row[4].text, row[4].kind) == ("18 of 20", "bad")
    assert row[5].text.index("/s70/") < row[5].text.index("/s64/")
