"""Runs written to a folder and read back through the store."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from benchmarks import records, store
from benchmarks.records import Damaged, Record


def write(results: Path, *found: Record) -> Path:
    path = records.create_run(results, found[0].fingerprint)
    for record in found:
        records.append(path, record)
    return path


def everything(results: Path) -> list[Record]:
    with store.opened(results) as opened:
        return opened.records()


def damaged(results: Path) -> list[Damaged]:
    with store.opened(results) as opened:
        return opened.damaged()


def run(day: int, *contenders: Record) -> list[Record]:
    """These records as one run of that day."""
    utc = f"2026-03-{day:02d}T00:00:00.000Z"
    return [
        dataclasses.replace(record, fingerprint=dataclasses.replace(record.fingerprint, utc=utc))
        for record in contenders
    ]
