"""The page of one machine: a summary, its newest figures as tables, and where its charts are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.cases import inputs
from benchmarks.history import accepted, trend
from benchmarks.history import launches as launch_history
from benchmarks.history import memory as memory_history
from benchmarks.history import repeats as repeat_history
from benchmarks.history.memory import MemoryTrend
from benchmarks.history.speedup import BaselineComparison
from benchmarks.history.store import Store
from benchmarks.report import changes, memory
from benchmarks.report.first_page import verdicts
from benchmarks.report.first_page.verdicts import VerdictRow
from benchmarks.report.folder import ReportFolder
from benchmarks.report.machine_pages import case_pages, launches, lengths, repeats, tables, trends
from benchmarks.report.machine_pages.case_pages import CasePage, ReportContext
from benchmarks.report.machine_pages.trends import Boundary
from benchmarks.report.table import Cell, ReportTable
from harness.fingerprint import Fingerprint


@dataclass(frozen=True)
class MachineSection:
    """What the page shows."""

    id: str
    device: str
    utc: str
    """Of the newest run."""
    run: Fingerprint
    """Of the newest figures."""
    summary: str
    news: str
    headlines: ReportTable
    figures: ReportTable
    followed: Sequence[str]
    """Which recorded curves the inputs of these figures follow."""
    verdicts: Sequence[VerdictRow]
    """A row of the first page for each case."""
    case_pages: Sequence[CasePage]
    changes: ReportTable
    standings: ReportTable
    boundaries: ReportTable
    limits: ReportTable
    memory: ReportTable
    memory_trends: Sequence[MemoryTrend]
    launches: ReportTable
    repeats: ReportTable
    """Runs of the same sources under the same conditions."""
    repeats_goal: str
    missing: ReportTable
    unmeasured: ReportTable
    doubtful: ReportTable
    about: ReportTable

    @property
    def page(self) -> str:
        """File name; the prefix keeps a machine of any name apart from the other pages."""
        return f"machine-{self.id}.html"


def build(
    folder: ReportFolder, store: Store, name: str, here: Sequence[BaselineComparison], context: ReportContext
) -> MachineSection:
    """Fill the tables and the charts of one machine. `here`: its newest comparisons, at least one.

    Cases on inputs that are offered no more have records, and no verdict.
    """
    newest = max((comparison.nsa.fingerprint for comparison in here), key=lambda fingerprint: fingerprint.utc)
    groups = lengths.groups(here)
    history = [one for one in store.history(name) if one.newest.key.inputs in inputs.OFFERED]
    runs = store.runs(name)
    marked = trends.boundaries(runs, store.anchor_ratios(name))
    followed = trend.follow(history)
    standings = accepted.standings(name, history, context.baselines) if context.baselines else []
    visits = store.visits(name)
    accepted_mib = {
        case: one.peak_mem_mib
        for (machine, device, case), one in context.baselines.items()
        if machine == name and device == newest.device and one.peak_mem_mib is not None
    }
    peaks = memory_history.trends(visits, accepted_mib)
    pages, where = case_pages.build(folder, name, followed, groups, runs, marked, context)
    return MachineSection(
        id=name,
        device=newest.device,
        utc=runs[-1].utc,
        run=newest,
        summary=tables.summary(here),
        news=changes.news(followed, standings),
        headlines=tables.headlines(groups),
        figures=tables.figures(here),
        followed=tables.followed(here),
        verdicts=verdicts.rows(name, followed, here, context.baselines, where, context.repository),
        case_pages=pages,
        changes=changes.table(followed, context.repository),
        standings=changes.standings(standings),
        boundaries=_boundaries(marked),
        limits=tables.limits(here),
        memory=memory.table(peaks, memory.limit_mib(newest.device), context.repository),
        memory_trends=peaks,
        launches=launches.table(launch_history.trends(visits), context.repository),
        repeats=repeats.table(repeat_history.find(history)),
        repeats_goal=repeats.goal(),
        missing=tables.missing(here),
        unmeasured=tables.unmeasured(visits, runs[-1].utc),
        doubtful=tables.doubtful(here),
        about=tables.machine(newest),
    )


def _boundaries(marked: Sequence[Boundary]) -> ReportTable:
    rows = [
        [
            Cell(boundary.utc),
            Cell("; ".join(boundary.differences)),
            Cell(_series(boundary)),
        ]
        for boundary in reversed(marked)
    ]
    return ReportTable(("from the run of", "what changed", "series"), rows)


def _series(boundary: Boundary) -> str:
    """What becomes of them there."""
    if boundary.commits:
        return f"go on where the same sources ran on both sides: {', '.join(boundary.commits)}"
    return "go on beside the dense baseline of the same runs" if boundary.bridged else "are cut"
