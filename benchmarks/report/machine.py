"""The page of one machine: its figures, how they came about over the runs, and what they leave to gain."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.cases.key import Key
from benchmarks.history import accepted
from benchmarks.history.accepted import Acceptance
from benchmarks.history.speedup import BaselineComparison
from benchmarks.history.store import LatencySeries, Store
from benchmarks.report import changes, lengths, machine_tables, references, style, trends
from benchmarks.report.changes import SeriesTrend
from benchmarks.report.folder import Picture, ReportFolder
from benchmarks.report.lengths import Group
from benchmarks.report.published import PublishedSeries
from benchmarks.report.references import Reference
from benchmarks.report.table import Cell, ReportTable
from benchmarks.report.trends import Boundary, TrendRow

PARTS = "Parts of the forward pass"


@dataclass(frozen=True)
class MachineSection:
    """What the page shows."""

    id: str
    device: str
    summary: str
    headlines: ReportTable
    figures: ReportTable
    lengths: Sequence[Picture]
    trends: Sequence[Picture]
    news: str
    changes: ReportTable
    standings: ReportTable
    boundaries: ReportTable
    memory: Sequence[Picture]
    limit_pictures: Sequence[Picture]
    limits: ReportTable
    missing: ReportTable
    doubtful: ReportTable
    about: ReportTable

    @property
    def page(self) -> str:
        """File name; the prefix keeps a machine of any name apart from the other pages."""
        return f"machine-{self.id}.html"


@dataclass(frozen=True)
class Context:
    """What is known beside the measurements."""

    published: Sequence[PublishedSeries]
    baselines: Mapping[tuple[str, str, str], Acceptance]
    """By (machine, device, case)."""


def build(
    folder: ReportFolder, store: Store, name: str, here: Sequence[BaselineComparison], context: Context
) -> MachineSection:
    """Draw the pictures of one machine and fill its tables. `here`: its newest comparisons, at least one."""
    newest = max((comparison.nsa.fingerprint for comparison in here), key=lambda fingerprint: fingerprint.utc)
    groups = lengths.groups(here)
    history = store.history(name)
    followed = changes.follow(history)
    marked = trends.boundaries(store.runs(name))
    standings = accepted.standings(name, history, context.baselines) if context.baselines else []
    return MachineSection(
        id=name,
        device=newest.device,
        summary=machine_tables.summary(here),
        headlines=machine_tables.headlines(groups),
        figures=machine_tables.figures(here),
        lengths=_lengths(folder, name, groups, context.published),
        trends=_trends(folder, name, followed, context.published, marked),
        news=changes.news(followed, standings),
        changes=changes.table(followed),
        standings=changes.standings(standings),
        boundaries=_boundaries(marked),
        memory=_memory(folder, name, groups),
        limit_pictures=_limits(folder, name, groups),
        limits=machine_tables.limits(here),
        missing=machine_tables.missing(here),
        doubtful=machine_tables.doubtful(here),
        about=machine_tables.machine(newest),
    )


def _lengths(
    folder: ReportFolder, name: str, groups: Sequence[Group], known: Sequence[PublishedSeries]
) -> list[Picture]:
    pictures = [
        picture
        for mode in lengths.TITLES
        for group in groups
        if group.mode == mode
        for picture in lengths.throughput(folder, name, group, known)
    ]
    for label in dict.fromkeys(group.label for group in groups if group.mode.startswith(lengths.PART)):
        pictures += lengths.parts(folder, name, label, [group for group in groups if group.label == label])
    return pictures


def _memory(folder: ReportFolder, name: str, groups: Sequence[Group]) -> list[Picture]:
    shown = [group for mode in lengths.MEMORY_MODES for group in groups if group.mode == mode]
    return [picture for group in shown for picture in lengths.memory(folder, name, group)]


def _limits(folder: ReportFolder, name: str, groups: Sequence[Group]) -> list[Picture]:
    return [
        picture
        for mode in lengths.TITLES
        for picture in lengths.limits(folder, name, mode, [group for group in groups if group.mode == mode])
    ]


def _trends(
    folder: ReportFolder,
    name: str,
    followed: Sequence[SeriesTrend],
    known: Sequence[PublishedSeries],
    marked: Sequence[Boundary],
) -> list[Picture]:
    """A picture per mode and shape; all parts of the forward pass on one."""
    kinds: dict[tuple[str, str], list[SeriesTrend]] = {}
    for one in followed:
        key = one.series.newest.key
        title = PARTS if key.mode.startswith(lengths.PART) else lengths.TITLES.get(key.mode, key.mode)
        kinds.setdefault((title, lengths.label(key)), []).append(one)
    pictures = []
    for (title, label), alike in kinds.items():
        several_paths = len({_path(one.series) for one in alike}) > 1
        rows = [
            TrendRow(
                _row_label(one.series, several_paths),
                one.series,
                one.trend.changes,
                _at_length(known, one.series.newest.key, name),
            )
            for one in sorted(alike, key=_by_size)
        ]
        pictures += trends.draw(folder, name, f"{title}, {label}", rows, marked)
    return pictures


def _by_size(one: SeriesTrend) -> tuple[str, int, int, str]:
    key = one.series.newest.key
    return key.mode, key.num_keys, key.batch, _path(one.series)


def _path(series: LatencySeries) -> str:
    return series.newest.correctness.path if series.newest.correctness else ""


def _row_label(series: LatencySeries, with_path: bool) -> str:
    key = series.newest.key
    batch = "" if key.batch == 1 else f", batch {key.batch}"
    part = f"{key.mode.removeprefix(lengths.PART)}, " if key.mode.startswith(lengths.PART) else ""
    return part + style.in_k(key.num_keys) + batch + (f", {_path(series)}" if with_path else "")


def _at_length(known: Sequence[PublishedSeries], key: Key, name: str) -> list[Reference]:
    """The throughput that others measured of exactly this case."""
    lines = references.throughput([one for one in known if not one.expected], key, name, {key.num_keys: key.batch})
    return [
        Reference(line.of, line.label, [(tokens, value)])
        for line in lines
        for tokens, value in line.points
        if tokens == key.num_keys
    ]


def _boundaries(marked: Sequence[Boundary]) -> ReportTable:
    rows = [[Cell(boundary.utc), Cell("; ".join(boundary.differences))] for boundary in reversed(marked)]
    return ReportTable(("from the run of", "what changed"), rows)
