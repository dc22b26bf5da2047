"""Dataclasses as the lines of a file: appended whole, and checked as they are read.

Apart from `harness.schema`, which the process that measures needs too: that one may stand on an older nsa/, without
nsa.io.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, TypeVar

from harness import schema
from nsa import io

T = TypeVar("T")


def append(path: Path, value: Any) -> None:
    """Add one dataclass as one line, in a folder that is made where it is missing. Raises DiskFullError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    io.append_line(path, json.dumps(dataclasses.asdict(value), allow_nan=False, separators=(",", ":")))


def read(path: Path, kind: type[T]) -> tuple[list[T], list[str]]:
    """Every line of this kind, oldest first, and what is wrong with the others ("file.jsonl:3: ..."); [] if no file."""
    found: list[T] = []
    damaged: list[str] = []
    if not path.exists():
        return found, damaged
    for number, line in io.read_lines(path):
        try:
            found.append(schema.build(kind, json.loads(line.decode()), kind.__name__.lower()))
        except (ValueError, TypeError, RecursionError) as error:
            damaged.append(f"{path.name}:{number}: {type(error).__name__}: {error}")
    return found, damaged
