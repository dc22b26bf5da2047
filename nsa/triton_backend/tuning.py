"""Block shapes, chosen from the shapes of a call alone: no autotuning in anybody's first step.

One conservative table serves every architecture for now: its tiles fit the 99 KiB of shared memory of an RTX 3090.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

MIN_DOT = 16  # tensor cores take no smaller side
NARROW = 512  # bytes per row up to which tiles keep all their rows: bfloat16 with head sizes of 128


@dataclass(frozen=True)
class Shape:
    """How one kernel cuts its work."""

    tokens: int
    """Queries per program, a power of two."""
    group: int
    """Heads of a group, padded to a power of two; tokens · group rows stand in a tile."""
    keys: int
    """Keys per step of the loop."""
    dk: int
    """Dk, padded to a power of two."""
    dv: int
    """Dv, likewise."""
    num_warps: int
    num_stages: int


def padded(size: int) -> int:
    """A power of two that holds `size` and that a dot takes."""
    return max(triton.next_power_of_2(size), MIN_DOT)


def shape(group: int, dk: int, dv: int, dtype: torch.dtype, *, keys: int | None = None, rows: int = 128) -> Shape:
    """Tiles of about `rows` rows, halved where head sizes and dtype make them large; `keys` to fix the keys' side."""
    wide = (padded(dk) + padded(dv)) * dtype.itemsize  # bytes per row of q and o, or of k and v
    rows = max(rows * NARROW // max(triton.next_power_of_2(wide), NARROW), MIN_DOT)
    padded_group = triton.next_power_of_2(group)
    tokens = max(rows // padded_group, 1, MIN_DOT // padded_group)
    if keys is None:
        keys = 64 if wide <= 512 else 32 if wide <= 1024 else 16
    rows = tokens * padded_group
    return Shape(tokens, padded_group, keys, padded(dk), padded(dv), 8 if rows * keys >= 128 * 64 else 4, 2)
