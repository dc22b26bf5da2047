"""fp16-adamw: "fp16 NaN after step 1 on the 3090; tune GradScaler".

What really happened: the weights themselves were fp16, so AdamW divided by sqrt(g²) + eps with both of them 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch

from nsa.train import preflight
from regression import training
from regression.evidence import Evidence
from regression.incident import Incident, Step
from regression.training import Run, Trainer
from regression.verdict import Verdict

INCIDENT = Incident(
    id="fp16-adamw",
    symptom="fp16 NaN after step 1; tune GradScaler",
    cause="weights held in fp16: AdamW's eps rounds to 0, g² underflows, 0/0",
    detector="steps in fp32, bf16 and fp16: loss, gradients and weights finite; fp16 weights refused",
    expects=Verdict.NONFINITE,
)

_STEPS = training.LAWFUL_SKIPS + 2
"""Steps that are all skipped are more than the scaler may lose."""
_PURE = preflight.Plan(steps=1, precision="fp16", fp32_master_weights=False, grad_scaler=True)


class HalfWeightsTrainer(Trainer):
    """The model is cast to the compute type, and the optimiser with it."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.model.to(training.COMPUTE[run.precision])
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=run.lr)
        self.scaler = torch.amp.GradScaler(run.device, enabled=False)


def product(step: Step) -> Evidence:
    """Take some optimiser steps in every precision that preflight lets start."""
    bad: list[str] = []
    for precision in preflight.PRECISIONS:
        trainer = training.Trainer(Run(steps=_STEPS, precision=precision, device=step.device))
        for n in range(1, _STEPS + 1):
            loss = trainer.step()
            step(n, loss=loss)
            alarm = trainer.non_finite(loss)
            bad += [f"{precision}, step {n}: {alarm.why}"] if alarm else []
        weights = [name for name, weight in trainer.model.named_parameters() if not weight.isfinite().all()]
        bad += (
            [f"{precision}: {len(weights)} of the weights after step {_STEPS}, {weights[0]} first"] if weights else []
        )
    refused = any(refusal.field == "runtime.fp32_master_weights" for refusal in preflight.refusals(_PURE))
    return Evidence(
        nonfinite=tuple(bad),
        wrong=() if refused else ("preflight lets weights in fp16 start",),
        notes=(f"AdamW's eps 1e-8 in fp16 is {float(torch.tensor(1e-8, dtype=torch.float16)):g}",),
    )


@contextmanager
def inject() -> Iterator[None]:
    with mock.patch.object(training, "Trainer", HalfWeightsTrainer):
        yield


def faulty(step: Step) -> Evidence:
    """The same steps with the weights in the compute type."""
    with inject():
        return product(step)
