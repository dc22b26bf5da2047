"""Peak memory over the runs: where a case went to another level, and whether it needs more than it once did."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from benchmarks import peak_memory
from benchmarks.cases.key import NSA
from benchmarks.history.store import CaseVisit
from benchmarks.peak_memory import MemoryNeed, MemoryVerdict, OutOfMemory, gib


@dataclass(frozen=True)
class MemoryTrend:
    """One case on one machine: the same implementation, by the same path, its peak read in the same way."""

    name: str
    verdict: MemoryVerdict
    """Beside the accepted peak; else beside the lowest level that it had before."""
    now_mib: float
    """In the newest run that has it."""
    before_mib: float | None
    """What it is judged against; None where there is nothing before."""
    since: CaseVisit
    """The run from which on every peak has this verdict; with `SAME` or `FIRST` that of the present level."""
    earlier: CaseVisit | None
    """The run before that one."""


def trends(
    visits: Mapping[str, Sequence[CaseVisit]], accepted_mib: Mapping[str, float] | None = None
) -> list[MemoryTrend]:
    """One for each of NSA's cases that has a peak, by name; `accepted_mib` by name too."""
    found = []
    for name, of_case in sorted(visits.items()):
        peaks = [visit for visit in of_case if visit.peak_mem_mib is not None]
        if peaks and name.endswith(f"/{NSA}"):
            alike = [one for one in peaks if (one.path, one.peak_mem_source) == _how(peaks[-1])]
            found.append(_trend(name, alike, (accepted_mib or {}).get(name)))
    return found


def _how(visit: CaseVisit) -> tuple[str | None, str | None]:
    return visit.path, visit.peak_mem_source


def _trend(name: str, points: Sequence[CaseVisit], accepted_mib: float | None) -> MemoryTrend:
    """Levels begin where a peak differs from the level's first, so that no slow growth hides among them."""
    source = points[-1].peak_mem_source
    starts = [0]
    for number, point in enumerate(points):
        if peak_memory.judge(_mib(points[starts[-1]]), _mib(point), source) is not MemoryVerdict.SAME:
            starts.append(number)
    now_mib, since = _mib(points[-1]), starts[-1]
    levels_mib = [_mib(points[start]) for start in starts[:-1]]
    before_mib = accepted_mib if accepted_mib is not None else min(levels_mib, default=None)
    if before_mib is None:
        verdict = MemoryVerdict.FIRST if len(points) == 1 else MemoryVerdict.SAME
        return MemoryTrend(name, verdict, now_mib, None, points[since], _before(points, since))
    verdict = peak_memory.judge(before_mib, now_mib, source)
    if verdict is MemoryVerdict.SAME and levels_mib and accepted_mib is None:
        last = peak_memory.judge(levels_mib[-1], now_mib, source)
        if last is MemoryVerdict.SHRANK:  # back at the lowest level
            return MemoryTrend(name, last, now_mib, levels_mib[-1], points[since], _before(points, since))
    if verdict is not MemoryVerdict.SAME:  # a level that is higher than before may have begun by shrinking from a third
        alike = (peak_memory.judge(before_mib, _mib(points[start]), source) is verdict for start in reversed(starts))
        since = starts[-len(list(itertools.takewhile(bool, alike)))]
    return MemoryTrend(name, verdict, now_mib, before_mib, points[since], _before(points, since))


def _before(points: Sequence[CaseVisit], number: int) -> CaseVisit | None:
    return points[number - 1] if number else None


def _mib(visit: CaseVisit) -> float:
    assert visit.peak_mem_mib is not None
    return visit.peak_mem_mib


@dataclass(frozen=True)
class WillNotFit:
    """A case that is not tried."""

    name: str
    reason: str
    lacks: OutOfMemory


def will_not_fit(
    needs: Mapping[str, MemoryNeed],
    total_mib: float,
    free_mib: float,
    nsa_sha256: str,
    here: Mapping[str, Sequence[CaseVisit]],
    elsewhere_mib: Mapping[str, float],
) -> list[WillNotFit]:
    """Which of these cases need more than is free on the device: by their shapes, or by what records say.

    `needs`: from the shapes, in the order in which they would run. `here`: this machine's records, of which a
    run of the same sources that ran out of memory counts while no more is free than it would have needed.
    `elsewhere_mib`: peaks of the same cases on GPUs of any kind, beside which their inputs stood.
    """
    found = []
    for name, need in needs.items():
        last = here[name][-1] if here.get(name) else None
        lacked = last.out_of_memory if last is not None and last.nsa_sha256 == nsa_sha256 else None
        peak_mib = elsewhere_mib.get(name, 0.0)
        if lacking := need.lacking(total_mib, free_mib):
            why, lacks = lacking, OutOfMemory(need.whole_mib, free_mib, None)
        elif peak_mib + need.inputs_mib > free_mib:
            free = peak_memory.free_of(free_mib, total_mib)
            why = f"it took {gib(peak_mib)} beside {gib(need.inputs_mib)} of inputs in a record, and {free}"
            lacks = OutOfMemory(peak_mib + need.inputs_mib, free_mib, None)
        elif last and lacked and lacked.asked_mib and lacked.in_use_mib and _sum(lacked) > free_mib:
            why = (
                f"on {last.utc[:10]} the same sources had {gib(lacked.in_use_mib)} and tried to allocate"
                f" {gib(lacked.asked_mib)} more; {gib(free_mib)} are free now"
            )
            lacks = replace(lacked, free_mib=free_mib)
        else:
            continue
        found.append(WillNotFit(name, f"not tried: {why}", lacks))
    return found


def _sum(lacked: OutOfMemory) -> float:
    return (lacked.asked_mib or 0.0) + (lacked.in_use_mib or 0.0)
