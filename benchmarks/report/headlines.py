"""In a line per mode and shape: NSA beside the fastest baseline at the longest length, and from where it is faster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks import console
from benchmarks.records import Record
from benchmarks.report import look
from benchmarks.report.lengths import TITLES, Group
from benchmarks.report.table import Cell, Table, number
from benchmarks.verdict import Comparison, speed_up


@dataclass(frozen=True)
class Race:
    """NSA and the fastest baseline of one case in one run."""

    tokens: int
    nsa: Record
    fastest: Record
    ratio: float
    """How many times as fast NSA is."""


def table(groups: Sequence[Group]) -> Table:
    """A row per group that has both."""
    head = ("what", "tokens", "NSA", "fastest baseline", "NSA is × as fast", "faster from")
    rows = []
    for group in groups:
        races = [race for comparison in group.compared if (race := _race(comparison))]
        if group.mode in TITLES and races:
            last = races[-1]
            rows.append(
                [
                    Cell(f"{TITLES[group.mode]}, {group.label}"),
                    number(look.in_k(last.tokens)),
                    number(console.figure(last.nsa)),
                    number(f"{last.fastest.key.implementation} {console.figure(last.fastest)}"),
                    number(f"{last.ratio:.2f}×"),
                    number(faster_from(races)),
                ]
            )
    return Table(head, rows)


def _race(comparison: Comparison) -> Race | None:
    ratios = [(speed_up(comparison.nsa, other), other) for other in comparison.baselines]
    known = [(ratio, other) for ratio, other in ratios if ratio is not None]
    if not known:
        return None
    ratio, other = min(known, key=lambda pair: pair[0])
    return Race(comparison.nsa.key.num_keys, comparison.nsa, other, ratio)


def faster_from(races: Sequence[Race]) -> str:
    """The shortest measured length from which on NSA is faster at every one."""
    ahead = None
    for race in reversed(races):
        if race.ratio <= 1:
            break
        ahead = race.tokens
    return "no measured length" if ahead is None else look.in_k(ahead)
