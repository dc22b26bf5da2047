"""What is known of a run while it runs: the figures of each step judged and written down, and its summary."""

from __future__ import annotations

import dataclasses
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from nsa.train import distributed
from nsa.train.batches import SYNTHETIC
from nsa.train.figures import Arrived
from nsa.train.health import STOPS, Figures, Health, StoppedError
from nsa.train.sentinels import Alarm
from nsa.train.telemetry import Progress, Telemetry, memory
from nsa.train.trainer import Trainer

RECENT = 100
"""Steps of which medians and means are told."""


@dataclass(frozen=True)
class Told:
    """What the host knew of a step when it asked for its figures."""

    step: int
    lr: float
    tokens: int
    data_wait_s: float
    logged: bool


class Account:
    """Figures arrive (`step`), alarms are raised (`judge`), the summary is written (`summarise`)."""

    def __init__(self, trainer: Trainer, source: str, telemetry: Telemetry, say: Callable[[str], None]) -> None:
        settings = trainer.settings
        self._trainer, self._source, self._telemetry, self._say = trainer, source, telemetry, say
        self._steps = settings.train.steps
        self.health = Health(
            random_vocab_size=settings.model.vocab_size if source == SYNTHETIC else None,
            fp16=settings.runtime.precision == "fp16",
            warmup_steps=settings.train.warmup_steps,
            fused_backend=_expected_backend(trainer),
        )
        self._progress = Progress(self._steps, say, live=sys.stdout.isatty() and trainer.own.first)
        self._recent: deque[dict[str, Any]] = deque(maxlen=RECENT)
        self._work_ms: deque[float] = deque(maxlen=settings.train.log_every)
        self._begin = time.monotonic()
        self._val_loss: float | None = None
        self._saved: int | None = None

    def step(self, arrived: Arrived[Told]) -> None:
        """The figures of a step are here. Raises StoppedError."""
        told, (loss, grad_norm, targets) = arrived.told, arrived.values["figures"].tolist()[:3]
        self._trainer.tokens_seen += int(targets)
        tokens_per_s = None if arrived.step_s is None else told.tokens / arrived.step_s
        held = memory(self._trainer.device)
        name = "allocated_mib" if "allocated_mib" in held else "rss_mib"
        figures = Figures(told.step, loss, grad_norm, int(targets), tokens_per_s, held[name], name)
        alarms = self.health.step(figures)
        if arrived.forward_ms is not None:
            self._work_ms.append(arrived.forward_ms + 1000 * told.data_wait_s)
        record: dict[str, Any] = {
            "step": told.step,
            "loss": loss,
            "grad_norm": grad_norm,
            "lr": told.lr,
            "tokens_per_s": tokens_per_s,
            "step_ms": None if arrived.step_s is None else 1000 * arrived.step_s,
            "forward_ms": arrived.forward_ms,
            "data_wait_ms": 1000 * told.data_wait_s,
            "tokens_seen": self._trainer.tokens_seen,
            "non_finite_steps": self.health.non_finite_steps,
            "data_source": self._source,
            **held,
        }
        if told.logged:
            alarms = [*alarms, *self._logged(record, arrived)]
            self._telemetry.log(record)
        self._telemetry.beat(record)
        self._recent.append(record)
        self._progress.step(record, logged=told.logged, left_s=self.left_s())
        self.judge(alarms, told.step)
        if told.logged:
            self.summarise("running")

    def judge(self, alarms: list[Alarm], step: int) -> None:
        """Write alarms down; StoppedError for one that stops the run."""
        for alarm in alarms:
            self._telemetry.beat({"event": "alarm", "step": step, **dataclasses.asdict(alarm)})
            self._say(f"alarm at step {step}: {alarm.sentinel}: {alarm.why}")
        for alarm in alarms:
            if alarm.sentinel in STOPS:
                raise StoppedError(alarm, step)

    def validated(self, loss: float) -> None:
        step = self._trainer.done
        self._val_loss = loss
        self._telemetry.validated(step, loss, self._trainer.tokens_seen)
        self._say(f"validation after step {step}: loss {loss:.4f}")

    def saved(self, path: str) -> None:
        self._saved = self._trainer.done
        self._telemetry.beat({"event": "saved", "step": self._saved, "path": path})

    def stopped(self, why: str) -> None:
        """Before its end, by an error."""
        self._telemetry.beat({"event": "stopped", "why": why})

    def left_s(self) -> float | None:
        """Seconds to the last step at the recent pace; None before it is known."""
        paces = [record["step_ms"] for record in self._recent if record["step_ms"] is not None]
        return statistics.median(paces) / 1000 * (self._steps - self._trainer.done) if paces else None

    def predicted_hours(self) -> float | None:
        """Of this life, from its begin to the last step."""
        left_s = self.left_s()
        return None if left_s is None else max((time.monotonic() - self._begin + left_s) / 3600, 1e-6)

    def end(self, reason: str) -> None:
        self._progress.end()
        self.summarise(reason)

    def summarise(self, state: str) -> None:
        """metrics.json."""
        speeds = [record["tokens_per_s"] for record in self._recent if record["tokens_per_s"] is not None]
        losses = [record["loss"] for record in self._recent]
        last = self._recent[-1] if self._recent else {}
        self._telemetry.summary(
            {
                "state": state,
                "step": self._trainer.done,
                "steps": self._steps,
                "parameters": self._trainer.num_parameters,
                "tokens_seen": self._trainer.tokens_seen,
                "loss": losses[-1] if losses else None,
                "loss_mean_recent": statistics.fmean(losses) if losses else None,
                "val_loss": self._val_loss,
                "tokens_per_s_median": statistics.median(speeds) if speeds else None,
                "skipped_steps": self.health.skipped,
                "non_finite_steps": self.health.non_finite_steps,
                "seconds": time.monotonic() - self._begin,
                "last_checkpoint_step": self._saved,
                "alarms": {name: alarm.why for name, alarm in self.health.alarms.items()},
                **{name: value for name, value in last.items() if name.endswith(("_mib", "_gib"))},
            }
        )

    def _logged(self, record: dict[str, Any], arrived: Arrived[Told]) -> list[Alarm]:
        """What is computed at logged steps alone, added to the record."""
        observed = None
        if "observed" in arrived.values:
            observed = self._trainer.observation.read(arrived.values["observed"])
            record.update(observed.record())
        record["fallbacks"] = self.health.fallbacks(observed)
        record.update(self._imbalance())
        return self.health.logged(observed, arrived.told.step)

    def _imbalance(self) -> dict[str, Any]:
        """What each rank does before it meets the others: its wait for data and its forward pass, median ms."""
        own = self._trainer.own
        if not own.several:
            return {}
        mine = torch.tensor(statistics.median(self._work_ms), device=self._trainer.device)
        every = distributed.gathered(mine, own).tolist()
        return {"rank_work_ms": every, "rank_imbalance": 1 - min(every) / max(every)}


def _expected_backend(trainer: Trainer) -> str:
    """Who should serve attention: the backend that was named, else the fused one where there is a GPU."""
    asked = trainer.lm.config.backend
    if asked != "auto":
        return asked
    return "triton" if trainer.device.type == "cuda" else "torch"
