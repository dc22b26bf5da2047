"""Runs written to a folder and read back through the store."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from benchmarks.history import run_file
from benchmarks.history.records import Record
from benchmarks.history.run_file import DamagedLine
from benchmarks.history.store import Store


def write(results: Path, *found: Record) -> Path:
    path = run_file.create(results, found[0].fingerprint)
    for record in found:
        run_file.append(path, record)
    return path


def everything(results: Path) -> list[Record]:
    return Store(results).records()


def damaged(results: Path) -> list[DamagedLine]:
    return Store(results).damaged()


def run(day: int, *contenders: Record) -> list[Record]:
    """These records as one run of that day."""
    utc = f"2026-03-{day:02d}T00:00:00.000Z"
    return [
        dataclasses.replace(record, fingerprint=dataclasses.replace(record.fingerprint, utc=utc))
        for record in contenders
    ]
