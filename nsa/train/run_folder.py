"""The folder of a run: what is written into it (`RunWriter`), and what it says when it is read (`read_run`).

| file | what it holds |
|---|---|
| heartbeat_rank{r}.jsonl | a line per step and event of each rank, in the units of its names |
| training.csv, val.csv | the logged steps and the validations |
| tb/ | the same for TensorBoard |
| metrics.json | the summary so far |
| env.json | what the run is, so that it can be repeated |
| attempts.jsonl | a line per attempt: each start, and each resume |
"""

from __future__ import annotations

import csv
import fcntl
import json
import platform
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from nsa.io import append_line, atomic_write, read_json_lines, to_json
from nsa.train import profile
from nsa.train.profile import Environment
from nsa.train.settings import Settings

TRAINING = ("step", "loss", "lr", "grad_norm", "tokens_per_s", "step_ms", "data_wait_ms", "tokens_seen", "memory_mib")
VALIDATION = ("step", "loss", "tokens_seen")
_DRAWN = (
    "loss", "lr", "grad_norm", "tokens_per_s", "allocated_mib", "reserved_mib", "rss_mib", "data_wait_ms",
    "gate_entropy_mean_nats", "gate_max_share_mean", "selected_keys_mean", "selection_at_maximum", "fallbacks",
    "rank_imbalance",
)  # fmt: skip
"""Figures of a heartbeat that TensorBoard gets."""


class RunWriter:
    """The files of one rank; tables, TensorBoard and summary are the first rank's."""

    def __init__(self, folder: Path, settings: Settings, *, rank: int, attempt: int, done: int) -> None:
        self._folder, self._rank, self._attempt = folder, rank, attempt
        self._heartbeat = folder / f"heartbeat_rank{rank}.jsonl"
        self._training = self._validation = None
        self._board: Any = None
        if rank == 0 and settings.telemetry.csv:
            self._training = Table(folder / "training.csv", TRAINING, after_step=done)
            self._validation = Table(folder / "val.csv", VALIDATION, after_step=done)
        if rank == 0 and settings.telemetry.tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(str(folder / "tb"), purge_step=done + 1 if done else None)

    def beat(self, record: Mapping[str, Any]) -> None:
        """One line of heartbeat_rank{r}.jsonl."""
        line = {"utc": utc(), "attempt": self._attempt, "rank": self._rank, **record}
        append_line(self._heartbeat, to_json(line), sync=False)

    def log(self, record: Mapping[str, Any]) -> None:
        """A row of training.csv, and TensorBoard's scalars."""
        if self._training is not None:
            memory = record.get("allocated_mib") if record.get("allocated_mib") is not None else record.get("rss_mib")
            self._training.add({**record, "memory_mib": memory})
        if self._board is not None:
            for name in _DRAWN:
                if record.get(name) is not None:
                    self._board.add_scalar(name, record[name], record["step"])
            for branch, share in (record.get("gate_shares") or {}).items():
                self._board.add_scalar(f"gate_share/{branch}", share, record["step"])
            self._board.flush()

    def validated(self, step: int, loss: float, tokens_seen: int) -> None:
        """A row of val.csv."""
        if self._validation is not None:
            self._validation.add({"step": step, "loss": loss, "tokens_seen": tokens_seen})
        if self._board is not None:
            self._board.add_scalar("val_loss", loss, step)

    def summary(self, record: Mapping[str, Any]) -> None:
        """metrics.json, replaced in one step."""
        if self._rank == 0:
            atomic_write(self._folder / "metrics.json", to_json(record, indent=2) + "\n")

    def close(self) -> None:
        if self._board is not None:
            self._board.close()


def environment_record(
    settings: Settings, environment: Environment, device: torch.device, **facts: Any
) -> dict[str, Any]:
    """env.json: what the run was, so that it can be had again."""
    on_gpu = device.type == "cuda"
    return {
        "utc": utc(),
        "profile": settings.profile,
        "settings": {dotted: {"value": value, "origin": origin} for dotted, value, origin in profile.flat(settings)},
        "notes": [*settings.notes, *environment.notes],
        "command": sys.argv,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda if on_gpu else None,
        "device": torch.cuda.get_device_name(device) if on_gpu else platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "platform": platform.platform(),
        "commit": environment.commit,
        "image": environment.image,
        **facts,
    }


def utc() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds").replace("+00:00", "Z")


class NoRunError(ValueError):
    """A folder in which no run has written; the message names it."""


@dataclass(frozen=True)
class RunHistory:
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
    attempts: int
    """How often the run was started or resumed."""

    def series(self, name: str) -> list[tuple[int, float]]:
        """(step, value) where the figure is known and finite, as numbers."""
        return [(r["step"], float(r[name])) for r in self.steps if isinstance(r.get(name), (int, float))]


def read_run(folder: Path) -> RunHistory:
    """Raises NoRunError."""
    heartbeats = sorted(folder.glob("heartbeat_rank*.jsonl"))
    if not heartbeats:
        raise NoRunError(f"no run has written in {folder}: there is no heartbeat_rank0.jsonl")
    steps: dict[int, dict[str, Any]] = {}
    events: list[dict[str, Any]] = []
    for path in heartbeats:
        for record in read_json_lines(path):
            if "event" in record:
                events.append(record)
            elif path.name == "heartbeat_rank0.jsonl" and "step" in record:
                steps[record["step"]] = record
    rows = Table.rows(folder / "val.csv")
    return RunHistory(
        folder,
        _object(folder / "env.json"),
        _object(folder / "metrics.json"),
        tuple(steps[number] for number in sorted(steps)),
        tuple(sorted(events, key=lambda event: str(event.get("utc")))),
        tuple((int(row["step"]), float(row["loss"])) for row in rows),
        sum(1 for _ in read_json_lines(attempts_file(folder))),
    )


def attempts_file(folder: Path) -> Path:
    """A line per start of the run; a run of an earlier version goes on in its own file."""
    earlier = folder / "lives.jsonl"
    return earlier if earlier.exists() else folder / "attempts.jsonl"


def _object(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


class InUseError(ValueError):
    """Another process writes to the folder; the message names it."""


class Table:
    """A CSV file with a header. A resumed run cuts off what it will write again."""

    def __init__(self, path: Path, columns: Sequence[str], *, after_step: int) -> None:
        """`columns` begins with "step"; rows of steps above `after_step` are dropped."""
        self._path, self._columns = path, tuple(columns)
        kept = [row for row in self.rows(path) if _step(row) is not None and int(row["step"]) <= after_step]
        lines = [",".join(self._columns), *(self._line(row) for row in kept)]
        atomic_write(path, "\n".join(lines) + "\n")

    def add(self, row: Mapping[str, Any]) -> None:
        append_line(self._path, self._line(row), sync=False)

    @staticmethod
    def rows(path: Path) -> list[dict[str, str]]:
        """Whole rows by column; none where there is no file."""
        if not path.exists():
            return []
        with path.open(newline="", encoding="utf-8") as file:
            return [row for row in csv.DictReader(file) if None not in row and None not in row.values()]

    def _line(self, row: Mapping[str, Any]) -> str:
        cells = ("" if row.get(name) is None else str(row[name]) for name in self._columns)
        return ",".join(cells)


@contextmanager
def folder_lock(folder: Path) -> Iterator[None]:
    """The folder is this process's alone; InUseError if it is another's. A kill gives it back."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InUseError(f"train.out_dir must not be in use; another run writes to {folder}") from None
        yield


def _step(row: Mapping[str, str]) -> int | None:
    try:
        return int(row["step"])
    except (KeyError, ValueError):
        return None
