"""Whether figures come again: runs that measured the same sources in the same way, figure by figure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.history import conditions
from benchmarks.history.store import LatencySeries
from harness.fingerprint import Fingerprint

WITHIN = 0.03
"""A figure that came again differs by no more."""
GOAL = 0.95
"""Of the figures are to come again."""


@dataclass(frozen=True)
class Repeat:
    """A run and the first one of the same sources under the same conditions."""

    first: Fingerprint
    second: Fingerprint
    changes: Mapping[str, float]
    """Of each case that both measured: the second latency over the first, less 1."""

    @property
    def again(self) -> int:
        """Figures that came again."""
        return sum(abs(change) <= WITHIN for change in self.changes.values())

    @property
    def far(self) -> list[tuple[str, float]]:
        """(case, change) of the others, the furthest first."""
        others = [(case, change) for case, change in self.changes.items() if abs(change) > WITHIN]
        return sorted(others, key=lambda found: -abs(found[1]))

    @property
    def other_board(self) -> bool | None:
        """Whether it was another GPU of the same kind; None where a record does not tell."""
        boards = [one.gpu_settings.board if one.gpu_settings else None for one in (self.first, self.second)]
        return None if None in boards else boards[0] != boards[1]


def find(history: Sequence[LatencySeries]) -> list[Repeat]:
    """The newest first."""
    runs: dict[tuple[object, ...], dict[str, Fingerprint]] = {}
    latency_ms: dict[str, dict[str, float]] = {}
    for series in history:
        for point in series.points:
            made = point.fingerprint
            same = made.nsa_sha256, made.benchmarks_sha256, conditions.hard(made.conditions)
            runs.setdefault(same, {})[point.utc] = made
            latency_ms.setdefault(point.utc, {})[series.newest.key.case] = point.latency_ms
    found = []
    for alike in runs.values():
        first, *later = sorted(alike)
        for utc in later:
            before, now = latency_ms[first], latency_ms[utc]
            changes = {case: now[case] / before[case] - 1 for case in now if case in before}
            if changes:
                found.append(Repeat(alike[first], alike[utc], changes))
    return sorted(found, key=lambda one: one.second.utc, reverse=True)
