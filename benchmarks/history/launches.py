"""Launches per call over the runs: a count, so that any other number is a change, and one run suffices to see it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.cases.key import NSA
from benchmarks.history.store import CaseVisit


@dataclass(frozen=True)
class LaunchTrend:
    """One of NSA's cases on one machine, by the path that ran in its newest run."""

    name: str
    now: int
    """In the newest run that counted them."""
    before: int | None
    """Before the last change; None where there was none."""
    since: CaseVisit
    """The first run with the present count."""

    @property
    def grew(self) -> bool:
        return self.before is not None and self.now > self.before


def trends(visits: Mapping[str, Sequence[CaseVisit]]) -> list[LaunchTrend]:
    """One for each of NSA's cases whose launches were counted, by name."""
    found = []
    for name, of_case in sorted(visits.items()):
        counted = [visit for visit in of_case if visit.launches_per_call is not None]
        if counted and name.endswith(f"/{NSA}"):
            found.append(_trend(name, [visit for visit in counted if visit.path == counted[-1].path]))
    return found


def _trend(name: str, counted: Sequence[CaseVisit]) -> LaunchTrend:
    now = counted[-1].launches_per_call
    assert now is not None
    others = [number for number, visit in enumerate(counted) if visit.launches_per_call != now]
    first = others[-1] + 1 if others else 0
    return LaunchTrend(name, now, counted[first - 1].launches_per_call if others else None, counted[first])
