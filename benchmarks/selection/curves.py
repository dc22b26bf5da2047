"""The curves that describe which blocks a selection takes, measured from its block indices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.atlas import measures
from benchmarks.atlas.record import LAGS, UNIONS
from nsa import NSAConfig, geometry


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
    """How often the most chosen block is chosen freely over the mean of the blocks that could be."""

    def deviations(self, target: Curves) -> dict[str, float]:
        """By name, this over the target less 1, for all that the target knows; shares by their difference."""
        found: dict[str, float] = {}
        for name, mine, theirs in (("jaccard", self.jaccard, target.jaccard), ("union", self.union, target.union)):
            found |= {f"{name} {at}": mine[at] / value - 1 for at, value in theirs.items()}
        found |= {f"distance {at}": self.distance[at] - value for at, value in target.distance.items()}
        if target.popularity is not None and self.popularity is not None:
            found["popularity"] = self.popularity / target.popularity - 1
        return found


def measure(chosen: Sequence[Tensor], first_tokens: Sequence[int], config: NSAConfig) -> Curves:
    """The curves of stretches of consecutive rows: block indices [B, rows, Hkv, n] and each one's first position.

    All of as many rows; ValueError where these are too few for the longest lag, or differ.
    """
    rows = {one.shape[1] for one in chosen}
    if len(rows) != 1 or min(rows) <= max(LAGS):
        raise ValueError(f"stretches must have as many rows, more than {max(LAGS)}; got {sorted(rows)}")
    sequences = [one.transpose(0, 1).flatten(1, 2) for one in chosen]  # [rows, B * Hkv, n]
    whole = torch.cat(sequences)
    positions = torch.cat([torch.arange(first, first + min(rows), device=whole.device) for first in first_tokens])
    blocks = geometry.num_selection_blocks(int(positions.max()) + 1, config)
    free = measures.without_forced(whole, positions, config)
    shares = measures.distances(free, positions, config.l_sel, blocks).mean(0).cumsum(0)
    some = bool((free >= 0).any())
    return Curves(
        {lag: _mean([measures.at_lag(one, lag) for one in sequences]) for lag in LAGS},
        {count: _mean([measures.union_size(one, count) for one in sequences]) for count in UNIONS},
        dict(zip(measures.distance_edges(blocks), shares.tolist(), strict=True)) if some else {},
        float(measures.popularity(free, positions, config).mean()) if some else None,
    )


def _mean(parts: Sequence[Tensor]) -> float:
    return float(torch.cat(tuple(parts)).mean())
