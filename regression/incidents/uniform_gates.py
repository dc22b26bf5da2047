"""uniform-gates: "gate entropy 1.098, healthy, no collapse"; branch shares 0.333, 0.334, 0.333.

What really happened: ln 3 is 1.0986. The gates were where they had begun, and the check knew one bad end only.
"""

from __future__ import annotations

import tempfile
from contextlib import AbstractContextManager
from pathlib import Path

import torch
from torch import Tensor

from nsa.config import BRANCHES
from nsa.layer import Gates
from regression import training
from regression.contract import Evidence, Incident, ReproVerdict, Step
from regression.injection import Fault, injected

INCIDENT = Incident(
    id="uniform-gates",
    symptom="gate entropy 1.098, healthy",
    cause="ln 3 = 1.0986: the gates were never trained",
    detector="the run's own alarms on its gates: collapsed and exactly uniform are both faults",
    expects=ReproVerdict.WRONG,
)

_STEPS = 20
_ALARMS = ("gates_uniform", "gates_collapsed")


def untrained(gates: Gates, x: Tensor) -> Tensor:
    """A softmax over logits that begin at 0 and that next to no gradient reaches."""
    return (gates.linear(x) * 1e-8).unflatten(-1, (-1, len(BRANCHES))).softmax(-1)


def collapsed(gates: Gates, x: Tensor) -> Tensor:
    """A softmax that one branch has won."""
    logits: Tensor = gates.linear(x).unflatten(-1, (-1, len(BRANCHES)))
    return (logits + 20 * torch.eye(len(BRANCHES), device=x.device)[2]).softmax(-1)


def product(step: Step) -> Evidence:
    """Train, and hear what the run says of its gates."""
    with tempfile.TemporaryDirectory() as folder:
        chosen = training.settings(Path(folder), step.device, steps=_STEPS, statistics=True)
        ended = training.run(chosen, lambda record: step(record["step"], loss=record["loss"]))
    last = ended.steps[-1]
    entropy, largest = last["gate_entropy_mean_nats"], last["gate_max_share_max"]
    return Evidence(
        wrong=tuple(f"{name}: {why}" for name, why in ended.alarms.items() if name in _ALARMS),
        notes=(f"mean entropy {entropy:.4f} nats, largest share of a head {largest:.3f}",),
    )


def inject() -> AbstractContextManager[None]:
    """Put untrained gates into the product."""
    return injected(Fault(Gates, "forward", untrained))


def faulty(step: Step) -> Evidence:
    """Both ends: each must be seen."""
    with inject():
        uniform = product(step)
    with injected(Fault(Gates, "forward", collapsed)):
        one_branch = product(step)
    seen = (*uniform.wrong, *one_branch.wrong) if uniform.wrong and one_branch.wrong else ()
    return Evidence(wrong=seen, notes=uniform.notes)
