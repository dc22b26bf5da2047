"""uniform-gates: "gate entropy 1.098, healthy, no collapse"; branch shares 0.333, 0.334, 0.333.

What really happened: ln 3 is 1.0986. The gates were where they had begun, and the check knew one bad end only.
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
from regression.evidence import Evidence
from regression.incident import Incident, Step
from regression.verdict import Verdict

INCIDENT = Incident(
    id="uniform-gates",
    symptom="gate entropy 1.098, healthy",
    cause="ln 3 = 1.0986: the gates were never trained",
    detector="entropy and largest share of trained gates: collapsed and exactly uniform are both faults",
    expects=Verdict.WRONG,
)

_STEPS = 20


def untrained(gates: Gates, x: Tensor) -> Tensor:
    """A softmax over logits that begin at 0 and that no gradient reaches."""
    return (gates.linear(x) * 0).detach().unflatten(-1, (-1, sentinels.BRANCHES)).softmax(-1)


def collapsed(gates: Gates, x: Tensor) -> Tensor:
    """A softmax that one branch has won."""
    logits: Tensor = gates.linear(x).unflatten(-1, (-1, sentinels.BRANCHES))
    return (logits + 20 * torch.eye(sentinels.BRANCHES, device=x.device)[2]).softmax(-1)


def product(step: Step) -> Evidence:
    """Train, then look at the gates of every layer on a fresh batch."""
    trainer = training.Trainer(training.Run(steps=_STEPS, device=step.device))
    for n in range(1, _STEPS + 1):
        step(n, loss=trainer.step())
    wrong, notes = [], []
    for name, gates in _gates(trainer).items():
        shares = (gates / gates.sum(-1, keepdim=True)).flatten(0, -3)  # [rows, heads, 3]
        entropies = torch.special.entr(shares).sum(-1).mean(0)
        maxima = shares.amax(-1).mean(0)
        entropy, largest = float(entropies.mean()), float(maxima.mean())
        alarms = (
            sentinels.gates_uniform(entropy),
            sentinels.gates_collapsed(entropies.tolist(), maxima.tolist()),
        )
        wrong += [f"{name}: {alarm.why}" for alarm in alarms if alarm]
        notes.append(f"{name}: entropy {entropy:.4f} nats, largest share {largest:.3f}")
    return Evidence(wrong=tuple(wrong), notes=tuple(notes))


def _gates(trainer: training.Trainer) -> dict[str, Tensor]:
    """What the gates of every layer give on one batch: [B, S, Hq, 3] by module name."""
    found: dict[str, Tensor] = {}

    def keep(module: Gates, _: object, output: Tensor) -> None:
        found[names[module]] = output

    names = {module: name for name, module in trainer.model.named_modules() if isinstance(module, Gates)}
    hooks = [module.register_forward_hook(keep) for module in names]
    with torch.no_grad():
        trainer.model(trainer.batch())
    for hook in hooks:
        hook.remove()
    return found


@contextmanager
def inject() -> Iterator[None]:
    with mock.patch.object(Gates, "forward", untrained):
        yield


def faulty(step: Step) -> Evidence:
    """Both ends: each must be seen."""
    with inject():
        uniform = product(step)
    with mock.patch.object(Gates, "forward", collapsed):
        one_branch = product(step)
    seen = (*uniform.wrong, *one_branch.wrong) if uniform.wrong and one_branch.wrong else ()
    return Evidence(wrong=seen, notes=uniform.notes)
