"""Tables of one machine: headlines, figures beside the baselines, what was not measured and why, and on what."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks import console
from benchmarks.cases.key import NSA
from benchmarks.cases.outcome import CaseOutcome
from benchmarks.history import reservations, speedup
from benchmarks.history.records import Record
from benchmarks.history.speedup import BaselineComparison, speed_up
from benchmarks.history.store import CaseVisit
from benchmarks.report import style
from benchmarks.report.labels import TITLES
from benchmarks.report.machine_pages.lengths import Group
from benchmarks.report.table import BAD, GOOD, NAME, Cell, ReportTable, digits, number, when
from harness.fingerprint import Fingerprint


def figures(here: Sequence[BaselineComparison]) -> ReportTable:
    """A row per case: NSA, then each baseline with the ratio."""
    names = list(dict.fromkeys(other.key.implementation for c in here for other in c.baselines))
    head = ["case", "outcome", "ran", "NSA", "95 % interval, ms", "p99, ms", "end to end, ms", "share of the limit"]
    rows = []
    for comparison in here:
        nsa, by_name = comparison.nsa, {other.key.implementation: other for other in comparison.baselines}
        rows.append(
            [
                Cell(nsa.key.case, NAME),
                Cell(nsa.outcome.value, GOOD if nsa.outcome is CaseOutcome.PASSED else BAD),
                Cell(nsa.correctness.path if nsa.correctness else "nothing"),
                number(console.figure(nsa) or None),
                number(None if nsa.interval_ms is None else " to ".join(map(digits, nsa.interval_ms))),
                number(digits(nsa.samples.p99_ms) if nsa.samples and nsa.samples.p99_ms is not None else None),
                number(None if nsa.end_to_end_ms is None else digits(nsa.end_to_end_ms)),
                number(None if nsa.share_of_limit is None else f"{100 * nsa.share_of_limit:.1f} %"),
                *(number(_versus(nsa, by_name.get(name))) for name in names),
            ]
        )
    return ReportTable([*head, *(f"{name} (NSA is × as fast)" for name in names)], rows)


def followed(here: Sequence[BaselineComparison]) -> list[str]:
    """Which recorded curves the recorded inputs follow, each kind and length once: "recorded at 8192 tokens: ..."."""
    return sorted({f"{c.nsa.key.inputs} {c.nsa.inputs_follow}" for c in here if c.nsa.inputs_follow is not None})


def _versus(nsa: Record, other: Record | None) -> str:
    if other is None:
        return "not run"
    faster = speed_up(nsa, other)
    times = "" if faster is None else f" ({faster:.2f}×)"
    return (console.figure(other) or other.outcome.value) + times


def summary(here: Sequence[BaselineComparison]) -> str:
    """In a sentence, how much passed and what of NSA is wrong."""
    records = [record for c in here for record in (c.nsa, *c.baselines)]
    passed = sum(record.outcome is CaseOutcome.PASSED for record in records)
    wrong = [record.key.case for record in speedup.faults(records)]
    faults = f"NSA is wrong on {', '.join(wrong)}" if wrong else "NSA is wrong on none"
    red = ", ".join(f"{record.key.name} is {record.outcome.value}" for record in speedup.red_baselines(records))
    return f"{passed} of {len(records)} measurements passed; {faults}" + (f"; of the baselines {red}." if red else ".")


def limits(here: Sequence[BaselineComparison]) -> ReportTable:
    """Arithmetic and traffic that each figure amounts to, by the case's own count, beside the measured peaks."""
    head = ("case", "implementation", "TFLOP/s", "TB/s", "share of the limit")
    records = [record for c in here for record in (c.nsa, *c.baselines) if record.share_of_limit is not None]
    rows = [
        [
            Cell(record.key.case, NAME),
            Cell(record.key.implementation),
            number(None if record.tflops is None else digits(record.tflops)),
            number(None if record.tb_per_s is None else digits(record.tb_per_s)),
            number(f"{100 * (record.share_of_limit or 0):.1f} %"),
        ]
        for record in records
    ]
    return ReportTable(head, rows)


def missing(here: Sequence[BaselineComparison]) -> ReportTable:
    """Every measurement without a number."""
    head = ("measurement", "outcome", "reason", "reproduce with")
    records = [record for c in here for record in (c.nsa, *c.baselines) if record.outcome is not CaseOutcome.PASSED]
    rows = [
        [Cell(r.key.name, NAME), Cell(r.outcome.value, BAD), Cell(r.reason or ""), Cell(r.command, NAME)]
        for r in records
    ]
    return ReportTable(head, rows)


def doubtful(here: Sequence[BaselineComparison]) -> ReportTable:
    """Figures that stand with a reservation."""
    head = ("measurement", "reservation")
    records = [record for c in here for record in (c.nsa, *c.baselines)]
    said = [(record, reservations.with_device(record, record.fingerprint)) for record in records]
    rows = [[Cell(record.key.name, NAME), Cell("; ".join(words))] for record, words in said if words]
    return ReportTable(head, rows)


def unmeasured(visits: Mapping[str, Sequence[CaseVisit]], newest_utc: str) -> ReportTable:
    """NSA's cases that the newest run has left out, the one that was measured longest ago first."""
    last = {name: found[-1].utc for name, found in visits.items() if name.endswith(f"/{NSA}")}
    rows = [
        [Cell(name, NAME), when(utc)]
        for name, utc in sorted(last.items(), key=lambda one: (one[1], one[0]))
        if utc < newest_utc
    ]
    return ReportTable(("case", "last measured, UTC"), rows)


def machine(newest: Fingerprint) -> ReportTable:
    """Every part of a fingerprint."""
    return ReportTable(
        ("what", "value"), [[Cell(name), Cell(text)] for name, text in _spelt(dataclasses.asdict(newest))]
    )


def _spelt(parts: dict[str, object], prefix: str = "") -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = []
    for name, value in parts.items():
        if isinstance(value, dict):
            rows += _spelt(value, f"{prefix}{name}.")
        else:
            rows.append((prefix + name, "unknown" if value is None else str(value)))
    return rows


@dataclass(frozen=True)
class Race:
    """NSA and the fastest baseline of one case in one run."""

    tokens: int
    nsa: Record
    fastest: Record
    ratio: float
    """How many times as fast NSA is."""


def headlines(groups: Sequence[Group]) -> ReportTable:
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
                    number(style.in_k(last.tokens)),
                    number(console.figure(last.nsa)),
                    number(f"{last.fastest.key.implementation} {console.figure(last.fastest)}"),
                    number(f"{last.ratio:.2f}×"),
                    number(faster_from(races)),
                ]
            )
    return ReportTable(head, rows)


def _race(comparison: BaselineComparison) -> Race | None:
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
    return "no measured length" if ahead is None else style.in_k(ahead)
