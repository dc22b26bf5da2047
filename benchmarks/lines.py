"""Dataclasses as the lines of `nsa.io`'s JSON lines."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, TypeVar

from benchmarks import schema
from nsa.io import append_line, read_lines

T = TypeVar("T")


def append(path: Path, value: Any) -> None:
    """Add one dataclass as one line, in a folder that is made where it is missing. Raises DiskFullError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    append_line(path, json.dumps(dataclasses.asdict(value), allow_nan=False, separators=(",", ":")))


def read(path: Path, kind: type[T]) -> tuple[list[T], list[str]]:
    """Every line of this kind, oldest first, and what is wrong with the others ("file.jsonl:3: ..."); [] if no file."""
    found: list[T] = []
    damaged: list[str] = []
    if not path.exists():
        return found, damaged
    for number, line in read_lines(path):
        try:
            found.append(schema.build(kind, json.loads(line.decode()), kind.__name__.lower()))
        except (ValueError, TypeError, RecursionError) as error:
            damaged.append(f"{path.name}:{number}: {type(error).__name__}: {error}")
    return found, damaged
