"""The product's own training at small sizes: what the incidents of training run, and put their faults into.

Nothing here trains: data, packing, loss, steps, checkpoints and alarms are those of `nsa.train`.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from nsa import NSAConfig
from nsa.io import read_json_lines
from nsa.model import ModelConfig
from nsa.train import profile
from nsa.train import run as product_run
from nsa.train.monitoring import monitors, watchdog
from nsa.train.monitoring.health import StoppedError
from nsa.train.run import Options
from nsa.train.run_folder import RunWriter as Files
from nsa.train.settings import Data, Runtime, Settings, Telemetry, Train
from regression.contract import Bound

TINY = ModelConfig(
    dim=32,
    n_layers=2,
    n_heads=4,
    num_kv_heads=2,
    d_k=8,
    d_v=8,
    nsa=NSAConfig(l=8, d=4, l_sel=16, n_sel=4, w=16),
    vocab_size=16,
)
"""Every branch has keys of its own to read from 16 tokens on, and a step takes some 20 ms on a CPU."""
WINDOW = 10
"""Logged steps are so far apart; over these the mean loss of random tokens is judged, as the run itself does."""

Beat = Callable[[dict[str, Any]], None]
"""Called with the heartbeat of each step as it is written."""


@dataclass(frozen=True)
class TrainingResult:
    """A run that came to its end, or was stopped by an alarm."""

    settings: Settings
    steps: tuple[dict[str, Any], ...]
    """The heartbeats of this attempt's steps."""
    alarms: dict[str, str]
    """Sentinel and why, also those that stop nothing."""
    stopped: str | None
    """The sentinel that ended it; None where all steps were taken."""

    def loss_on_random_tokens(self) -> Bound:
        """Mean loss over the last WINDOW steps, and the floor that their entropy sets."""
        earlier, last = self.steps[:-WINDOW], self.steps[-WINDOW:]
        targets = last[-1]["tokens_seen"] - (earlier[-1]["tokens_seen"] if earlier else 0)
        mean = statistics.fmean(record["loss"] for record in last)
        return Bound(mean, monitors.loss_floor_nats(self.settings.model.vocab_size, targets))

    def course(self) -> str:
        """For the notes: "2.772 -> 0.281 nats in 30 steps"."""
        return f"{self.steps[0]['loss']:.3f} -> {self.steps[-1]['loss']:.3f} nats in {len(self.steps)} steps"


def settings(
    folder: Path,
    device: str,
    *,
    model: ModelConfig = TINY,
    precision: str = "fp32",
    packing: bool = False,
    statistics: bool = False,
    **train: Any,
) -> Settings:
    """A run on random tokens that writes in `folder`; `train` as in `nsa.train.settings.Train`."""
    small = {"seq_len": 48, "batch_size": 2, "lr": 1e-3, "lr_schedule": "constant", "log_every": WINDOW, "seed": 0}
    return Settings(
        profile="tiny",
        model=model,
        runtime=Runtime(device=device, precision=precision),
        train=Train(**{**small, "out_dir": str(folder / "run"), **train}),
        data=Data(packing=packing),
        telemetry=Telemetry(statistics=statistics, tensorboard=False, csv=False),
    )


def run(chosen: Settings, beat: Beat, *, resume: bool = False) -> TrainingResult:
    """`nsa.train.run` in this process. What it raises beside StoppedError is raised, and what `beat` raises too."""
    steps: list[dict[str, Any]] = []

    def on_step(record: dict[str, Any]) -> None:
        steps.append(record)
        beat(record)

    stopped = None
    with _steps_reported_to(on_step):
        try:
            product_run.run(chosen, profile.read_environment({}), Options(resume=resume), {})
        except StoppedError as error:
            stopped = error.alarm.monitor
    events = [record for record in heartbeat(chosen) if record.get("event") == "alarm"]
    return TrainingResult(chosen, tuple(steps), {event["sentinel"]: event["why"] for event in events}, stopped)


def heartbeat(chosen: Settings) -> Iterator[dict[str, Any]]:
    """What the first rank has written, steps and events, attempt after attempt."""
    return read_json_lines(Path(chosen.out_dir) / "heartbeat_rank0.jsonl")


@contextmanager
def _steps_reported_to(on_step: Beat) -> Iterator[None]:
    """`on_step` gets each step's heartbeat once it is written. SIGUSR1 stays the guard's."""
    written = Files.beat

    def beat(files: Files, record: dict[str, Any]) -> None:
        written(files, record)
        if "loss" in record:
            on_step(record)

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(Files, "beat", beat))
        stack.enter_context(mock.patch.object(watchdog, "dump_on_signal", return_value=lambda: None))
        yield
