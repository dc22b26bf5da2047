"""toy-config-run: 24.5 hours of two A100s on a toy model in fp32, and no checkpoint at the end of it.

What really happened: the config came from an environment variable, its default was the toy, and nothing asked.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nsa.train import preflight
from nsa.train.preflight import Decision, Plan, RefusedError
from regression import training
from regression.contract import Evidence, Incident, ReproVerdict, Step
from regression.injection import Fault, injected

INCIDENT = Incident(
    id="toy-config-run",
    symptom="24.5 h of two A100s on dim 128, fp32, no checkpoints",
    cause="no preflight; the config came from the environment only",
    detector="preflight refuses a long run and names the field: precision, checkpointing, save_every",
    expects=ReproVerdict.WRONG,
)

SOUND = Plan(steps=50_000, precision="bf16", gradient_checkpointing=True, save_every=5000)
_SPOILED: tuple[tuple[str, dict[str, object]], ...] = (
    ("runtime.precision", {"precision": "fp32"}),
    ("runtime.fp32_master_weights", {"precision": "fp16", "grad_scaler": True, "fp32_master_weights": False}),
    ("runtime.grad_scaler", {"precision": "fp16"}),
    ("runtime.gradient_checkpointing", {"gradient_checkpointing": False}),
    ("train.save_every", {"save_every": 0}),
    ("train.save_every", {"save_every": 50_000}),
    ("train.save_every", {"steps": 200, "predicted_hours": 24.5, "save_every": 0}),
)
"""A sound long run with one field invalid, and the field that a refusal must name."""


def nobody_asks(plan: Plan, *, allow_toy: bool = False) -> Decision:
    """The launcher of the report: whatever CONFIG names is started."""
    return Decision(plan)


def product(step: Step) -> Evidence:
    """Ask preflight about each invalid plan, and start the run of the report."""
    broken: list[str] = []
    for n, (field, change) in enumerate(_SPOILED, start=1):
        refused = _refused(dataclasses.replace(SOUND, **change))  # type: ignore[arg-type]
        if refused != {field}:
            broken.append(f"{change} must be refused by {field}; refused by {', '.join(sorted(refused)) or 'nothing'}")
        step(n)
    if _refused(SOUND):
        broken.append("a sound run is refused")
    if not preflight.check(dataclasses.replace(SOUND, save_every=0), allow_toy=True).overridden:
        broken.append("what allow_toy overrode is not recorded")
    if _starts(step.device):
        broken.append(f"{SOUND.length} in fp32 that keep nothing were started")
    step(len(_SPOILED) + 1)
    return Evidence(wrong=tuple(broken))


class _StartedError(Exception):
    """The run has taken a step."""


def _starts(device: str) -> bool:
    """Whether the run of the report takes its first step."""

    def stepped(record: dict[str, Any]) -> None:
        raise _StartedError

    with tempfile.TemporaryDirectory() as folder:
        report = training.settings(Path(folder), device, steps=SOUND.steps, precision="fp32")
        try:
            training.run(report, stepped)
        except (_StartedError, RefusedError) as error:
            return isinstance(error, _StartedError)
    return True


def _refused(plan: Plan) -> set[str]:
    """Fields that stop this plan."""
    try:
        preflight.check(plan)
    except RefusedError as error:
        return {refusal.field for refusal in error.refusals}
    return set()


@contextmanager
def inject() -> Iterator[None]:
    with injected(Fault(preflight, "check", nobody_asks)):
        yield


def faulty(step: Step) -> Evidence:
    """The same plans with a launcher that asks nothing."""
    with inject():
        return product(step)
