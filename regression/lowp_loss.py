"""lowp-loss: "mixed-precision loss computation overflowed".

What really happened: the cross-entropy was summed in the type of the logits; fp16 ends at 65,504.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from nsa import model as lm
from regression.evidence import Bound, Evidence
from regression.incident import Incident, Step
from regression.verdict import Verdict

INCIDENT = Incident(
    id="lowp-loss",
    symptom="mixed-precision loss overflowed",
    cause="cross-entropy in low precision: its sum leaves fp16's range",
    detector="large logits: loss and gradient finite, as far from float64 as fp32 is",
    expects=Verdict.NONFINITE,
    fires=("error", "nonfinite"),
)

_TOKENS, _VOCABULARY, _SCALE = 2048, 256, 30.0
"""The report's length and bytes; logits as large as an untrained or diverging model makes them."""
_BUDGET = 2.0
"""Times the error of PyTorch's own loss in float32, as everywhere in this project."""


def loss_in_the_logits_type(logits: Tensor, tokens: Tensor) -> Tensor:
    """Shifted as it should be, summed where it should not be."""
    flat, targets = logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()
    return cross_entropy(flat, targets, reduction="sum") / targets.numel()


def product(step: Step) -> Evidence:
    """Compare the loss of large logits in each type with float64."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(_VOCABULARY, (1, _TOKENS), generator=generator).to(step.device)
    wide = (torch.randn(1, _TOKENS, _VOCABULARY, generator=generator) * _SCALE).to(step.device)
    bad: list[str] = []
    worst = Bound(0.0, 1.0)
    for n, dtype in enumerate((torch.float32, torch.bfloat16, torch.float16), start=1):
        logits = wide.to(dtype).detach().requires_grad_()
        truth = float(_plain(logits.detach().double(), tokens))
        own = abs(float(_plain(logits.detach().float(), tokens)) - truth)
        loss = lm.next_token_loss(logits, tokens)
        loss.backward()
        step(n, loss=float(loss.detach()))
        error = Bound(abs(float(loss.detach()) - truth), _BUDGET * (own + truth * torch.finfo(torch.float32).eps))
        worst = max(worst, error, key=_share)
        bad += [f"{dtype}: the loss"] if not loss.isfinite() else []
        bad += [f"{dtype}: its gradient"] if logits.grad is None or not logits.grad.isfinite().all() else []
    of = f"nats from float64's; logits of standard deviation {_SCALE:g}"
    return Evidence(nonfinite=tuple(bad), error=Bound(worst.value, worst.limit, of))


def _plain(logits: Tensor, tokens: Tensor) -> Tensor:
    return cross_entropy(logits[0, :-1], tokens[0, 1:])


def _share(error: Bound) -> float:
    """How much of its budget an error takes."""
    return float("inf") if error.value is None else error.value / error.limit


@contextmanager
def inject() -> Iterator[None]:
    with mock.patch.object(lm, "next_token_loss", loss_in_the_logits_type):
        yield


def faulty(step: Step) -> Evidence:
    """The same logits, summed in their own type."""
    with inject():
        return product(step)
