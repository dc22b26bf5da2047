"""The pages and their pictures, from the records: results/report/index.html, which opens from the disk."""

from __future__ import annotations

import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import accepted, published, verdict
from benchmarks import mutants as recorded
from benchmarks.report import calibrated, judged, ledger, machine, mutants, page
from benchmarks.report.album import Album
from benchmarks.report.machine import Machine
from benchmarks.store import Store

INDEX = "index.html"
FURTHER_PAGES = {"Calibration": "calibration.html", "Incidents": "ledger.html"}
TITLE = "Native Sparse Attention: what was measured"


_MANY_RUNS = 300
"""From here on the machines' pages are made side by side: a process of its own takes some 3 s to start."""


def build(results: Path) -> Path:
    """Write the pages of everything below `results`; where they start. An empty folder gives a page that says so."""
    album = Album(results / "report")
    drawn = _machines(results)
    for one in drawn:
        album.adopt(one.written)
    machines = [one.machine for one in drawn if one.machine]
    damaged = [line for one in drawn for line in one.damaged]
    judgements, no_judgements = judged.read(results)
    moved, not_moved = accepted.read(results)
    calibrations, no_calibrations = calibrated.read(results)
    incidents, no_incidents = ledger.read(results)
    tried, no_mutants = mutants.read(results)
    contests = judged.contests(judgements)
    pages = [("Verdicts", INDEX), *((m.device, m.page) for m in machines), *FURTHER_PAGES.items()]

    def write(name: str, title: str, template: str, **content: Any) -> Path:
        return album.page(name, page.render(template, here=name, title=title, pages=pages, **content))

    for m in machines:
        write(m.page, f"{m.device} ({m.id})", "machine.html", m=m)
    write(
        "calibration.html", "How often the judge is right", "calibration.html",
        shown=[calibrated.show(album, one) for one in calibrations],
    )  # fmt: skip
    write(
        "ledger.html", "The ledger of commits and incidents", "ledger.html",
        ledger=ledger.rows(incidents, judged.speed(contests)), red=ledger.red(incidents),
        mutants=mutants.rows(tried), unseen=mutants.unseen(tried), wanted=f"{recorded.WANTED:.0%}",
    )  # fmt: skip
    index = write(
        INDEX, TITLE, "index.html", machines=machines,
        contests=judged.newest(contests), earlier=judged.earlier(contests), accepted=judged.accepted(moved),
        damaged=[*damaged, *no_judgements, *not_moved, *no_calibrations, *no_incidents, *no_mutants],
    )  # fmt: skip
    album.remove_leftovers()
    return index


@dataclass(frozen=True)
class _Drawn:
    """What came of one machine's records."""

    machine: Machine | None
    """None without a record of NSA."""
    newest: str
    """UTC of the newest run; "" without one."""
    damaged: list[str]
    written: frozenset[str]
    """Files of the album."""


def _machines(results: Path) -> list[_Drawn]:
    """Every machine that has runs, the one with the newest first."""
    names = sorted(folder.name for folder in (results / "runs").glob("*/"))
    workers = min(len(names), os.cpu_count() or 1)
    if workers < 2 or sum(1 for _ in (results / "runs").glob("*/*.jsonl")) < _MANY_RUNS:
        drawn = [_draw(results, name) for name in names]
    else:
        # not forked: NumPy has threads
        with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
            drawn = list(pool.map(partial(_draw, results), names))
    return sorted(drawn, key=lambda one: one.newest, reverse=True)


def _draw(results: Path, name: str) -> _Drawn:
    """Draw the pictures of one machine and fill its tables."""
    album = Album(results / "report")
    stored = Store(results, name)
    here = verdict.comparisons(stored.current())
    theirs = published.read(path) if (path := published.path(results)).exists() else []
    known = machine.Known(theirs, accepted.current(results))
    return _Drawn(
        machine.look_at(album, stored, name, here, known) if here else None,
        max((run.utc for run in stored.runs(name)), default=""),
        [f"{line.path.relative_to(results)}:{line.line}: {line.why}" for line in stored.damaged()],
        album.written,
    )
