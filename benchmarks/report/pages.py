"""The pages and their figures, from the records: results/report/index.html, which opens from the disk.

Jinja escapes every text, so that no record can put markup on a page.
"""

from __future__ import annotations

import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jinja2

from benchmarks.ab import result
from benchmarks.history import accepted, speedup
from benchmarks.history import mutants as recorded
from benchmarks.history.store import Store
from benchmarks.report import calibration, comparisons, ledger, machine, mutants, published
from benchmarks.report.folder import ReportFolder
from benchmarks.report.machine import MachineSection

INDEX = "index.html"
FURTHER_PAGES = {"Calibration": "calibration.html", "Incidents": "ledger.html"}
TITLE = "Native Sparse Attention: what was measured"
_MANY_RUNS = 300
"""From here on the machines' pages are made side by side: a process of its own takes some 3 s to start."""
_ENVIRONMENT = jinja2.Environment(
    loader=jinja2.PackageLoader("benchmarks.report"),
    autoescape=True,
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)


def build(results: Path) -> Path:
    """Write the pages of everything below `results`; where they start. An empty folder gives a page that says so."""
    folder = ReportFolder(results / "report")
    machine_pages = _machines(results)
    for one in machine_pages:
        folder.adopt(one.written)
    machines = [one.machine for one in machine_pages if one.machine]
    damaged = [line for one in machine_pages for line in one.damaged]
    answers, no_answers = result.read(results)
    moved, not_moved = accepted.read(results)
    calibrations, no_calibrations = calibration.read(results)
    incidents, no_incidents = ledger.read(results)
    tried, no_mutants = mutants.read(results)
    compared = comparisons.comparisons(answers)
    pages = [("Verdicts", INDEX), *((m.device, m.page) for m in machines), *FURTHER_PAGES.items()]

    def write(name: str, title: str, template: str, **content: Any) -> Path:
        return folder.page(name, render(template, here=name, title=title, pages=pages, **content))

    for m in machines:
        write(m.page, f"{m.device} ({m.id})", "machine.html", m=m)
    write(
        "calibration.html", "How often the judge is right", "calibration.html",
        shown=[calibration.show(folder, one) for one in calibrations],
    )  # fmt: skip
    write(
        "ledger.html", "The ledger of commits and incidents", "ledger.html",
        ledger=ledger.rows(incidents, comparisons.speed(compared)), red=ledger.red(incidents),
        mutants=mutants.rows(tried), unseen=mutants.unseen(tried), wanted=f"{recorded.WANTED:.0%}",
    )  # fmt: skip
    index = write(
        INDEX, TITLE, "index.html", machines=machines,
        comparisons=comparisons.newest(compared), earlier=comparisons.earlier(compared),
        accepted=comparisons.accepted(moved),
        damaged=[*damaged, *no_answers, *not_moved, *no_calibrations, *no_incidents, *no_mutants],
    )  # fmt: skip
    folder.remove_leftovers()
    return index


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


def _machines(results: Path) -> list[_MachinePages]:
    """Every machine that has runs, the one with the newest first."""
    names = sorted(folder.name for folder in (results / "runs").glob("*/"))
    workers = min(len(names), os.cpu_count() or 1)
    if workers < 2 or sum(1 for _ in (results / "runs").glob("*/*.jsonl")) < _MANY_RUNS:
        machine_pages = [_pages_of(results, name) for name in names]
    else:
        # not forked: NumPy has threads
        with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
            machine_pages = list(pool.map(partial(_pages_of, results), names))
    return sorted(machine_pages, key=lambda one: one.newest, reverse=True)


def _pages_of(results: Path, name: str) -> _MachinePages:
    """Draw the pictures of one machine and fill its tables."""
    folder = ReportFolder(results / "report")
    stored = Store(results, name)
    here = speedup.comparisons(stored.current())
    theirs = published.read(path) if (path := published.path(results)).exists() else []
    context = machine.Context(theirs, accepted.current(results))
    return _MachinePages(
        machine.build(folder, stored, name, here, context) if here else None,
        max((run.utc for run in stored.runs(name)), default=""),
        [f"{line.path.relative_to(results)}:{line.line}: {line.why}" for line in stored.damaged()],
        folder.written,
    )


def render(template: str, **content: Any) -> str:
    """One page. Raises jinja2.UndefinedError where the template asks for what is not given."""
    return _ENVIRONMENT.get_template(template).render(**content)
