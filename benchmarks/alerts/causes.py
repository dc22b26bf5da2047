"""Movements that one commit explains, as few causes as possible."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from benchmarks.alerts.commits import Commits
from benchmarks.alerts.movements import Movement
from harness.jsonl import compact_utc


@dataclass(frozen=True)
class Cause:
    """Movements of one machine in one direction that have suspect commits in common."""

    movements: tuple[Movement, ...]

    @property
    def suspects(self) -> tuple[str, ...]:
        """The commits that all movements suspect, oldest first."""
        common = set.intersection(*(set(one.suspects) for one in self.movements))
        return tuple(commit for commit in self.movements[0].suspects if commit in common)

    @property
    def good(self) -> str | None:
        """The commit before the first suspect at which a movement was seen not to have happened yet."""
        first = self.suspects[:1]
        return next(one.good for one in self.movements if one.suspects[:1] == first)

    @property
    def id(self) -> str:
        """The machine and the last suspect, or the first slow run where no commit is suspect."""
        first = self.movements[0]
        utc = compact_utc(min(one.case.utc for one in self.movements))
        return f"{first.machine}-{self.suspects[-1][:10] if self.suspects else utc}"


def causes(movements: Iterable[Movement], commits: Commits) -> list[Cause]:
    """The fewest causes: all that suspect the commit at which the earliest range of suspects ends, then the rest.

    Movements without a suspect belong together where the same run was the first slow one.
    """
    groups: dict[tuple[str, bool], list[Movement]] = {}
    for one in movements:
        groups.setdefault((one.machine, one.case.change > 0), []).append(one)
    return [Cause(tuple(found)) for group in groups.values() for found in _of_one_direction(group, commits)]


def _of_one_direction(movements: Sequence[Movement], commits: Commits) -> list[list[Movement]]:
    found: list[list[Movement]] = []
    left = sorted(movements, key=lambda one: _end(one, commits))
    while left:
        first = left[0]
        together = [one for one in left if _shares_end(one, first)]
        found.append(together)
        left = [one for one in left if one not in together]
    return found


def _end(one: Movement, commits: Commits) -> tuple[float, str]:
    position = commits.position(one.suspects[-1]) if one.suspects else None
    return (float("inf") if position is None else position), one.case.utc


def _shares_end(one: Movement, first: Movement) -> bool:
    if not first.suspects:
        return not one.suspects and one.case.utc == first.case.utc
    return first.suspects[-1] in one.suspects
