"""slow-drift. Reported: "throughput ±10 %, no downward drift; memory flat", ticked off by eye.

What such a check must find: telemetry that keeps a tensor of each step, and goes through all of them at each next one.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nsa.layer import Gates
from nsa.train.monitoring import monitors
from regression import training
from regression.contract import Bound, Evidence, Incident, ReproVerdict, Step
from regression.detectors.host_cost import clock_s
from regression.detectors.memory import memory_mib
from regression.injection import Fault, injected

INCIDENT = Incident(
    id="slow-drift",
    symptom="throughput in a 10 % band and memory flat, by eye",
    cause="nothing measured it: a tensor kept from each step shows in neither of the first lines",
    detector="change-point of the throughput, slope of the memory over steps, warm-up left out",
    expects=ReproVerdict.OUT_OF_MEMORY,
    alone=True,
)

_STEPS, _WARM_UP = 48, 12
_FALL = 0.25
"""Of the throughput: beyond what other processes on the machine do to it."""
_MIB_PER_STEP = 0.2
_GROWN_MIB = 2.0
"""Growth within the last half of the steps that the slope must make."""
_healthy = Gates.forward


def product(step: Step) -> Evidence:
    """Train; a fall of the throughput counts only if a second run confirms it: a neighbour goes, a fault stays."""
    drift, growth = _train(step, 0)
    if drift is not None:
        drift, _ = _train(step, _STEPS)
    return Evidence(slowdown=_alarms(drift), memory=_alarms(growth))


def _train(step: Step, before: int) -> tuple[monitors.Alarm | None, monitors.Alarm | None]:
    """(throughput's alarm, memory's alarm) of a run at one size, after the warm-up; `before` steps were taken."""
    speeds, memory, last_s = list[float](), list[float](), clock_s(step.device)

    def stepped(record: dict[str, Any]) -> None:
        nonlocal last_s
        now_s = clock_s(step.device)
        speeds.append(chosen.tokens_per_step / (now_s - last_s))
        memory.append(memory_mib(step.device))
        last_s = now_s
        step(before + record["step"], loss=record["loss"], tokens_per_s=speeds[-1], memory_mib=memory[-1])

    with tempfile.TemporaryDirectory() as folder:
        chosen = training.settings(Path(folder), step.device, steps=_STEPS, seq_len=64, log_every=_STEPS)
        training.run(chosen, stepped)
    return (
        monitors.throughput_drift(speeds[_WARM_UP:], tolerance=_FALL),
        monitors.memory_slope(memory[_WARM_UP:], limit_mib_per_step=_MIB_PER_STEP, grown_mib=_GROWN_MIB),
    )


def _alarms(alarm: monitors.Alarm | None) -> Bound:
    """None is allowed."""
    return Bound(int(alarm is not None), 0, f"alarms: {alarm.why}" if alarm else "alarms")


def faulty(step: Step) -> Evidence:
    """Statistics over all steps so far, from the tensors themselves."""
    with inject():
        return product(step)


@contextmanager
def inject() -> Iterator[None]:
    """Put them into the gates."""
    history: dict[torch.Size, list[Tensor]] = {}

    def with_history(gates: Gates, x: Tensor) -> Tensor:
        alike = history.setdefault(x.shape, [])
        alike.append(x.detach().repeat(1, 1, 16))
        torch.stack(alike).std(0)
        return _healthy(gates, x)

    with injected(Fault(Gates, "forward", with_history)):
        yield
