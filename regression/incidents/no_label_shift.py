"""no-label-shift: "loss 5.43 -> 0.28 on real text, better than synthetic, excellent".

What really happened: the targets were the inputs, so the model only had to repeat the token it was looking at.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch import Tensor

from nsa import loss
from regression import training
from regression.contract import Evidence, Incident, ReproVerdict, Step
from regression.injection import Fault, injected
from regression.training import TrainingResult

INCIDENT = Incident(
    id="no-label-shift",
    symptom="loss 5.43 -> 0.28, better than synthetic, excellent",
    cause="the targets were the inputs, not shifted by one",
    detector="entropy floor: on random tokens no run, of packed documents or of rows, stays below ln(vocabulary)",
    expects=ReproVerdict.TOO_GOOD,
)

_STEPS = 40


def targets_are_the_inputs(tokens: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
    """The logits at t against the token at t, which they were made from."""
    return tokens.long()


def product(step: Step) -> Evidence:
    """Train on random tokens, packed and in rows; the one that looks best is held to their entropy."""
    found = [_evidence(ended) for ended in _both(step)]
    return min(found, key=_margin)


def faulty(step: Step) -> Evidence:
    """The same with the fault in the targets; it must be seen in both ways to make a batch."""
    with inject():
        found = [_evidence(ended) for ended in _both(step)]
    return max(found, key=_margin)


def _both(step: Step) -> list[TrainingResult]:
    """A run on packed documents, and one on rows."""
    ended = []
    for packing in (True, False):
        with tempfile.TemporaryDirectory() as folder:
            chosen = training.settings(Path(folder), step.device, steps=_STEPS, lr=1e-2, packing=packing)
            ended.append(training.run(chosen, lambda record: step(record["step"], loss=record["loss"])))
    return ended


def _evidence(ended: TrainingResult) -> Evidence:
    """The loss against its floor, on which the run's own sentinel must agree."""
    found = ended.loss_on_random_tokens()
    silent = found.exceeded is (ended.stopped == "too_good")  # the one bound from below
    rows = "packed documents" if ended.settings.data.packing else "rows"
    return Evidence(
        loss_nats=None if silent else found,
        wrong=("the sentinel too_good does not see what the floor forbids",) if silent else (),
        notes=(f"{rows}: {ended.course()}; ln 16 = 2.773",),
    )


def _margin(evidence: Evidence) -> float:
    """How far the loss is above its floor."""
    if evidence.loss_nats is None or evidence.loss_nats.value is None:
        return float("-inf")
    return evidence.loss_nats.value - evidence.loss_nats.limit


@contextmanager
def inject() -> Iterator[None]:
    with injected(Fault(loss, "next_tokens", targets_are_the_inputs)):
        yield
