"""The pages and their figures, from the records: results/report/index.html, which opens from the disk.

Jinja escapes every text, so that no record can put markup on a page.
"""

from __future__ import annotations

import importlib.resources
import multiprocessing
import os
import statistics
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

import jinja2

from benchmarks.ab import result
from benchmarks.cases import inputs
from benchmarks.history import accepted, speedup
from benchmarks.history import alerts as kept
from benchmarks.history import mutants as recorded
from benchmarks.history.judgement import CaseState
from benchmarks.history.records import Record
from benchmarks.history.store import Store
from benchmarks.report import published
from benchmarks.report.first_page import alerts, comparisons, evidence
from benchmarks.report.first_page.verdicts import Answers, last_run
from benchmarks.report.folder import ReportFolder
from benchmarks.report.further_pages import atlas, backtest, calibration, estimates, ledger, mutants, parallel, proof
from benchmarks.report.links import Repository
from benchmarks.report.machine_pages import machine
from benchmarks.report.machine_pages.case_pages import ReportContext
from benchmarks.report.machine_pages.machine import MachineSection
from benchmarks.report.style import in_short
from benchmarks.report.table import percent
from harness import forced

INDEX = "index.html"
PROOF = "What is proven where"
FURTHER_PAGES = {
    PROOF: "proof.html", "Atlas": "atlas.html", "Estimates": "estimates.html",
    "Several GPUs": "parallel.html",
    "Calibration": "calibration.html", "Incidents": "ledger.html",
}  # fmt: skip
TITLE = "Native Sparse Attention: is it slower?"
_MANY_RUNS = 300
"""From here on the machines' pages are made side by side: a process of its own takes some 3 s to start."""
_SCRIPT = Path(__file__).parent / "templates" / "report.js"
_ENVIRONMENT = jinja2.Environment(
    loader=jinja2.PackageLoader("benchmarks.report"),
    autoescape=True,
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_ENVIRONMENT.filters |= {"percent": percent, "in_short": in_short}
_ENVIRONMENT.globals |= {"median": statistics.median}


@dataclass(frozen=True)
class ReportSettings:
    """How the pages are made."""

    script: bool = True
    """Charts that answer to the reader, by Plotly; else pictures, and no script at all."""
    repository: Repository = field(default_factory=Repository)
    """Where commits are shown."""
    overdue_days: float = 2.0
    """A machine whose newest run is older is red."""
    now: datetime | None = None
    """Aware; None is the moment of the build."""


@dataclass(frozen=True)
class Report:
    """What was built."""

    index: Path
    """Where the pages start."""
    answers: Answers


def build(results: Path, settings: ReportSettings | None = None) -> Report:
    """Write the pages of everything below `results`. An empty folder gives a page that says so."""
    settings = settings or ReportSettings()
    folder = ReportFolder(results / "report")
    machine_pages = _machines(results, settings)
    for one in machine_pages:
        folder.adopt(one.written)
    machines = [one.machine for one in machine_pages if one.machine]
    devices = {one.id: one.device for one in machines}
    damaged = [line for one in machine_pages for line in one.damaged]
    compare_results, no_results = result.read(results)
    moved, not_moved = accepted.read(results)
    calibrations, no_calibrations = calibration.read(results)
    backtests, no_backtests = backtest.read(results)
    incidents, no_incidents = ledger.read(results)
    tried, no_mutants = mutants.read(results)
    stored_alerts, no_alerts = kept.read(results)
    atlases, asked, no_atlases = atlas.read(results)
    estimated, no_estimates = estimates.read(results)
    compared = comparisons.comparisons(compare_results)
    nav = [("Verdicts", INDEX), *((f"{m.device} ({m.id})", m.page) for m in machines), *FURTHER_PAGES.items()]
    now = settings.now or datetime.now(timezone.utc)
    answers = Answers(sorted((row for m in machines for row in m.verdicts), key=lambda row: row.order))
    repository, incidents_page = settings.repository, FURTHER_PAGES["Incidents"]

    def write(name: str, title: str, template: str, **content: Any) -> Path:
        return folder.page(name, render(template, here=name, title=title, nav=nav, **content))

    for m in machines:
        write(m.page, f"{m.device} ({m.id})", "machine.html", m=m)
    write(
        "calibration.html", "How often compare is right", "calibration.html",
        shown=[calibration.show(folder, one, devices) for one in calibrations],
        backtests=list(map(backtest.show, backtests)),
    )  # fmt: skip
    write(
        incidents_page, "The ledger of commits and incidents", "ledger.html",
        ledger=ledger.rows(incidents, comparisons.speed(compared)), red=ledger.red(incidents),
        mutants=mutants.rows(tried), unseen=mutants.unseen(tried), wanted=f"{recorded.WANTED:.0%}",
    )  # fmt: skip
    write(
        "atlas.html", "What a trained model selects", "atlas.html", shown=atlas.show(folder, atlases),
        every=atlas.all_of(atlases), tasks=atlas.tasks(asked), less_often=atlas.less_often(asked),
        chance=asked[-1].chance if asked else None,
    )  # fmt: skip
    write(
        "proof.html", PROOF, "proof.html",
        proven=proof.table(
            results, [(m.id, len(m.figures.rows), m.run) for m in machines], incidents,
            [
                one.fingerprint.machine for one in calibrations
                if devices.get(one.fingerprint.machine, one.fingerprint.device) == one.fingerprint.device
            ],
            repository,
        ),
    )  # fmt: skip
    write("estimates.html", "Estimated, not measured: GPUs without a record", "estimates.html", e=estimated)
    ranks, lengths = parallel.MODELLED
    write(
        "parallel.html", "One sequence over several GPUs", "parallel.html", ranks=ranks, tokens=lengths[-1],
        s=parallel.show(folder, [record for one in machine_pages for record in one.parallel], repository),
        command=parallel.COMMAND,
    )  # fmt: skip
    index = write(
        INDEX, TITLE, "index.html", machines=machines, answers=answers, settings=settings, CaseState=CaseState,
        runs=[last_run(m.id, m.device, m.utc, now, settings.overdue_days) for m in machines],
        alerts=alerts.table(stored_alerts, repository, now),
        evidence=[
            alerts.headline(stored_alerts), evidence.laws(results, repository),
            evidence.incidents(incidents, repository, incidents_page),
            evidence.mutants(tried, repository, incidents_page),
            evidence.memory([(m.page, m.memory_trends) for m in machines]),
        ],
        comparisons=comparisons.newest(compared), earlier=comparisons.earlier(compared),
        accepted=comparisons.accepted(moved),
        damaged=[
            *damaged, *no_results, *not_moved, *no_calibrations, *no_backtests, *no_incidents, *no_mutants, *no_alerts,
            *no_atlases, *no_estimates,
        ],
    )  # fmt: skip
    if settings.script:
        folder.copy(_SCRIPT)
        folder.copy(_plotly())
    folder.remove_leftovers()
    return Report(index, answers)


def _plotly() -> Path:
    """The library that draws the charts, as its package brings it; nothing else of the package is used."""
    return Path(str(importlib.resources.files("plotly") / "package_data" / "plotly.min.js"))


@dataclass(frozen=True)
class _MachinePages:
    """What came of one machine's records."""

    machine: MachineSection | None
    """None without a record of NSA."""
    newest: str
    """UTC of the newest run; "" without one."""
    damaged: list[str]
    written: frozenset[str]
    """Names of the files in the folder."""
    parallel: list[Record]
    """What the page of several GPUs needs."""


def _machines(results: Path, settings: ReportSettings) -> list[_MachinePages]:
    """Every machine that has runs, the one with the newest first; a forced one has no times, and no page."""
    names = sorted(one.name for one in (results / "runs").glob("*/") if forced.of(one.name) is None)
    workers = min(len(names), os.cpu_count() or 1)
    if workers < 2 or sum(1 for _ in (results / "runs").glob("*/*.jsonl")) < _MANY_RUNS:
        machine_pages = [_pages_of(results, settings, name) for name in names]
    else:
        # not forked: NumPy has threads
        with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
            machine_pages = list(pool.map(partial(_pages_of, results, settings), names))
    return sorted(machine_pages, key=lambda one: one.newest, reverse=True)


def _pages_of(results: Path, settings: ReportSettings, name: str) -> _MachinePages:
    """Fill the tables of one machine; draw its charts, and write the pages that they are on."""
    folder = ReportFolder(results / "report")
    stored = Store(results, name)
    here = [one for one in speedup.comparisons(stored.current()) if one.nsa.key.inputs in inputs.OFFERED]
    theirs = published.read(path) if (path := published.path(results)).exists() else []
    context = ReportContext(theirs, accepted.current(results), settings.repository, settings.script)
    found = machine.build(folder, stored, name, here, context) if here else None
    if found is not None:
        nav = [("Verdicts", INDEX), (f"{found.device} ({found.id})", found.page)]
        for page in found.case_pages:
            title = f"{page.mode}, {page.heads}, {found.device}"
            content = {"here": page.file, "title": title, "nav": nav, "page": page, "script": settings.script}
            folder.page(page.file, render("case.html", **content))
        found = replace(found, case_pages=[page.without_charts() for page in found.case_pages])
    return _MachinePages(
        found,
        max((run.utc for run in stored.runs(name)), default=""),
        [f"{line.path.relative_to(results)}:{line.line}: {line.why}" for line in stored.damaged()],
        folder.written,
        parallel.records(stored, name),
    )


def render(template: str, **content: Any) -> str:
    """One page. Raises jinja2.UndefinedError where the template asks for what is not given."""
    return _ENVIRONMENT.get_template(template).render(**content)
