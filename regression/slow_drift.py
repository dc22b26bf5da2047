"""slow-drift. Reported: "throughput ±10 %, no downward drift; memory flat", ticked off by eye.

What such a check must find: telemetry that keeps a tensor of each step, and goes through all of them at each next one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch
from torch import Tensor

from nsa.gates import Gates
from nsa.train import sentinels
from regression import training
from regression.evidence import Bound, Evidence
from regression.incident import Incident, Step
from regression.resources import clock_s, memory_mib
from regression.verdict import Verdict

INCIDENT = Incident(
    id="slow-drift",
    symptom="throughput in a 10 % band and memory flat, by eye",
    cause="nothing measured it: a tensor kept from each step shows in neither of the first lines",
    detector="change-point of the throughput, slope of the memory over steps, warm-up left out",
    expects=Verdict.OUT_OF_MEMORY,
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


def _train(step: Step, before: int) -> tuple[sentinels.Alarm | None, sentinels.Alarm | None]:
    """(throughput's alarm, memory's alarm) of a run at one size, after the warm-up; `before` steps were taken."""
    run = training.Run(steps=_STEPS, batch_size=2, seq_len=64, device=step.device)
    trainer, speeds, memory = training.Trainer(run), list[float](), list[float]()
    for n in range(1, _STEPS + 1):
        begin = clock_s(step.device)
        loss = trainer.step()
        speeds.append(run.batch_size * run.seq_len / (clock_s(step.device) - begin))
        memory.append(memory_mib(step.device))
        step(before + n, loss=loss, tokens_per_s=speeds[-1], memory_mib=memory[-1])
    return (
        sentinels.throughput_drift(speeds[_WARM_UP:], tolerance=_FALL),
        sentinels.memory_slope(memory[_WARM_UP:], limit_mib_per_step=_MIB_PER_STEP, grown_mib=_GROWN_MIB),
    )


def _alarms(alarm: sentinels.Alarm | None) -> Bound:
    """None is allowed."""
    return Bound(int(alarm is not None), 0, f"alarms: {alarm.why}" if alarm else "alarms")


def faulty(step: Step) -> Evidence:
    """Statistics over all steps so far, from the tensors themselves."""
    with inject():
        return product(step)


@contextmanager
def inject() -> Iterator[None]:
    """Put them into the gates."""
    history: list[Tensor] = []

    def with_history(gates: Gates, x: Tensor) -> Tensor:
        history.append(x.detach().repeat(1, 1, 16))
        torch.stack(history).std(0)
        return _healthy(gates, x)

    with mock.patch.object(Gates, "forward", with_history):
        yield
