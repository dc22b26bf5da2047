"""Movements that one commit explains are one cause, and no cause holds two that no commit explains."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest

from benchmarks.alerts.causes import causes
from benchmarks.alerts.commits import Commits
from benchmarks.alerts.movements import Movement
from benchmarks.history.alerts import AlertCase

CASE = AlertCase("a", "A CPU", 0.1, None, "2026-03-01T00:00:00Z", "runs")


class Letters(Commits):
    """Commits are the letters, in their order."""

    def __init__(self) -> None:
        self._positions = {letter: i for i, letter in enumerate("abcdefgh")}


def movement(suspects: str, name: str = "a", machine: str = "cpu", **changes: object) -> Movement:
    case = dataclasses.replace(CASE, case=name, **changes)  # type: ignore[arg-type]
    good = chr(ord(suspects[0]) - 1) if suspects else "a"
    return Movement(machine, case, good, tuple(suspects))


def found(*movements: Movement) -> list[tuple[str, int, str | None]]:
    """Of each cause its suspects, how many movements it explains, and the commit before."""
    return [("".join(one.suspects), len(one.movements), one.good) for one in causes(movements, Letters())]


@pytest.mark.parametrize(
    ("ranges", "wanted"),
    [
        (["b"] * 19, [("b", 19, "a")]),
        (["b", "c"], [("b", 1, "a"), ("c", 1, "b")]),
        (["bcd", "cde", "def"], [("d", 3, "c")]),
        (["b", "bc", "c"], [("b", 2, "a"), ("c", 1, "b")]),
        (["bc", "de", "cd"], [("c", 2, "b"), ("de", 1, "c")]),
        (["bcdefg", "f"], [("f", 2, "e")]),
        (["b", "bc", "bc", "c", "c"], [("c", 4, "b"), ("b", 1, "a")]),
        (["z", "b"], [("b", 1, "a"), ("z", 1, "y")]),
        ([], []),
    ],
)
def test_the_commit_that_explains_most_ranges_is_their_cause(
    ranges: Sequence[str], wanted: list[tuple[str, int, str | None]]
) -> None:
    assert found(*(movement(one, str(i)) for i, one in enumerate(ranges))) == wanted
    assert found(*(movement(one, str(i)) for i, one in reversed(list(enumerate(ranges))))) == wanted, "in any order"


def test_machines_and_directions_are_apart() -> None:
    assert len(found(movement("b"), movement("b", machine="h200"), movement("b", change=-0.1))) == 3


def test_without_a_suspect_the_first_slow_run_tells_causes_apart() -> None:
    later = "2026-03-02T00:00:00Z"
    together = causes([movement("", "a"), movement("", "b"), movement("", "c", utc=later), movement("c")], Letters())
    assert sorted((one.id, len(one.movements)) for one in together) == [
        ("cpu-20260301T000000Z", 2),
        ("cpu-20260302T000000Z", 1),
        ("cpu-c", 1),
    ]
