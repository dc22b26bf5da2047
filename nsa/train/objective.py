"""The loss as one module, which DDP, FSDP2 and the compiler wrap; AdamW, and the learning rate's schedule.

Logits are made, and their cross-entropy computed in float32, a piece of the tokens at a time, and again in the
backward pass: at no time does memory hold tokens × vocabulary.
"""

from __future__ import annotations

import functools
import math
from typing import cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from nsa import loss
from nsa.model import Block, DecoderLM
from nsa.train.settings import Train

CHUNK_LOGITS = 2**23
"""Logits made at once: 32 MiB in float32."""


class Objective(nn.Module):
    """Summed cross-entropy of the decoder LM: tokens and targets int64 [B, S] -> float32 [], in nats."""

    def __init__(self, lm: DecoderLM) -> None:
        super().__init__()
        self.lm = lm

    def forward(self, tokens: Tensor, targets: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
        hidden = self.lm.hidden(tokens, cu_seqlens=cu_seqlens).flatten(0, 1)
        wanted = targets.flatten()
        chunk = max(1, CHUNK_LOGITS // self.lm.config.vocab_size)
        losses = [
            checkpoint(self._loss, piece, target, use_reentrant=False, preserve_rng_state=False)
            for piece, target in zip(hidden.split(chunk), wanted.split(chunk), strict=True)
        ]
        return torch.stack(cast(list[Tensor], losses)).sum()

    def _loss(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """hidden [tokens, dim], targets int64 [tokens] -> float32 []."""
        return loss.summed_cross_entropy(self.lm.head(hidden), targets)


def recompute(lm: DecoderLM, how: bool | str) -> None:
    """Forget activations and compute them again in the backward pass: true for each block, "selective" for its MLP.

    An MLP's activations are the most of a block's, and its matrix products the cheapest to repeat.
    """
    if how is False:
        return
    for block in lm.blocks:
        module = cast(Block, block).mlp if how == "selective" else block
        module.forward = functools.partial(checkpoint, module.forward, use_reentrant=False, preserve_rng_state=False)


BETAS = (0.9, 0.95)


def adamw(model: nn.Module, train: Train) -> torch.optim.AdamW:
    """Decay for matrices, none for what has one dimension; fused on a GPU."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": train.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=train.lr, betas=BETAS, fused=parameters[0].device.type == "cuda")


def learning_rate(step: int, train: Train) -> float:
    """Of the optimiser step `step`, counted from 0: a linear rise, then cosine down to `lr_end` of the peak."""
    if step < train.warmup_steps:
        return train.lr * (step + 1) / train.warmup_steps
    if train.lr_schedule == "constant":
        return train.lr
    done = (step - train.warmup_steps) / max(1, train.steps - 1 - train.warmup_steps)
    share = train.lr_end + (1 - train.lr_end) * (1 + math.cos(math.pi * min(done, 1.0))) / 2
    return train.lr * share
