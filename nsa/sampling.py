"""From logits to the next token: temperature, top-k and top-p, one random number per token."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from nsa.layer import a_size

__all__ = ["Sampling", "draw"]

NOT_FINITE = -1
"""In place of a token where the logits held a NaN or nothing but -inf."""


@dataclass(frozen=True)
class Sampling:
    """How a token is drawn. Raises ValueError or TypeError naming the field, what came and what is wanted."""

    temperature: float = 1.0
    """Divides the logits; 0 takes the likeliest token, the lower one of two that are equal."""
    top_k: int | None = None
    """Draw among so many of the likeliest; None for all."""
    top_p: float | None = None
    """Draw among the fewest of the likeliest whose probabilities reach this sum; None for all."""
    seed: int = 0
    """Of row 0; row i draws with seed + i, whatever rows stand beside it."""

    def __post_init__(self) -> None:
        if not _is_number(self.temperature) or not 0 <= self.temperature < math.inf:
            raise ValueError(f"temperature must be finite and at least 0; got {self.temperature!r}")
        if self.top_k is not None:
            a_size("top_k", self.top_k)
        if self.top_p is not None and (not _is_number(self.top_p) or not 0 < self.top_p <= 1):
            raise ValueError(f"top_p must be above 0 and at most 1; got {self.top_p!r}")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise TypeError(f"seed must be an int; got {self.seed!r} ({type(self.seed).__name__})")


def draw(logits: Tensor, sampling: Sampling, uniform: Tensor) -> Tensor:
    """int64 [B]: the token that `uniform`, float64 [B] in [0, 1), picks from logits [B, vocab_size].

    top-k comes before top-p, both on probabilities at this temperature. NOT_FINITE where there is nothing to draw.
    """
    best = logits.double().sort(dim=-1, descending=True, stable=True)
    bad = logits.isnan().any(-1) | (best.values[:, 0] == -torch.inf) | (best.values[:, 0] == torch.inf)
    if sampling.temperature == 0:
        return best.indices[:, 0].masked_fill(bad, NOT_FINITE)
    values = best.values[:, : sampling.top_k]
    # the largest is taken off first: a small temperature would make it infinite
    p = ((values - values[:, :1]) / sampling.temperature).softmax(-1)
    if sampling.top_p is not None:
        before = p.cumsum(-1) - p
        p = p.masked_fill(before >= sampling.top_p, 0)
    reached = p.cumsum(-1)
    place = torch.searchsorted(reached, uniform[:, None] * reached[:, -1:], right=True)
    last = (p > 0).sum(-1, keepdim=True) - 1  # behind it rounding would find a token of probability 0
    return best.indices.gather(1, torch.minimum(place, last).clamp(min=0))[:, 0].masked_fill(bad, NOT_FINITE)


def _is_number(x: object) -> bool:
    return isinstance(x, (int, float)) and not isinstance(x, bool)
