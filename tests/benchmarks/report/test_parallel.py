"""The page of several GPUs: what was measured, a model that is marked as one, and what it lacks."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from benchmarks.history.records import Record
from benchmarks.report.pages import ReportSettings, build
from tests.benchmarks.parallel.test_model import K, measured
from tests.benchmarks.stored import run, write

MODEL = "model, not measured"


def page(results: Path, *found: Record) -> tuple[str, str]:
    """The page, and its pictures."""
    if found:
        write(results, *run(1, *found))
    folder = build(results, ReportSettings(script=False)).index.parent
    pictures = "".join(path.read_text() for path in sorted(folder.glob("*-parallel-*.svg")))
    return (folder / "parallel.html").read_text(), pictures


def test_measured_and_modelled(tmp_path: Path) -> None:
    text, pictures = page(tmp_path, measured(128 * K, 2), measured(256 * K, 2))
    at_256k = measured(256 * K, 2)
    assert f"{100 * (at_256k.share_of_ideal or 0):.1f}" in text
    assert "262,144" in text
    assert "2 GPUs at 262,144 tokens" in text
    assert "1,048,576" in text
    assert "No model" not in text
    assert pictures.count("stroke-dasharray") > 3
    assert f"8 GPUs, {MODEL}" in pictures
    assert '<a href="parallel.html"' in (tmp_path / "report" / "index.html").read_text()


def test_the_model_is_no_record(tmp_path: Path) -> None:
    page(tmp_path, measured(128 * K, 2), measured(256 * K, 2))
    lines = [line for path in (tmp_path / "runs").rglob("*.jsonl") for line in path.read_text().splitlines()]
    assert len(lines) == 3
    assert not any("/p8/" in line for line in lines)


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    text, _ = page(tmp_path)
    assert "Nothing is measured yet" in text
    assert "what is missing is a record of several GPUs" in text
    text, pictures = page(tmp_path, measured(256 * K, 2))
    assert "what is missing is h200, 4x2x16 float32 random: the time of one GPU at a second length" in text
    assert MODEL not in pictures


def test_processes_on_a_cpu_make_no_model(tmp_path: Path) -> None:
    def on_cpu(record: Record) -> Record:
        return dataclasses.replace(record, fingerprint=dataclasses.replace(record.fingerprint, machine="cpu"))

    text, pictures = page(tmp_path, on_cpu(measured(1024, 2)), on_cpu(measured(2048, 2)))
    assert MODEL not in pictures
    assert "what is missing is a record of several GPUs" in text


def test_lengths_and_ranks_are_cases_of_the_machine(tmp_path: Path) -> None:
    """The trend follows them like any other case, each number of GPUs apart."""
    page(tmp_path, measured(128 * K, 2), measured(256 * K, 2), measured(256 * K, 4))
    of_mode = (tmp_path / "report" / "h200-context-parallel-4x2x16.html").read_text()
    index = (tmp_path / "report" / "index.html").read_text()
    assert "Context parallelism, forward + backward" in of_mode
    assert "p2" in index
    assert "p4" in index
