"""Files of versions 1 and 2 in the current format: the records in small, their samples compressed beside them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from benchmarks import old_records, raw_samples, run_file
from benchmarks.records import Record
from benchmarks.run_file import Damaged
from nsa.io import atomic_write, read_lines


@dataclass(frozen=True)
class Conversion:
    """What came of a file."""

    records: int
    damaged: list[Damaged]
    """Lines that could not be read; their numbers are those in the new file."""


def is_old(path: Path) -> bool:
    """Whether the file has records of version 1 or 2 and no run line before them. OSError where it cannot be read."""
    for _, line in read_lines(path):
        if line.startswith(run_file.RUN_PREFIX):
            return False
        if _old(line) is not None:
            return True
    return False


def _old(line: bytes) -> tuple[Record, bytes] | None:
    """The record of a line and its samples in their file's format; None where the line is no such record."""
    try:
        record, raw = old_records.read(line)
    except (ValueError, TypeError, RecursionError):
        return None
    return record, b"" if raw is None else raw_samples.encode(raw)


def convert(path: Path) -> Conversion:
    """Replace an old file by what it holds: first its samples, then the file, each in one step.

    Lines that cannot be read come behind the records, as they stood, and lines of the current format last. OSError
    where the folder cannot be written.
    """
    records: list[Record] = []
    samples: list[bytes] = []
    unread: list[bytes] = []
    current: list[bytes] = []
    for _, line in read_lines(path):
        if current or line.startswith(run_file.RUN_PREFIX):
            current.append(line)
        elif (found := _old(line)) is not None:
            records.append(found[0])
            samples.append(found[1])
        else:
            unread.append(line)
    if any(samples):
        atomic_write(raw_samples.path(path), b"".join(samples))
    lines = [*(line.encode() for line in run_file.lines_of(records)), *unread, *current]
    atomic_write(path, b"".join(line + b"\n" for line in lines))
    return Conversion(len(records), [found for found in run_file.entries(path) if isinstance(found, Damaged)])
