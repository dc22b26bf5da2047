"""The page and its pictures, from the records: results/report/index.html, which opens from the disk."""

from __future__ import annotations

from pathlib import Path

from benchmarks import records, verdict
from benchmarks.report import page, plots


def build(results: Path) -> Path:
    """Write the page of every run below `results` and return where it is. An empty folder gives a page that says so."""
    found, damaged = records.read_runs(results)
    compared = verdict.comparisons(found)
    folder = results / "report"
    folder.mkdir(parents=True, exist_ok=True)
    pictures = plots.draw(compared, folder)
    index = folder / "index.html"
    index.write_text(page.render(compared, damaged, pictures), encoding="utf-8")
    return index
