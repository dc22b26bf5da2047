"""Estimated times as a file: never among the records, never drawn with them. Needs no Triton."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from harness import schema
from nsa.io import atomic_write


@dataclass(frozen=True)
class PartFit:
    """How much longer than its bound a part takes: factor · bound + fixed_ms."""

    part: str
    factor: float
    fixed_ms: float
    records: int
    """That it is fitted to, of the part alone or of a pass that contains it."""


@dataclass(frozen=True)
class LeftOut:
    """A record that was predicted from the others."""

    case: str
    part: str | None
    """None of a whole forward pass, which is the sum of its parts."""
    measured_ms: float
    predicted_ms: float

    @property
    def error(self) -> float:
        """Relative: 0.1 is predicted 10 % too long."""
        return self.predicted_ms / self.measured_ms - 1


@dataclass(frozen=True)
class EstimatedPart:
    """One part of one prefill on one board."""

    board: str
    heads: str
    """"64x4x128"."""
    tokens: int
    part: str
    resource: str
    """What bounds it: the scarcest of the kernel that takes longest."""
    least_ms: float
    estimated_ms: float


@dataclass(frozen=True)
class Estimates:
    """The file."""

    triton: str
    """The version that compiled the kernels."""
    calibrated_on: str
    """The commit whose records are fitted."""
    fits: tuple[PartFit, ...]
    left_out: tuple[LeftOut, ...]
    parts: tuple[EstimatedPart, ...]


def path(results: Path) -> Path:
    """Where the file stands under a folder of results."""
    return results / "estimates" / "estimates.json"


def write(results: Path, made: Estimates) -> Path:
    """Replace the file, an entry per line."""

    def lines(entries: Sequence[object]) -> str:
        return ",\n".join(json.dumps(_rounded(dataclasses.asdict(one))) for one in entries)  # type: ignore[call-overload]

    lists = {"fits": made.fits, "left_out": made.left_out, "parts": made.parts}
    head = f'"triton": {json.dumps(made.triton)}, "calibrated_on": {json.dumps(made.calibrated_on)}'
    body = ",\n".join(f'"{name}": [\n{lines(entries)}\n]' for name, entries in lists.items())
    file = path(results)
    file.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(file, f"{{{head},\n{body}\n}}\n".encode())
    return file


def _rounded(entry: dict[str, object]) -> dict[str, object]:
    """Five digits are more than an estimate has."""
    return {name: float(f"{x:.5g}") if isinstance(x, float) else x for name, x in entry.items()}


def read(results: Path) -> Estimates | None:
    """The file; None where there is none. Raises ValueError naming it and what is wrong."""
    file = path(results)
    if not file.exists():
        return None
    try:
        return schema.build(Estimates, json.loads(file.read_text(encoding="utf-8")), "estimates")
    except (ValueError, TypeError) as error:
        raise ValueError(f"{file}: {error}") from error
