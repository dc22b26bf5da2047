"""What a run's files say, life after life: one record per step, its events, its summary."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nsa.train import files
from nsa.train.files import Table


class NoRunError(ValueError):
    """A folder in which no run has written; the message names it."""


@dataclass(frozen=True)
class History:
    """One folder, as it stands now."""

    folder: Path
    environment: dict[str, Any]
    """env.json."""
    metrics: dict[str, Any]
    """metrics.json; empty before the first logged step."""
    steps: tuple[dict[str, Any], ...]
    """The first rank's heartbeat of each step, in order; of a step that a resume took again the last one."""
    events: tuple[dict[str, Any], ...]
    """Alarms, stops, checkpoints of all ranks, in order."""
    validations: tuple[tuple[int, float], ...]
    """(step, loss)."""
    lives: int
    """How often the run was started."""

    def series(self, name: str) -> list[tuple[int, float]]:
        """(step, value) where the figure is known and finite, as numbers."""
        return [(r["step"], float(r[name])) for r in self.steps if isinstance(r.get(name), (int, float))]


def read(folder: Path) -> History:
    """Raises NoRunError."""
    heartbeats = sorted(folder.glob("heartbeat_rank*.jsonl"))
    if not heartbeats:
        raise NoRunError(f"no run has written in {folder}: there is no heartbeat_rank0.jsonl")
    steps: dict[int, dict[str, Any]] = {}
    events: list[dict[str, Any]] = []
    for path in heartbeats:
        for record in files.json_lines(path):
            if "event" in record:
                events.append(record)
            elif path.name == "heartbeat_rank0.jsonl" and "step" in record:
                steps[record["step"]] = record
    rows = Table.rows(folder / "val.csv")
    return History(
        folder,
        _object(folder / "env.json"),
        _object(folder / "metrics.json"),
        tuple(steps[number] for number in sorted(steps)),
        tuple(sorted(events, key=lambda event: str(event.get("utc")))),
        tuple((int(row["step"]), float(row["loss"])) for row in rows),
        sum(1 for _ in files.json_lines(folder / "lives.jsonl")),
    )


def _object(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found
