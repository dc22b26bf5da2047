"""Block shapes, chosen from the shapes of a call alone: no autotuning in anybody's first step.

How the figures were found, and what else was tried: docs/kernels.md.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

MIN_DOT = 16  # tensor cores take no smaller side
# With 16 value channels and more key channels Triton 3.6 makes Hopper read past the end of shared memory
# (compute-sanitizer: "Invalid __shared__ read" in the product of probabilities and values), so heads take 32.
MIN_HEAD = 32
NARROW = 512  # bytes of q and o, or of k and v, per row that the table is made for: bfloat16, head sizes of 128


@dataclass(frozen=True)
class Tuned:
    """How a kernel is launched where a row is at most NARROW bytes."""

    rows: int
    """Rows (tokens × heads of a group) per program."""
    keys: int
    """Keys per step of the loop, or per program that loops over queries."""
    num_warps: int
    num_stages: int


# Fits the 99 KiB of shared memory of an RTX 3090.
SMALL = {
    "interval_forward": Tuned(64, 64, 4, 2),
    "interval_backward_q": Tuned(64, 64, 4, 2),
    "interval_backward_kv": Tuned(64, 64, 4, 2),
    "select": Tuned(64, 16, 4, 2),
    "selected_forward": Tuned(16, 64, 2, 2),
    "selected_backward_q": Tuned(16, 64, 2, 2),
    "selected_backward_kv": Tuned(64, 64, 4, 2),
}
# Measured on an H200 at 32k tokens, 64/4 heads of 128.
HOPPER = SMALL | {"interval_forward": Tuned(64, 64, 4, 3), "interval_backward_kv": Tuned(64, 128, 8, 3)}
TABLES = {9: HOPPER}
"""By the major number of the compute capability; SMALL for any other."""


@dataclass(frozen=True)
class Shape:
    """How one kernel cuts the work of one call."""

    tokens: int
    """Queries per program, a power of two."""
    group: int
    """Heads of a group, padded to a power of two; tokens · group rows stand in a tile."""
    keys: int
    dk: int
    """Dk, padded to a power of two."""
    dv: int
    """Dv, likewise."""
    num_warps: int
    num_stages: int

    def sizes(self, dk: int, dv: int) -> tuple[int, ...]:
        """The constants DK, DV, DKP, DVP, BT, GP, BN of a kernel."""
        return dk, dv, self.dk, self.dv, self.tokens, self.group, self.keys

    @property
    def launch(self) -> dict[str, int]:
        """Keywords of the launch."""
        return {"num_warps": self.num_warps, "num_stages": self.num_stages}


def padded(size: int) -> int:
    """A power of two that holds `size` and that a dot takes."""
    return max(triton.next_power_of_2(size), MIN_DOT)


def padded_head(size: int) -> int:
    """A power of two that holds the channels of a head."""
    return max(triton.next_power_of_2(size), MIN_HEAD)


def table(device: torch.device) -> dict[str, Tuned]:
    """The table of a GPU; SMALL in the interpreter."""
    major = torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else 0
    return TABLES.get(major, SMALL)


def shape(kernel: str, q: Tensor, v: Tensor) -> Shape:
    """The tiles of a kernel for these queries [B, S, Hq, Dk] and values [B, T, Hkv, Dv]."""
    return fit(table(q.device)[kernel], q.shape[2] // v.shape[2], q.shape[3], v.shape[3], q.dtype)


def fit(tuned: Tuned, group: int, dk: int, dv: int, dtype: torch.dtype) -> Shape:
    """Tuned tiles, made smaller as far as head sizes and dtype make rows wider than the table assumes."""
    padded_group = triton.next_power_of_2(group)
    excess = max(triton.next_power_of_2((padded_head(dk) + padded_head(dv)) * dtype.itemsize) // NARROW, 1)
    rows, keys = max(tuned.rows // excess, MIN_DOT), max(tuned.keys // excess, MIN_DOT)
    tokens = max(rows // padded_group, 1, MIN_DOT // padded_group)
    num_warps, num_stages = (tuned.num_warps, tuned.num_stages) if excess == 1 else (4, 2)
    return Shape(tokens, padded_group, keys, padded_head(dk), padded_head(dv), num_warps, num_stages)
