"""A page per machine, mode and shape: one case at a time over the runs, and all of them over the length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from urllib.parse import quote

import msgspec
from markupsafe import Markup

from benchmarks.cases.key import PART, Key
from benchmarks.history.accepted import Acceptance
from benchmarks.history.store import LatencySeries
from benchmarks.history.trend import SeriesTrend
from benchmarks.report import changes, labels, references
from benchmarks.report.folder import Picture, ReportFolder
from benchmarks.report.links import Repository
from benchmarks.report.machine_pages import length_charts, lengths, run_chart, trends
from benchmarks.report.machine_pages.chart import Chart
from benchmarks.report.machine_pages.lengths import Group
from benchmarks.report.machine_pages.trends import Boundary, TrendRow
from benchmarks.report.published import PublishedSeries
from benchmarks.report.table import ReportTable
from harness import fingerprint
from harness.fingerprint import Fingerprint

_PARTS = "parts"
"""Stands for all modes that time one part of the forward pass, and for the whole beside them."""


@dataclass(frozen=True)
class ChartedCase:
    """One entry of the page's list of cases."""

    id: str
    """What the address of the page says behind "#case=": "b1/s65536/bfloat16/cold"."""
    name: str
    """The same in words."""
    chart: Markup
    lengths: int | None
    """Which of the page's curves over the length is of its kind."""


@dataclass(frozen=True)
class LengthCurves:
    """What one kind of case shows over the length."""

    label: str
    notes: tuple[str, ...]
    charts: tuple[Markup, ...]
    pictures: tuple[Picture, ...]


@dataclass(frozen=True)
class CasePage:
    """What the page shows."""

    file: str
    mode: str
    """As a title."""
    heads: str
    cases: tuple[ChartedCase, ...]
    first: str
    """The case that the page shows first: that with most runs."""
    runs: Markup
    """Of the machine, for the script: repository; per run its date, commit, and what changed since the one before."""
    changes: ReportTable
    pictures: tuple[Picture, ...]
    """Of the trends, for pages without a script."""
    curves: tuple[LengthCurves, ...]

    def without_charts(self) -> CasePage:
        """What other pages say of it; charts are large, and another process asks."""
        cases = tuple(replace(case, chart=Markup()) for case in self.cases)
        return replace(self, cases=cases, runs=Markup(), curves=())


@dataclass(frozen=True)
class ReportContext:
    """What is known beside the measurements, and how pages are made."""

    published: Sequence[PublishedSeries]
    baselines: Mapping[tuple[str, str, str], Acceptance]
    """By (machine, device, case)."""
    repository: Repository
    script: bool
    """Whether charts are interactive; else they are pictures."""


def json_for_page(value: object) -> Markup:
    """JSON inside a <script> element: no text in it can end the element."""
    return Markup(msgspec.json.encode(value).decode().replace("<", "\\u003c"))


def build(
    folder: ReportFolder,
    machine: str,
    followed: Sequence[SeriesTrend],
    groups: Sequence[Group],
    runs: Sequence[Fingerprint],
    marked: Sequence[Boundary],
    context: ReportContext,
) -> tuple[list[CasePage], dict[str, str]]:
    """Every page of a machine, and where each series stands: its identity -> page and case.

    `marked`: where conditions changed between its runs.
    """
    kinds: dict[tuple[str, str], list[SeriesTrend]] = {}
    for one in followed:
        kinds.setdefault(_kind(one.series.newest.key), []).append(one)
    grouped: dict[tuple[str, str], list[Group]] = {}
    for group in groups:
        for kind in {_kind(group.compared[0].nsa.key), *_of_parts(group)}:
            grouped.setdefault(kind, []).append(group)
    run_list = _runs(runs, context.repository)
    numbers = {run.utc: number for number, run in enumerate(runs)}
    pages: list[CasePage] = []
    where: dict[str, str] = {}
    for kind in sorted({*kinds, *(kind for kind in grouped if kind[0] != _PARTS)}):
        cases = sorted(kinds.get(kind, []), key=_by_size)
        of_kind = grouped.get(kind, [])
        curves, places = _curves(folder, machine, kind, of_kind, context)
        file = folder.unused((machine, *kind), "html")
        ids = _ids(cases)
        where |= {
            one.series.newest.identity: f"{file}#case={quote(name)}" for one, name in zip(cases, ids, strict=True)
        }
        key = cases[0].series.newest.key if cases else of_kind[0].compared[0].nsa.key
        pages.append(
            CasePage(
                file=file,
                mode=labels.mode(key) if kind[0] != "memory" else "Peak memory",
                heads=kind[1],
                cases=tuple(
                    ChartedCase(
                        name,
                        _name(one, cases),
                        _trend(machine, one, numbers, context) if context.script else Markup(),
                        places.get(labels.label(one.series.newest)),
                    )
                    for one, name in zip(cases, ids, strict=True)
                ),
                first=max(zip(cases, ids, strict=True), key=lambda pair: len(pair[0].series.points))[1]
                if cases
                else "",
                runs=run_list,
                changes=changes.table(cases, context.repository),
                pictures=() if context.script else tuple(_pictures(folder, machine, cases, marked, context)),
                curves=curves,
            )
        )
    return pages, where


def _kind(key: Key) -> tuple[str, str]:
    return (_PARTS if key.mode.startswith(PART) else key.mode), key.what


def _of_parts(group: Group) -> list[tuple[str, str]]:
    """The whole forward stands beside its parts."""
    return [(_PARTS, group.compared[0].nsa.key.what)] if group.mode == "prefill-forward" else []


def _by_size(one: SeriesTrend) -> tuple[str, int, int, str, str]:
    key = one.series.newest.key
    return key.mode, key.num_keys, key.batch, labels.details(one.series.newest), _path(one.series)


def _path(series: LatencySeries) -> str:
    return series.newest.correctness.path if series.newest.correctness else ""


def _ids(cases: Sequence[SeriesTrend]) -> list[str]:
    """Words of the cases' names that tell them apart; the path that ran only where it is needed."""
    ids: list[str] = []
    for one in cases:
        key = one.series.newest.key
        part = f"{key.mode.removeprefix(PART)}/" if key.mode.startswith(PART) else ""
        first = name = part + key.case.removeprefix(f"{key.mode}/{key.what}/")
        if name in ids:
            first = name = f"{name}/{_path(one.series)}"
        number = 1
        while name in ids:
            number += 1
            name = f"{first}/{number}"
        ids.append(name)
    return ids


def _name(one: SeriesTrend, cases: Sequence[SeriesTrend]) -> str:
    key = one.series.newest.key
    several = len({_path(other.series) for other in cases}) > 1
    return f"{labels.size(key)}, {labels.details(one.series.newest)}" + (f", {_path(one.series)}" if several else "")


def _trend(machine: str, one: SeriesTrend, numbers: Mapping[str, int], context: ReportContext) -> Markup:
    newest = one.series.newest
    acceptance = context.baselines.get((machine, newest.fingerprint.device, newest.key.name))
    return json_for_page(run_chart.over_runs(one, numbers, acceptance, context.published))


def _runs(runs: Sequence[Fingerprint], repository: Repository) -> Markup:
    """Newest last; a run's conditions are told as they differ from the run before."""
    listed = [
        [
            run.utc,
            run.commit or "",
            bool(run.dirty),
            "; ".join(fingerprint.differences(runs[number - 1], run)) if number else "",
        ]
        for number, run in enumerate(runs)
    ]
    return json_for_page({"repository": repository.base, "runs": listed})


def _curves(
    folder: ReportFolder, machine: str, kind: tuple[str, str], groups: Sequence[Group], context: ReportContext
) -> tuple[tuple[LengthCurves, ...], dict[str, int]]:
    """The curves of each label, and which of them a label has."""
    found: list[LengthCurves] = []
    places: dict[str, int] = {}
    for label in dict.fromkeys(group.label for group in groups):
        of_label = [group for group in groups if group.label == label]
        if kind[0] == _PARTS:
            shown, drawn, notes = _of_label_parts(folder, machine, label, of_label, context)
        else:
            shown, drawn, notes = _of_label(folder, machine, of_label[0], context)
        if shown or drawn:
            places[label] = len(found)
            found.append(
                LengthCurves(label, tuple(notes), tuple(json_for_page(chart) for chart in shown), tuple(drawn))
            )
    return tuple(found), places


def _of_label(
    folder: ReportFolder, machine: str, group: Group, context: ReportContext
) -> tuple[list[Chart], list[Picture], list[str]]:
    with_memory = group.mode in lengths.MEMORY_MODES
    shown: list[Chart | None] = []
    drawn: list[Picture] = []
    if context.script:
        shown = [
            length_charts.over_lengths(group, machine, context.published),
            length_charts.memory(group) if with_memory else None,
        ]
    else:
        if group.mode in labels.TITLES:
            drawn += lengths.throughput(folder, machine, group, context.published)
            drawn += lengths.limits(folder, machine, group.mode, [group])
        drawn += lengths.memory(folder, machine, group) if with_memory else []
    return [chart for chart in shown if chart], drawn, [length_charts.joined_runs([c.nsa for c in group.compared])]


def _of_label_parts(
    folder: ReportFolder, machine: str, label: str, groups: Sequence[Group], context: ReportContext
) -> tuple[list[Chart], list[Picture], list[str]]:
    if not any(group.mode.startswith(PART) for group in groups):
        return [], [], []
    chart = length_charts.parts(groups) if context.script else None
    drawn = [] if context.script else lengths.parts(folder, machine, label, groups)
    notes = [
        length_charts.joined_runs([c.nsa for g in groups for c in g.compared]),
        length_charts.parts_and_whole(groups),
    ]
    return [chart] if chart else [], drawn, [note for note in notes if note]


def _pictures(
    folder: ReportFolder, machine: str, cases: Sequence[SeriesTrend], marked: Sequence[Boundary], context: ReportContext
) -> list[Picture]:
    """The trends as pictures, some cases on each."""
    if not cases:
        return []
    key = cases[0].series.newest.key
    rows = [
        TrendRow(
            _name(one, cases),
            one.series,
            one.trend.changes,
            references.at_length(context.published, one.series.newest.key, machine),
        )
        for one in cases
    ]
    return trends.draw(folder, machine, f"{labels.mode(key)}, {key.what}", rows, marked)
