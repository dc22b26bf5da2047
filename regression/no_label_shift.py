"""no-label-shift: "loss 5.43 -> 0.28 on real text, better than synthetic, excellent".

What really happened: the targets were the inputs, so the model only had to repeat the token it was looking at.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from torch import Tensor
from torch.nn.functional import cross_entropy

from nsa import model as lm
from nsa.train import sentinels
from regression import training
from regression.evidence import Bound, Evidence
from regression.incident import Incident, Step
from regression.verdict import Verdict

INCIDENT = Incident(
    id="no-label-shift",
    symptom="loss 5.43 -> 0.28, better than synthetic, excellent",
    cause="the targets were the inputs, not shifted by one",
    detector="entropy floor: on random tokens no loss stays below ln(vocabulary)",
    expects=Verdict.TOO_GOOD,
)

_STEPS, _JUDGED = 50, 20


def targets_are_the_inputs(logits: Tensor, tokens: Tensor) -> Tensor:
    """The logits at t against the token at t, which they were made from."""
    return cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())


def product(step: Step) -> Evidence:
    """Train on random tokens and hold the mean of the last losses to their entropy."""
    run = training.Run(steps=_STEPS, lr=3e-3, device=step.device)
    losses = []
    for n, loss in training.train(run):
        losses.append(loss)
        step(n, loss=loss)
    targets = _JUDGED * run.batch_size * (run.seq_len - 1)
    mean = statistics.fmean(losses[-_JUDGED:])
    loss_nats = Bound(mean, sentinels.loss_floor_nats(run.model.vocab_size, targets))
    seen = sentinels.too_good(mean, run.model.vocab_size, targets) is not None
    silent = loss_nats.exceeded is seen  # the one bound from below
    return Evidence(
        loss_nats=None if silent else loss_nats,
        wrong=("the sentinel too_good does not see what the floor forbids",) if silent else (),
        notes=(f"{losses[0]:.3f} -> {losses[-1]:.3f} nats in {_STEPS} steps; ln 16 = {run.floor_nats:.3f}",),
    )


@contextmanager
def inject() -> Iterator[None]:
    with mock.patch.object(lm, "next_token_loss", targets_are_the_inputs):
        yield


def faulty(step: Step) -> Evidence:
    """The same training with the fault in its loss."""
    with inject():
        return product(step)
