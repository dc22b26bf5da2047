"""What a run writes down, in the units of its names: heartbeats of every rank, tables, TensorBoard, a summary."""

from __future__ import annotations

import os
import platform
import sys
import time
from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from nsa.train import files, profile
from nsa.train.environment import Environment
from nsa.train.files import Table
from nsa.train.settings import Settings

TRAINING = ("step", "loss", "lr", "grad_norm", "tokens_per_s", "step_ms", "data_wait_ms", "tokens_seen", "memory_mib")
VALIDATION = ("step", "loss", "tokens_seen")
MIB, GIB = 2**20, 2**30
_DRAWN = (
    "loss", "lr", "grad_norm", "tokens_per_s", "allocated_mib", "reserved_mib", "rss_mib", "data_wait_ms",
    "gate_entropy_mean_nats", "gate_max_share_mean", "selected_keys_mean", "selection_at_maximum", "fallbacks",
    "rank_imbalance",
)  # fmt: skip
"""Figures of a heartbeat that TensorBoard gets."""


class Telemetry:
    """The files of one rank; tables, TensorBoard and summary are the first rank's."""

    def __init__(self, folder: Path, settings: Settings, *, rank: int, life: int, done: int) -> None:
        self._folder, self._rank, self._life = folder, rank, life
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
        line = {"utc": utc(), "life": self._life, "rank": self._rank, **record}
        files.append_line(self._heartbeat, files.as_json(line))

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
        """metrics.json, whole at any moment."""
        if self._rank == 0:
            files.replace(self._folder / "metrics.json", files.as_json(record, indent=2) + "\n")

    def close(self) -> None:
        if self._board is not None:
            self._board.close()


class Progress:
    """One line that is rewritten on a terminal, and one line per logged step elsewhere."""

    def __init__(self, steps: int, say: Callable[[str], None], *, live: bool) -> None:
        self._steps, self._say, self._live = steps, say, live

    def step(self, record: Mapping[str, Any], *, logged: bool, left_s: float | None) -> None:
        if not (self._live or logged):
            return
        speed, memory = record["tokens_per_s"], record.get("allocated_mib") or record.get("rss_mib")
        line = (
            f"step {record['step']}/{self._steps}  loss {record['loss']:.4f}  "
            f"{'' if speed is None else f'{speed:,.0f} tokens/s  '}{'' if memory is None else f'{memory:,.0f} MiB  '}"
            f"lr {record['lr']:.2e}{'' if left_s is None else f'  {_clock(left_s)} left'}"
        )
        if self._live:
            sys.stdout.write(f"\r\033[K{line}")
            sys.stdout.flush()
        else:
            self._say(line)

    def end(self) -> None:
        if self._live:
            sys.stdout.write("\n")


def memory(device: torch.device) -> dict[str, float | None]:
    """MiB and GiB of this process: PyTorch's on a GPU, the resident set on a CPU."""
    if device.type == "cuda":
        allocated, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
        peak = torch.cuda.max_memory_allocated(device)
        return {
            "allocated_mib": allocated / MIB,
            "allocated_gib": allocated / GIB,
            "reserved_mib": reserved / MIB,
            "reserved_gib": reserved / GIB,
            "peak_mib": peak / MIB,
            "peak_gib": peak / GIB,
        }
    resident = _resident_bytes()
    return {
        "rss_mib": None if resident is None else resident / MIB,
        "rss_gib": None if resident is None else resident / GIB,
    }


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


def _resident_bytes() -> int | None:
    """Of this process, as Linux tells it; None elsewhere."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")


def _clock(seconds: float) -> str:
    return time.strftime("%H:%M:%S", time.gmtime(seconds)) if seconds < 86_400 else f"{seconds / 86_400:.1f} days"
