"""Queries over every run. All lines are read and checked once, full records are kept only where a query asks for them:
two years of five GPUs are 600,000 of them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from benchmarks.baselines import BASELINES
from benchmarks.cases.key import NSA, Key
from benchmarks.cases.outcome import CaseOutcome
from benchmarks.history import anchors, reservations, run_file
from benchmarks.history.anchors import AnchorRatio, Figure, Series, SeriesAnchors
from benchmarks.history.conditions import Conditions, hard
from benchmarks.history.record_line import RecordLine
from benchmarks.history.records import Anchor, Record, known_peak_mib, share_of_limit, told_apart
from benchmarks.history.run_file import DamagedLine
from benchmarks.peak_memory import OutOfMemory
from harness.fingerprint import Fingerprint


@dataclass(frozen=True)
class Point:
    """One measurement of a series: what a trend needs of a record, in the record's words."""

    utc: str
    latency_ms: float
    interval_ms: tuple[float, float] | None
    tokens_per_s: float | None
    fingerprint: Fingerprint
    share_of_limit: float | None = None
    dense_ms: Mapping[str, float] = field(default_factory=dict)
    """Latency of each dense baseline of the same case in the same run, by name."""
    reservations: tuple[str, ...] = ()
    """Why the figure is not to be relied on; empty where it is."""
    whole_dense_ms: Mapping[str, float] = field(default_factory=dict)
    """Of a part of the forward pass: the same of the whole forward pass."""

    @property
    def host_ms(self) -> Mapping[str, float]:
        """What tells of a soft change what it did to the machine: dense attention in the same run.

        For a part of the forward pass it is that beside the whole one, of the same shape, length and inputs: what
        changes the clocks or the host changes them for both. How a part is timed it does not tell, as dense attention
        does not tell it of the whole.
        """
        return self.dense_ms or self.whole_dense_ms


@dataclass(frozen=True)
class LatencySeries:
    """Measurements with the same `Record.identity`."""

    newest: Record
    """The last of them in full."""
    points: list[Point]
    """Oldest first."""
    anchors: SeriesAnchors | None = None
    """What was measured of other commits under the conditions of these points."""


class CaseVisit(NamedTuple):
    """That a run met one implementation of a case, whatever came of it."""

    utc: str
    fingerprint: Fingerprint
    path: str | None
    case_s: float | None
    peak_mem_mib: float | None
    """None also where a record's figure is none (`records.known_peak_mib`)."""
    peak_mem_source: str | None
    out_of_memory: OutOfMemory | None
    launches_per_call: int | None = None
    passed: bool = True

    @property
    def nsa_sha256(self) -> str:
        return self.fingerprint.nsa_sha256


class _Row(NamedTuple):
    """The columns of one record."""

    fingerprint: Fingerprint
    key: Key
    path: str | None
    """What ran, as the implementation recorded it."""
    latency_ms: float | None
    interval_ms: tuple[float, float] | None
    tokens_per_s: float | None
    flops: float | None
    bytes_moved: float | None
    reservations: tuple[str, ...]
    file: int
    """Number of its file."""
    case_s: float | None
    peak_mem_mib: float | None
    peak_mem_source: str | None
    out_of_memory: OutOfMemory | None
    launches_per_call: int | None
    anchor: Anchor | None
    """None where NSA, or a baseline, of the run itself was measured."""
    apart: str
    """`records.told_apart`."""
    passed: bool

    @property
    def series(self) -> Series:
        """`Record.identity`, in an order for pages: by case, then by what ran."""
        return self.key.case, self.path or "", self.key.identity, self.apart


class Store:
    """Every run below a folder of results, or one machine's, as it was when this was made."""

    def __init__(self, results: Path, machine: str = "*") -> None:
        self._files = sorted((results / "runs").glob(f"{machine}/*.jsonl"))
        self._rows: list[_Row] = []
        self._anchors: list[_Row] = []
        self._damaged: list[DamagedLine] = []
        for number, path in enumerate(self._files):
            machine_here = path.parent.name
            for found in run_file.entries(path):
                if isinstance(found, DamagedLine):
                    self._damaged.append(found)
                elif found.fingerprint.machine != machine_here:
                    self._damaged.append(DamagedLine(path, found.number, f"a record of {found.fingerprint.machine!r}"))
                else:
                    row = _row(found.key, found.fingerprint, found.figures, number)
                    (self._anchors if row.anchor else self._rows).append(row)
        self._rows.sort(key=lambda row: row.fingerprint.utc)  # stable: by file and line within one run

    def __len__(self) -> int:
        """Records of all runs, without their anchors."""
        return len(self._rows)

    def machines(self) -> list[str]:
        """Every machine that has a record, the one with the newest run first."""
        return list(dict.fromkeys(row.fingerprint.machine for row in reversed(self._rows)))

    def records(
        self, machine: str | None = None, mode: str | None = None, implementation: str | None = None, since: str = ""
    ) -> list[Record]:
        """Full records by run, oldest first, without anchors. `since`: UTC of the first run wanted."""
        wanted = {
            row.file
            for row in self._rows
            if row.fingerprint.utc >= since
            and machine in (None, row.fingerprint.machine)
            and mode in (None, row.key.mode)
            and implementation in (None, row.key.implementation)
        }
        return [
            record
            for record in self._full(wanted)
            if record.fingerprint.utc >= since
            and machine in (None, record.fingerprint.machine)
            and mode in (None, record.key.mode)
            and implementation in (None, record.key.implementation)
        ]

    def current(self) -> list[Record]:
        """As few records as `speedup.comparisons` needs to answer as it would for all of them, oldest run first.

        For each case the newest run with NSA and a baseline, and what came after; NSA's newest where none has both.
        """
        oldest = self._oldest_needed()
        files = {row.file for row in self._rows if row.fingerprint.utc >= oldest.get(_case(row), "~")}
        return [record for record in self._full(files) if record.fingerprint.utc >= oldest.get(_case(record), "~")]

    def _oldest_needed(self) -> dict[tuple[str, str], str]:
        """UTC of the first run that `current` needs, by (machine, case) of those that NSA was measured on."""
        dense = {(*_case(row), row.fingerprint.utc) for row in self._rows if row.key.implementation != NSA}
        both: dict[tuple[str, str, str | None], str] = {}
        alone: dict[tuple[str, str, str | None], str] = {}
        for row in self._rows:  # oldest first: the last one stays
            if row.key.implementation != NSA:
                continue
            name = (*_case(row), row.key.backend_asked)
            alone[name] = row.fingerprint.utc
            if (*_case(row), row.fingerprint.utc) in dense:
                both[name] = row.fingerprint.utc
        oldest: dict[tuple[str, str], str] = {}
        for name, utc in alone.items():
            needed, case = both.get(name, utc), name[:2]
            oldest[case] = min(needed, oldest.get(case, needed))
        return oldest

    def history(self, machine: str, implementation: str = NSA) -> list[LatencySeries]:
        """Every latency that this machine measured, by series, in the order of the cases' names."""
        series: dict[Series, list[_Row]] = {}
        dense: dict[tuple[str, str], dict[str, float]] = {}  # by case and run
        for row in self._rows:
            if row.fingerprint.machine != machine or not row.latency_ms:
                continue
            if row.key.implementation == implementation:
                series.setdefault(row.series, []).append(row)
            elif row.key.config is None and row.key.implementation in BASELINES:  # a contender may change at any time
                dense.setdefault((row.key.case, row.fingerprint.utc), {})[row.key.implementation] = row.latency_ms
        newest = {
            _row(record.key, record.fingerprint, record, 0).series: record
            for record in self._full({rows[-1].file for rows in series.values()})
            if record.latency_ms
        }
        ratios = self.anchor_ratios(machine) if implementation == NSA else {}
        return [
            LatencySeries(
                newest[name],
                [_point(row, dense) for row in rows],
                SeriesAnchors(ratios, name, rows[0].key.mode) if ratios else None,
            )
            for name, rows in sorted(series.items())
        ]

    def figures(self, machine: str, sources: Collection[str] | None = None) -> list[Figure]:
        """Latencies of NSA by what was measured, anchors included: of these sources (`nsa_sha256`) or of all."""
        return [
            _figure(row)
            for row in (*self._rows, *self._anchors)
            if row.fingerprint.machine == machine
            and row.latency_ms
            and row.key.implementation == NSA
            and (sources is None or _sources(row) in sources)
        ]

    def anchor_ratios(self, machine: str) -> dict[Conditions, list[AnchorRatio]]:
        """What was measured of the same sources under two hard conditions, by the later ones."""
        rows = [row for row in self._anchors if row.fingerprint.machine == machine]
        conditions: dict[str, set[Conditions]] = {}
        for run in self.runs(machine):
            conditions.setdefault(run.nsa_sha256, set()).add(hard(run.conditions))
        for row in rows:
            conditions.setdefault(_sources(row), set()).add(hard(row.fingerprint.conditions))
        twice = {sources for sources, under in conditions.items() if len(under) > 1}
        return anchors.by_new_conditions(anchors.ratios(self.figures(machine, twice))) if twice else {}

    def anchors_tried(self, machine: str) -> list[tuple[Key, Fingerprint]]:
        """Every anchor on record and its run, also those without a figure."""
        return [(row.key, row.fingerprint) for row in self._anchors if row.fingerprint.machine == machine]

    def runs(self, machine: str) -> list[Fingerprint]:
        """Every run of this machine that has a record, oldest first."""
        here = {id(row.fingerprint): row.fingerprint for row in self._rows if row.fingerprint.machine == machine}
        return list(dict.fromkeys(here.values()))  # the lines of an old run have each its own

    def visits(self, machine: str) -> dict[str, list[CaseVisit]]:
        """What this machine's runs met, by the name of the key, oldest run first."""
        found: dict[str, list[CaseVisit]] = {}
        for row in self._rows:
            if row.fingerprint.machine == machine:
                memory = (row.peak_mem_mib, row.peak_mem_source, row.out_of_memory, row.launches_per_call)
                visit = CaseVisit(row.fingerprint.utc, row.fingerprint, row.path, row.case_s, *memory, row.passed)
                found.setdefault(row.key.name, []).append(visit)
        return found

    def damaged(self) -> list[DamagedLine]:
        """Every line that is no record, by name."""
        return list(self._damaged)

    def _full(self, files: set[int]) -> list[Record]:
        """The records of these files without their anchors, oldest run first."""
        found = [
            record
            for number in sorted(files)
            for record in run_file.read(self._files[number])
            if isinstance(record, Record)
            and record.anchor is None
            and record.fingerprint.machine == self._files[number].parent.name
        ]
        return sorted(found, key=lambda record: record.fingerprint.utc)


def _row(key: Key, fingerprint: Fingerprint, figures: Record | RecordLine, file: int) -> _Row:
    return _Row(
        fingerprint,
        key,
        figures.correctness.path if figures.correctness else None,
        figures.latency_ms,
        figures.interval_ms,
        figures.tokens_per_s,
        figures.flops,
        figures.bytes_moved,
        reservations.with_device(figures, fingerprint),
        file,
        figures.case_s,
        known_peak_mib(key, figures.peak_mem_mib, figures.peak_mem_source),
        figures.peak_mem_source,
        figures.out_of_memory,
        figures.launches_per_call,
        Anchor(figures.anchor.commit, figures.anchor.nsa_sha256) if figures.anchor else None,
        told_apart(key, figures),
        figures.outcome is CaseOutcome.PASSED,
    )


def _sources(row: _Row) -> str:
    return row.anchor.nsa_sha256 if row.anchor else row.fingerprint.nsa_sha256


def _figure(row: _Row) -> Figure:
    assert row.latency_ms is not None
    commit = row.anchor.commit if row.anchor else row.fingerprint.commit
    where = row.fingerprint
    latency = (row.latency_ms, row.interval_ms)
    return Figure(row.series, row.key.mode, where.conditions, where.utc, commit, _sources(row), *latency)


def _case(of: _Row | Record) -> tuple[str, str]:
    return of.fingerprint.machine, of.key.case


def _point(row: _Row, dense: Mapping[tuple[str, str], Mapping[str, float]]) -> Point:
    """`dense`: latency of each dense baseline by case and run."""
    assert row.latency_ms is not None
    share = share_of_limit(row.key, row.fingerprint, row.latency_ms, row.flops, row.bytes_moved)
    whole = row.key.case_of_whole
    return Point(
        row.fingerprint.utc,
        row.latency_ms,
        row.interval_ms,
        row.tokens_per_s,
        row.fingerprint,
        share,
        dense.get((row.key.case, row.fingerprint.utc), {}),
        row.reservations,
        dense.get((whole, row.fingerprint.utc), {}) if whole else {},
    )
