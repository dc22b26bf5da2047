"""The smallest real training loop: the decoder LM of `nsa.model` on random tokens, AdamW, checkpoints.

Random tokens have a known entropy: no honest loss stays below ln(vocab_size).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nsa import NSAConfig
from nsa import model as lm
from nsa.model import DecoderLM, ModelConfig
from nsa.train import checkpoint, preflight, sentinels

TINY = ModelConfig(
    dim=32,
    n_layers=2,
    n_heads=4,
    n_kv_groups=2,
    d_k=8,
    d_v=8,
    nsa=NSAConfig(l=8, d=4, l_sel=16, n_sel=4, w=16),
    vocab_size=16,
)
"""Every branch has keys of its own to read from 16 tokens on, and a step takes some 20 ms on a CPU."""

COMPUTE = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

LAWFUL_SKIPS = 4
"""Steps that an fp16 run may lose while the scaler comes down to its scale; then one for each higher one it tries."""


@dataclass(frozen=True)
class Run:
    """What is trained and how; `plan` is what preflight reads of it."""

    steps: int
    model: ModelConfig = TINY
    batch_size: int = 2
    seq_len: int = 48
    lr: float = 1e-3
    precision: str = "fp32"
    """Compute type. The weights and AdamW's state stay in float32 under autocast; fp16 adds a gradient scaler."""
    save_every: int = 0
    seed: int = 0
    device: str = "cpu"

    @property
    def plan(self) -> preflight.Plan:
        return preflight.Plan(
            steps=self.steps,
            precision=self.precision,
            grad_scaler=self.precision == "fp16",
            save_every=self.save_every,
        )

    @property
    def floor_nats(self) -> float:
        """Entropy of the next random token."""
        return math.log(self.model.vocab_size)


class Trainer:
    """Model, optimiser, scaler and data, and all that a resume needs of them."""

    def __init__(self, run: Run) -> None:
        torch.manual_seed(run.seed)
        self.run, self.done = run, 0
        self.skipped = 0
        """Of the steps done, those that changed nothing: the scaler found infinity or NaN in the gradients."""
        self.grad_norm: float | None = None
        """Of all gradients in the last step, unscaled; None before the first."""
        self.model = DecoderLM(run.model).to(run.device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=run.lr)
        self.scaler = torch.amp.GradScaler(run.device, enabled=run.precision == "fp16")
        self.data = torch.Generator().manual_seed(run.seed)

    def step(self) -> float:
        """One optimiser step; returns the loss in nats before it."""
        loss = self.loss(self.batch())
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        self.grad_norm = float(torch.nn.utils.get_total_norm(gradients))
        scale = self.scaler.get_scale()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        self.skipped += self.scaler.get_scale() < scale
        self.done += 1
        return float(loss.detach())

    def non_finite(self, loss: float) -> sentinels.Alarm | None:
        """What of the last step is not finite: its loss, or gradients that the scaler's search does not explain."""
        tries = self.done // self.scaler.get_growth_interval() if self.scaler.is_enabled() else 0
        searching = self.scaler.is_enabled() and self.skipped <= LAWFUL_SKIPS + tries
        return sentinels.non_finite({"loss": loss, "grad_norm": None if searching else self.grad_norm})

    def batch(self) -> Tensor:
        """The next tokens, int64 [batch_size, seq_len], independent and uniform."""
        shape = (self.run.batch_size, self.run.seq_len)
        return torch.randint(self.run.model.vocab_size, shape, generator=self.data).to(self.run.device)

    def loss(self, tokens: Tensor) -> Tensor:
        """Cross-entropy of the next token in nats, computed in the run's precision up to the logits."""
        compute = COMPUTE[self.run.precision]
        with torch.autocast(self.run.device, dtype=compute, enabled=compute != torch.float32):
            return lm.next_token_loss(self.model(tokens), tokens)

    def state(self) -> dict[str, Any]:
        """Everything that the next step depends on."""
        return {
            "step": self.done,
            "skipped": self.skipped,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
            "data_rng": self.data.get_state(),
            "torch_rng": torch.get_rng_state(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continue after the step in which `state` was taken."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scaler.load_state_dict(state["scaler"])
        self.data.set_state(state["data_rng"])
        torch.set_rng_state(state["torch_rng"])
        self.done, self.skipped = state["step"], state["skipped"]


def train(run: Run, folder: Path | None = None) -> Iterator[tuple[int, float]]:
    """Train from the folder's latest checkpoint, or from the start; yields (step, loss) after each step.

    Raises `nsa.train.preflight.RefusedError` before the model is made.
    """
    preflight.check(run.plan)
    trainer = Trainer(run)
    newest = None if folder is None else checkpoint.latest(folder)
    if newest is not None:
        trainer.restore(checkpoint.load(newest))
    while trainer.done < run.steps:
        loss = trainer.step()
        if folder is not None and run.save_every and trainer.done % run.save_every == 0:
            checkpoint.save(folder, trainer.done, trainer.state())
        yield trainer.done, loss
