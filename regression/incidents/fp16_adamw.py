"""fp16-adamw: "fp16 NaN after step 1 on the 3090; tune GradScaler".

What really happened: the weights themselves were fp16, so AdamW divided by sqrt(g²) + eps with both of them 0.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from nsa.train import checkpoint, objective, settings
from nsa.train.monitoring.health import LAWFUL_SKIPS
from nsa.train.preflight import RefusedError
from nsa.train.run import CHECKPOINTS
from nsa.train.settings import Settings
from nsa.train.trainer import Trainer
from regression import training
from regression.contract import Evidence, Incident, ReproVerdict, Step
from regression.injection import Fault, injected

INCIDENT = Incident(
    id="fp16-adamw",
    symptom="fp16 NaN after step 1; tune GradScaler",
    cause="weights held in fp16: AdamW's eps rounds to 0, g² underflows, 0/0",
    detector="runs in fp32, bf16 and fp16: loss, gradients and weights finite; fp16 weights refused",
    expects=ReproVerdict.NONFINITE,
)

_STEPS = LAWFUL_SKIPS + 2
"""Steps that are all skipped are more than the scaler may lose."""
_healthy = Trainer.__init__


def half_weights(trainer: Trainer, settings: Settings, *given: Any) -> None:
    """The model is held in the compute type, the optimiser with it, and nothing scales the loss.

    PyTorch's fused AdamW computes in float32 whatever it is given, where eps is not 0; the reported one was not fused.
    """
    runtime = dataclasses.replace(settings.runtime, fp32_master_weights=False)
    _healthy(trainer, dataclasses.replace(settings, runtime=runtime), *given)
    groups = [{**group, "fused": False} for group in trainer.optimizer.param_groups]
    trainer.optimizer = torch.optim.AdamW(groups, betas=objective.BETAS)
    trainer.scaler = torch.amp.GradScaler(trainer.device.type, enabled=False)


def product(step: Step) -> Evidence:
    """A short run in every precision, judged by its own alarms and by the weights that it saved."""
    bad: list[str] = []
    for precision in settings.PRECISIONS:
        with tempfile.TemporaryDirectory() as folder:
            chosen = training.settings(Path(folder), step.device, precision=precision, steps=_STEPS)
            ended = training.run(chosen, lambda record: step(record["step"], loss=record["loss"]))
            bad += [f"{precision}: {sentinel}: {why}" for sentinel, why in ended.alarms.items()]
            bad += [f"{precision}: {name} after step {_STEPS}" for name in _nonfinite_weights(chosen)]
    return Evidence(
        nonfinite=tuple(bad),
        wrong=() if _refused(step.device) else ("preflight lets weights in fp16 start",),
        notes=(f"AdamW's eps 1e-8 in fp16 is {float(torch.tensor(1e-8, dtype=torch.float16)):g}",),
    )


def _nonfinite_weights(chosen: Settings) -> list[str]:
    """Weights of the last checkpoint, if there is one, that are not finite."""
    found = checkpoint.newest_intact(Path(chosen.out_dir) / CHECKPOINTS)
    weights = {} if found is None else found.state["model"]
    return [name for name, weight in weights.items() if not weight.isfinite().all()]


def _refused(device: str) -> bool:
    """Whether a run that asks for weights in fp16 is refused, with the field named."""
    with tempfile.TemporaryDirectory() as folder:
        chosen = training.settings(Path(folder), device, precision="fp16", steps=1)
        runtime = dataclasses.replace(chosen.runtime, fp32_master_weights=False)
        try:
            training.run(dataclasses.replace(chosen, runtime=runtime), lambda record: None)
        except RefusedError as error:
            return [refusal.field for refusal in error.refusals] == ["runtime.fp32_master_weights"]
        except ValueError:  # PyTorch's, of a run that has begun
            return False
    return False


@contextmanager
def inject() -> Iterator[None]:
    with injected(Fault(Trainer, "__init__", half_weights)):
        yield


def faulty(step: Step) -> Evidence:
    """The same runs with the weights in the compute type."""
    with inject():
        return product(step)
