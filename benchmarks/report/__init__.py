"""The pages and their pictures, from the records: results/report/index.html, which opens from the disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks import accepted, published, store, verdict
from benchmarks import mutants as recorded
from benchmarks.report import calibrated, judged, ledger, machine, mutants, page
from benchmarks.report.album import Album

INDEX = "index.html"
FURTHER_PAGES = {"Calibration": "calibration.html", "Incidents": "ledger.html"}
TITLE = "Native Sparse Attention: what was measured"


def build(results: Path) -> Path:
    """Write the pages of everything below `results`; where they start. An empty folder gives a page that says so."""
    album = Album(results / "report")
    theirs = published.read(path) if (path := published.path(results)).exists() else []
    known = machine.Known(theirs, accepted.current(results))
    with store.opened(results) as opened:
        compared = verdict.comparisons(opened.current())
        machines = [
            machine.look_at(album, opened, name, here, known)
            for name in opened.machines()
            if (here := [c for c in compared if c.nsa.fingerprint.machine == name])
        ]
        damaged = [f"{line.path.relative_to(results)}:{line.line}: {line.why}" for line in opened.damaged()]
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
