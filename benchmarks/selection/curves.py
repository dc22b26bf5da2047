"""The curves that describe which blocks a selection takes, measured from its block indices."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nsa import NSAConfig, geometry

LAGS = (1, 2, 4, 16, 64)
"""Rows between the two choices that a Jaccard index compares."""
UNIONS = (2, 4, 8, 16, 64)
"""Neighbouring queries whose choices are united."""


@dataclass(frozen=True)
class Curves:
    """Means over rows and key/value heads. Empty or None is not known."""

    jaccard: Mapping[int, float]
    """Lag in rows -> Jaccard index of the blocks chosen by two queries so far apart, forced blocks included."""
    union: Mapping[int, float]
    """Count -> distinct blocks that so many neighbouring queries choose."""
    distance: Mapping[int, float]
    """Blocks, a power of two -> share of the free choices that lie nearer than that to the query's own block."""
    popularity: float | None
    """How often the most chosen block is chosen freely over the mean of the blocks that ever are."""

    def deviations(self, target: Curves) -> dict[str, float]:
        """By name, this over the target less 1, for all that the target knows; shares by their difference."""
        found = {}
        for name, mine, theirs in (("jaccard", self.jaccard, target.jaccard), ("union", self.union, target.union)):
            found |= {f"{name} {at}": mine[at] / value - 1 for at, value in theirs.items()}
        found |= {f"distance {at}": self.distance[at] - value for at, value in target.distance.items()}
        if target.popularity is not None and self.popularity is not None:
            found["popularity"] = self.popularity / target.popularity - 1
        return found


def measure(chosen: Sequence[Tensor], first_tokens: Sequence[int], config: NSAConfig) -> Curves:
    """The curves of some stretches of consecutive rows: block indices [B, rows, Hkv, n] and each one's first position.

    Memory is one byte per row, head and block. ValueError for stretches too short for the longest lag.
    """
    longest = max(*LAGS, *UNIONS)
    if not chosen or min(one.shape[1] for one in chosen) <= longest:
        raise ValueError(f"each stretch must have more than {longest} rows; got {[one.shape[1] for one in chosen]}")
    pairs: dict[int, list[Tensor]] = {lag: [] for lag in LAGS}
    unions: dict[int, list[Tensor]] = {count: [] for count in UNIONS}
    distances, times = [], []
    blocks = int(max(first + one.shape[1] for one, first in zip(chosen, first_tokens, strict=True)) - 1)
    blocks = blocks // config.l_sel + 1
    for indices, first in zip(chosen, first_tokens, strict=True):
        taken = _membership(indices, blocks)  # [B, rows, Hkv, blocks]
        for lag, found in pairs.items():
            one, other = taken[:, :-lag], taken[:, lag:]
            found.append(((one & other).sum(-1) / (one | other).sum(-1)).flatten())
        for count, sizes in unions.items():
            whole = taken[:, : taken.shape[1] // count * count].unflatten(1, (-1, count))
            sizes.append(whole.any(2).sum(-1).double().flatten())
        position = torch.arange(first, first + indices.shape[1], device=indices.device) // config.l_sel
        current = position[None, :, None, None]
        free = (indices >= 0) & ~geometry.is_forced(indices, current, config)
        distances.append((current - indices)[free])
        times.append((taken & ~geometry.is_forced(torch.arange(blocks, device=taken.device), current, config)).sum(1))
    apart = torch.cat(distances)
    edges = [2**i for i in range(math.ceil(math.log2(blocks)) + 1)]
    return Curves(
        {lag: _mean(found) for lag, found in pairs.items()},
        {count: _mean(sizes) for count, sizes in unions.items()},
        {edge: float((apart < edge).double().mean()) for edge in edges} if apart.numel() else {},
        _popularity(torch.stack(times).sum(0)),
    )


def _membership(indices: Tensor, blocks: int) -> Tensor:
    taken = torch.zeros(*indices.shape[:-1], blocks + 1, dtype=torch.bool, device=indices.device)
    return taken.scatter_(-1, indices.long().masked_fill(indices < 0, blocks), True)[..., :blocks]


def _mean(parts: Sequence[Tensor]) -> float:
    return float(torch.cat(tuple(parts)).mean())


def _popularity(times: Tensor) -> float | None:
    """times [B, Hkv, blocks]: the mean over sequences and heads of maximum over mean; None where nothing is free."""
    counted = times.double()
    chosen = (counted > 0).sum(-1)
    if not bool((chosen > 0).all()):
        return None
    return float((counted.amax(-1) * chosen / counted.sum(-1)).mean())
