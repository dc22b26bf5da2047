"""NSA beside its baselines. A ratio names its baseline and is taken within one run on one machine."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from benchmarks.cases.key import NSA
from benchmarks.cases.outcome import FAULTS, CaseOutcome
from benchmarks.history.records import Record


@dataclass(frozen=True)
class BaselineComparison:
    """One record of NSA and the baselines of the same case in the same run."""

    nsa: Record
    baselines: tuple[Record, ...]


def speed_up(nsa: Record, baseline: Record) -> float | None:
    """How many times as fast as the baseline NSA is; None unless both have a latency."""
    if nsa.latency_ms is None or baseline.latency_ms is None:
        return None
    return baseline.latency_ms / nsa.latency_ms


def comparisons(records: Iterable[Record]) -> list[BaselineComparison]:
    """The newest run of each case on each machine that has NSA and a baseline, in the order in which cases first ran.

    NSA measured alone counts where no run has both, and where it ended otherwise: no newer failure stays hidden.
    """
    newest: dict[tuple[str, str, str], BaselineComparison] = {}
    dense: dict[tuple[str, str, str], list[Record]] = {}
    for record in sorted(records, key=lambda record: (record.fingerprint.utc, record.key.implementation == NSA)):
        run = (record.fingerprint.machine, record.key.case, record.fingerprint.utc)
        if record.key.implementation != NSA:
            dense.setdefault(run, []).append(record)
            continue
        case = (record.fingerprint.machine, record.key.case, record.key.backend_asked or "")
        baselines = tuple(dense.get(run, ()))
        earlier = newest.get(case)
        if baselines or not (earlier and earlier.baselines and earlier.nsa.outcome is record.outcome):
            newest[case] = BaselineComparison(record, baselines)
    return list(newest.values())


def faults(records: Iterable[Record]) -> list[Record]:
    """What makes a run fail: NSA itself wrong, not finite, crashed or stalled."""
    return [record for record in records if record.key.implementation == NSA and record.outcome in FAULTS]


def red_baselines(records: Iterable[Record]) -> list[Record]:
    """Baselines that are themselves wrong or broken: no run fails for them, but what it compares with is missing."""
    return [record for record in records if record.key.implementation != NSA and record.outcome in FAULTS]


def nothing_measured(records: Iterable[Record]) -> bool:
    """Whether NSA was asked for and has neither a figure nor a fault: unsupported, say, on every case."""
    of_nsa = [record for record in records if record.key.implementation == NSA]
    return bool(of_nsa) and not any(record.outcome in (CaseOutcome.PASSED, *FAULTS) for record in of_nsa)
