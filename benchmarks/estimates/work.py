"""What each kernel of a prefill has to do for one shape: operations as its tiles do them, bytes through L2 and memory.

Padded rows and channels are computed too, and a tile sees the keys of all its rows, rounded up to its steps.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from benchmarks.workloads import roofline
from nsa import NSAConfig, geometry
from nsa.triton_backend import traffic, tuning
from nsa.triton_backend.traffic import MemorySystem, SelectedCall

CONFIG = NSAConfig()
ELEMENT_BYTES = 2
DTYPE = torch.bfloat16


@dataclass(frozen=True)
class PrefillShape:
    """One sequence from its first token, in bfloat16, with the default configuration."""

    heads: int
    num_kv_heads: int
    dk: int
    dv: int
    tokens: int

    @property
    def group(self) -> int:
        return self.heads // self.num_kv_heads

    @property
    def compiled_heads(self) -> tuple[int, int, int]:
        """(G, Dk, Dv), by which kernels are compiled."""
        return self.group, self.dk, self.dv

    @property
    def name(self) -> str:
        """As in the name of a case: 64x4x128."""
        dims = f"{self.dk}" if self.dk == self.dv else f"{self.dk}:{self.dv}"
        return f"{self.heads}x{self.num_kv_heads}x{dims}"


@dataclass(frozen=True)
class Work:
    """What a kernel does."""

    tensor_flop: float
    """Operations on tensor cores, with padding; 0 where it uses none."""
    l2_bytes: float
    dram_bytes: float
    """The least: inputs and outputs once, and what travels between kernels."""
    programs: float = 0.0
    """Of a kernel without tensor cores."""


def pairs(shape: PrefillShape) -> roofline.Pairs:
    """(query, key) pairs of one kv head."""
    return roofline.nsa_pairs(shape.tokens, shape.tokens, CONFIG)


def _channels(shape: PrefillShape) -> tuple[int, int]:
    return tuning.padded_channels(shape.dk, shape.dv)


def _row_bytes(shape: PrefillShape) -> int:
    """Of q and o, or of k and v."""
    return (shape.dk + shape.dv) * ELEMENT_BYTES


def _io_bytes(shape: PrefillShape, keys: int) -> float:
    """q, o, k and v once."""
    return float(_row_bytes(shape) * (shape.tokens * shape.heads + keys * shape.num_kv_heads))


def interval(shape: PrefillShape, branch: str, kernel: str, architecture: int, products: tuple[int, int]) -> Work:
    """A kernel of `compressed_window.py`, or the scores: `branch` "compressed" or "window"; its products over Dk and
    over Dv per pair; `kernel` is its name in the table of launches."""
    tile = tuning.fit(kernel, architecture, shape.group, shape.dk, shape.dv, DTYPE)
    dk, dv = _channels(shape)
    keys = geometry.num_compressed_blocks(shape.tokens, CONFIG) if branch == "compressed" else shape.tokens
    per_query = getattr(pairs(shape), branch) / shape.tokens
    # a tile takes what any of its rows sees, in whole steps: half a step more at each end, and its own queries
    rows_per_query = tile.group if kernel in tuning.CUT_GROUPS else tile.rows / tile.tokens
    more = tile.keys + tile.rows / rows_per_query / (CONFIG.d if branch == "compressed" else 1)
    computed = shape.tokens * shape.num_kv_heads * rows_per_query * (per_query + more)
    by_keys = kernel.endswith("backward_kv")
    sharing = tile.keys if by_keys else tile.rows
    flop = computed * 2 * (products[0] * dk + products[1] * dv)
    twice = 2 if "backward" in kernel else 1  # gradients beside inputs
    return Work(flop, computed / sharing * _row_bytes(shape), twice * _io_bytes(shape, keys))


def selected_call(shape: PrefillShape) -> SelectedCall:
    """As the model of traffic sees it."""
    forced = (CONFIG.init_blocks + CONFIG.local_blocks) / CONFIG.n_sel
    size = CONFIG.l_sel
    return SelectedCall(shape.group, shape.dk, shape.dv, ELEMENT_BYTES, size, shape.tokens, shape.tokens, forced)


def choices(shape: PrefillShape) -> float:
    """Blocks that all queries of all kv heads read."""
    return pairs(shape).selected / CONFIG.l_sel * shape.num_kv_heads


def selected_by_query(shape: PrefillShape, memory: MemorySystem, products: tuple[int, int]) -> Work:
    """A program per query: 16 rows at least."""
    dk, dv = _channels(shape)
    read = choices(shape) * CONFIG.l_sel * _row_bytes(shape)
    flop = choices(shape) * CONFIG.l_sel * tuning.padded(shape.group) * 2 * (products[0] * dk + products[1] * dv)
    missed = traffic.missed_share(selected_call(shape), memory.l2_bytes)
    return Work(flop, read, _io_bytes(shape, shape.tokens) + read * missed)


def selected_by_block(shape: PrefillShape, products: tuple[int, int], query_channels: int, out_channels: int) -> Work:
    """A program per block and tile of queries: per choice and head, so many channels are read and written."""
    dk, dv = _channels(shape)
    rows = choices(shape) * tuning.next_power_of_2(shape.group)
    moved = choices(shape) * shape.group * (query_channels + out_channels) * ELEMENT_BYTES
    flop = rows * CONFIG.l_sel * 2 * (products[0] * dk + products[1] * dv)
    return Work(flop, moved, moved)


def topk(shape: PrefillShape) -> Work:
    """A program per 4096 scores, whatever the length; probabilities are written once and read once."""
    rows = shape.tokens * shape.num_kv_heads
    blocks = tuning.next_power_of_2(geometry.num_selection_blocks(shape.tokens, CONFIG))
    probabilities = 4.0 * pairs(shape).compressed * shape.num_kv_heads
    return Work(0.0, 2 * probabilities, 2 * probabilities, programs=rows * blocks / 4096)


def moved_bytes(shape: PrefillShape) -> dict[str, float]:
    """Bytes through device memory of what uses no tensor cores: the gated sum, and what the backward pass prepares."""
    outputs = float(shape.tokens * shape.heads * shape.dv * ELEMENT_BYTES)
    return {
        "gated sum": 4 * outputs,
        "gated sum, backward": 7 * outputs,  # do and three o read, three scaled do written
        "row sums": 6 * outputs,  # do and o of three branches
        "additions": 9.0
        * shape.tokens
        * shape.heads
        * shape.dk
        * ELEMENT_BYTES,  # dq of three branches, twice two to one
    }
