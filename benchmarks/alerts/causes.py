"""Movements that one commit explains, the commit that explains most of them first."""

from __future__ import annotations

from collections import Counter
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
    """The commit that most movements suspect is the cause of these, then of the rest likewise.

    Movements without a suspect belong together where the same run was the first slow one.
    """
    groups: dict[tuple[str, bool], list[Movement]] = {}
    for one in movements:
        groups.setdefault((one.machine, one.case.change > 0), []).append(one)
    return [Cause(tuple(found)) for group in groups.values() for found in _of_one_direction(group, commits)]


def _of_one_direction(movements: Sequence[Movement], commits: Commits) -> list[list[Movement]]:
    found: list[list[Movement]] = []
    left = [one for one in movements if one.suspects]
    while left:
        counts = Counter(commit for one in left for commit in one.suspects)
        first = min(counts, key=lambda commit: (-counts[commit], _place(commit, commits)))
        found.append([one for one in left if first in one.suspects])
        left = [one for one in left if first not in one.suspects]
    by_run: dict[str, list[Movement]] = {}
    for one in movements:
        if not one.suspects:
            by_run.setdefault(one.case.utc, []).append(one)
    return [*found, *by_run.values()]


def _place(commit: str, commits: Commits) -> tuple[float, str]:
    """Of several the oldest one; what HEAD did not come from is last."""
    position = commits.position(commit)
    return (float("inf") if position is None else position), commit
