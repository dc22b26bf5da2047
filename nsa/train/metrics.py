"""Metrics of a run once they are on the host (`async_metrics`): checked by the monitors, written down, summed up."""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from nsa.train import distributed
from nsa.train.data.loader import SYNTHETIC
from nsa.train.monitoring.async_metrics import HostMetrics
from nsa.train.monitoring.health import STOPS, Health, StepMetrics, StoppedError
from nsa.train.monitoring.monitors import Alarm
from nsa.train.run_folder import RunWriter
from nsa.train.settings import MIB
from nsa.train.trainer import Trainer

RECENT = 100
"""Steps of which medians and means are told."""
GIB = 2**30


@dataclass(frozen=True)
class StepContext:
    """What the host knew of a step when it submitted its metrics."""

    step: int
    lr: float
    tokens: int
    data_wait_s: float
    logged: bool
    observed: bool
    """Whether attention was watched in it."""


class MetricsLogger:
    """Metrics of a step arrive (`step`), alarms are raised (`raise_alarms`), the summary is written (`summarise`)."""

    def __init__(self, trainer: Trainer, source: str, files: RunWriter, say: Callable[[str], None]) -> None:
        settings = trainer.settings
        self._trainer, self._source, self._files, self._say = trainer, source, files, say
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

    def step(self, host: HostMetrics[StepContext]) -> None:
        """The metrics of a step are here. Raises StoppedError."""
        context = host.context
        loss, grad_norm, targets = (host.values[name].item() for name in ("loss", "grad_norm", "targets"))
        self._trainer.tokens_seen += int(targets)
        tokens_per_s = None if host.step_s is None else context.tokens / host.step_s
        held = memory(self._trainer.device)
        name = "allocated_mib" if "allocated_mib" in held else "rss_mib"
        metrics = StepMetrics(context.step, loss, grad_norm, int(targets), tokens_per_s, held[name], name)
        alarms = self.health.step(metrics)
        if host.work_ms is not None:
            self._work_ms.append(host.work_ms + 1000 * context.data_wait_s)
        record: dict[str, Any] = {
            "step": context.step,
            "loss": loss,
            "grad_norm": grad_norm,
            "lr": context.lr,
            "tokens_per_s": tokens_per_s,
            "step_ms": None if host.step_s is None else 1000 * host.step_s,
            "forward_ms": host.forward_ms,
            "data_wait_ms": 1000 * context.data_wait_s,
            "tokens_seen": self._trainer.tokens_seen,
            "non_finite_steps": self.health.non_finite_steps,
            "data_source": self._source,
            **held,
        }
        if context.logged:
            alarms = [*alarms, *self._logged(record, host)]
            self._files.log(record)
        self._files.beat(record)
        self._recent.append(record)
        self._progress.step(record, logged=context.logged, left_s=self.left_s())
        self.raise_alarms(alarms, context.step)
        if context.logged:
            self.summarise("running")

    def raise_alarms(self, alarms: list[Alarm], step: int) -> None:
        """Write alarms down; StoppedError for one that stops the run."""
        for alarm in alarms:
            self._files.beat({"event": "alarm", "step": step, "sentinel": alarm.monitor, "why": alarm.why})
            self._say(f"alarm at step {step}: {alarm.monitor}: {alarm.why}")
        for alarm in alarms:
            if alarm.monitor in STOPS:
                raise StoppedError(alarm, step)

    def validated(self, loss: float) -> None:
        step = self._trainer.done
        self._val_loss = loss
        self._files.validated(step, loss, self._trainer.tokens_seen)
        self._say(f"validation after step {step}: loss {loss:.4f}")

    def saved(self, path: str) -> None:
        self._saved = self._trainer.done
        self._files.beat({"event": "saved", "step": self._saved, "path": path})

    def stopped(self, why: str) -> None:
        """Before its end, by an error."""
        self._files.beat({"event": "stopped", "why": why})

    def left_s(self) -> float | None:
        """Seconds to the last step at the recent pace; None before it is known."""
        paces = [record["step_ms"] for record in self._recent if record["step_ms"] is not None]
        return statistics.median(paces) / 1000 * (self._steps - self._trainer.done) if paces else None

    def predicted_hours(self) -> float | None:
        """Of this attempt, from its begin to the last step."""
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
        self._files.summary(
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

    def _logged(self, record: dict[str, Any], host: HostMetrics[StepContext]) -> list[Alarm]:
        """What is computed at logged steps alone, added to the record."""
        observed = None
        if host.context.observed:
            observed = self._trainer.observer.read(host.values)
            record.update(observed.record())
        record["fallbacks"] = self.health.fallbacks(observed)
        record.update(self._imbalance())
        return self.health.logged(observed, host.context.step)

    def _imbalance(self) -> dict[str, Any]:
        """What each rank does before it waits for the others (`StepTimes.work_end`), its wait for data included:
        median ms."""
        own = self._trainer.own
        if not own.several:
            return {}
        mine = torch.tensor(statistics.median(self._work_ms), device=self._trainer.device)
        every = distributed.all_gather(mine, own).tolist()
        return {"rank_work_ms": every, "rank_imbalance": 1 - min(every) / max(every)}


def _expected_backend(trainer: Trainer) -> str:
    """Who should serve attention: the backend that was named, else the fused one where there is a GPU."""
    asked = trainer.lm.config.backend
    if asked != "auto":
        return asked
    return "triton" if trainer.device.type == "cuda" else "torch"


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


def _resident_bytes() -> int | None:
    """Of this process, as Linux tells it; None elsewhere."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")


def _clock(seconds: float) -> str:
    return time.strftime("%H:%M:%S", time.gmtime(seconds)) if seconds < 86_400 else f"{seconds / 86_400:.1f} days"
