"""lowp-loss: "mixed-precision loss computation overflowed".

What really happened: the cross-entropy was summed in the type of the logits; fp16 ends at 65,504.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from nsa import loss
from nsa.model import next_token_loss
from nsa.train import settings
from nsa.train.data.loader import Shard, SyntheticBatches
from nsa.train.distributed import Ranks
from nsa.train.monitoring.health import Health, StepMetrics
from nsa.train.trainer import COMPUTE, Trainer
from regression import training
from regression.contract import Bound, Evidence, Incident, ReproVerdict, Step
from regression.injection import Fault, injected

INCIDENT = Incident(
    id="lowp-loss",
    symptom="mixed-precision loss overflowed",
    cause="cross-entropy in low precision: its sum leaves fp16's range",
    detector="large logits: the trainer's loss finite, and as far from float64 as fp32 is; every step goes through",
    expects=ReproVerdict.NONFINITE,
    fires=("error", "nonfinite"),
)

_TOKENS, _LARGER = 2048, 1000.0
"""The report's length; the head's weights are so many times those of an untrained model, as a diverging one's are."""
_BUDGET = 2.0
"""Times the error of PyTorch's own loss in float32, as everywhere in this project."""


def summed_in_the_logits_type(logits: Tensor, targets: Tensor) -> Tensor:
    """Of the right targets, summed where it should not be; autocast would not let it."""
    with torch.autocast(logits.device.type, enabled=False):
        return cross_entropy(logits.flatten(0, -2), targets.flatten(), ignore_index=loss.IGNORED, reduction="sum")


def product(step: Step) -> Evidence:
    """One step of the trainer in each precision on large logits, and its validation against float64."""
    bad: list[str] = []
    worst = Bound(0.0, 1.0)
    for n, precision in enumerate(settings.PRECISIONS, start=1):
        with tempfile.TemporaryDirectory() as folder:
            trainer = _diverging(Path(folder), step.device, precision)
        batch = SyntheticBatches(trainer.settings, Shard()).next().to(trainer.device)
        logits = _logits(trainer, batch.tokens)
        truth = _plain(logits.double(), batch.tokens)
        own = abs(_plain(logits.float(), batch.tokens) - truth)
        limit = _BUDGET * (own + truth * torch.finfo(torch.float32).eps)
        public = float(next_token_loss(logits, batch.tokens))
        losses = {"validation": trainer.validate([batch]), "next_token_loss": public}
        for name, value in losses.items():
            worst = max(worst, Bound(abs(value - truth), limit), key=_share)
            bad += [] if abs(value) < float("inf") else [f"{precision}: the loss of {name}"]
        stepped = trainer.step([batch])
        step(n, loss=float(stepped.loss))
        bad += _alarms(trainer, float(stepped.loss), float(stepped.grad_norm))
    of = f"nats from float64's; {_TOKENS} tokens of logits as large as a diverging model's"
    return Evidence(nonfinite=tuple(bad), error=Bound(worst.value, worst.limit, of))


def _diverging(folder: Path, device: str, precision: str) -> Trainer:
    """A trainer whose head gives large logits."""
    rows: dict[str, Any] = {"seq_len": 64, "batch_size": _TOKENS // 64, "packing": False, "steps": 1}
    trainer = Trainer(training.settings(folder, device, precision=precision, **rows), torch.device(device), Ranks())
    with torch.no_grad():
        trainer.lm.head.weight.mul_(_LARGER)
    return trainer


@torch.no_grad()
def _logits(trainer: Trainer, tokens: Tensor) -> Tensor:
    """[B, S, V] in the compute type, as the head makes them."""
    compute = COMPUTE[trainer.settings.runtime.precision]
    with torch.autocast(trainer.device.type, dtype=compute, enabled=compute != torch.float32):
        made: Tensor = trainer.lm.head(trainer.lm.hidden(tokens))
    return made


def _alarms(trainer: Trainer, loss_nats: float, grad_norm: float) -> list[str]:
    """What a run's own health says of the step."""
    precision = trainer.settings.runtime.precision
    health = Health(random_vocab_size=None, fp16=precision == "fp16", warmup_steps=0, fused_backend="auto")
    found = health.step(StepMetrics(1, loss_nats, grad_norm, _TOKENS, None, None))
    return [f"{precision}: {alarm.why}" for alarm in found]


def _plain(logits: Tensor, tokens: Tensor) -> float:
    return float(cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()))


def _share(error: Bound) -> float:
    """How much of its budget an error takes."""
    return float("inf") if error.value is None else error.value / error.limit


@contextmanager
def inject() -> Iterator[None]:
    with injected(Fault(loss, "summed_cross_entropy", summed_in_the_logits_type)):
        yield


def faulty(step: Step) -> Evidence:
    """The same steps, summed in the logits' own type."""
    with inject():
        return product(step)
