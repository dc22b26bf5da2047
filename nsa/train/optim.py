"""AdamW and the learning rate's schedule."""

from __future__ import annotations

import math

import torch
from torch import nn

from nsa.train.settings import Train

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
