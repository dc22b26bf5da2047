"""Files of one dataclass per line: named after their run, appended to line by line, checked as they are read.

Apart from `harness.schema`, which the process that measures needs too: that one may stand on an older nsa/, without
nsa.io.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from harness import schema
from harness.fingerprint import Fingerprint
from nsa import io

T = TypeVar("T")


def compact_utc(utc: str) -> str:
    """A moment as names of files have it: 20260102T030405.678Z."""
    return utc.replace("-", "").replace(":", "")


def create(folder: Path, fingerprint: Fingerprint) -> Path:
    """A new, empty file <utc>-<commit>.jsonl; -2, -3, ... where another run has the name."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = f"{compact_utc(fingerprint.utc)}-{(fingerprint.commit or 'nocommit')[:10]}"
    path, number = folder / f"{stem}.jsonl", 1
    while True:
        try:
            path.touch(exist_ok=False)  # atomic: two processes cannot both make it
        except FileExistsError:
            number += 1
            path = folder / f"{stem}-{number}.jsonl"
        else:
            return path


def append(path: Path, value: Any) -> None:
    """Add one dataclass as one line, in a folder that is made where it is missing. Raises DiskFullError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    io.append_line(path, json.dumps(dataclasses.asdict(value), allow_nan=False, separators=(",", ":")))


def read(path: Path, kind: type[T]) -> tuple[list[T], list[str]]:
    """Every line of this kind, oldest first, and what is wrong with the others ("file.jsonl:3: ..."); [] if no file."""
    return read_as(path, lambda data: schema.build(kind, data, kind.__name__.lower()))


def read_as(path: Path, build: Callable[[Any], T]) -> tuple[list[T], list[str]]:
    """`read`, with what makes a value of parsed JSON; it raises ValueError or TypeError where that is none."""
    found: list[T] = []
    damaged: list[str] = []
    if not path.exists():
        return found, damaged
    for number, line in io.read_lines(path):
        try:
            found.append(build(json.loads(line.decode())))
        except (ValueError, TypeError, RecursionError) as error:
            damaged.append(f"{path.name}:{number}: {type(error).__name__}: {error}")
    return found, damaged
