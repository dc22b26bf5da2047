"""The selected branch of short sequences: tiles of queries read all keys up to their own, under a mask of their blocks.

Where most of what a query sees is chosen, an index (a sort of n · Hkv · S choices, tiles, partial outputs and their
merge) takes longer than the keys that are read in vain. The kernels are those of `compressed_window.py`. A query's
blocks are the bits of one number. Tiles of forward and dq may cut a group, and those of dk and dv do not pad it where
they hold more tokens so: the keys of a step do not depend on where tiles begin, so that a piece of a sequence still
gives the bits of the whole.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from nsa.geometry import Layout
from nsa.triton_backend import compressed_window, partial_sums
from nsa.triton_backend.compressed_window import BlockMask
from nsa.triton_backend.launch import ROWS, finite_keys
from nsa.triton_backend.launching.relaunch import on_device
from nsa.triton_backend.tile import kernel
from nsa.triton_backend.tuning import cdiv

Whole = tuple[Tensor, Tensor, Tensor, Tensor]

ENOUGH_PROGRAMS = 256
"""Below this, several programs share the queries of a tile of keys; above, `compressed_window.MASKED_QUERIES` says. One
sequence of 2048 tokens, 12/2 heads of 64, takes 210 µs forward and backward in a CUDA graph on an H200, 216 with 128 or
512."""


class Masks(NamedTuple):
    """What forward and backward pass both need; None where it is not known yet."""

    bits: Tensor | None = None
    """int64 [B, S, Hkv]: bit j for a chosen block j."""
    finite: Tensor | None = None
    """bool [B, T, Hkv], of every key."""


NO_MASKS = Masks()


@kernel
def _masks(BLOCKS, OUT, rows, N: tl.constexpr, BN: tl.constexpr):
    """OUT int64 [rows] from BLOCKS int32 [rows, N], distinct, -1 for none."""
    row = tl.program_id(0).to(tl.int64) * BN + tl.arange(0, BN)
    bits = tl.zeros([BN], tl.int64)
    for slot in range(N):
        block = tl.load(BLOCKS + row * N + slot, mask=row < rows, other=-1).to(tl.int64)
        bits |= tl.where(block >= 0, tl.full([BN], 1, tl.int64) << tl.maximum(block, 0), 0)
    tl.store(OUT + row, bits, mask=row < rows)


def _bits(block_indices: Tensor) -> Tensor:
    """The blocks of each query as bits."""
    *rows, n = block_indices.shape
    bits = torch.empty(rows, dtype=torch.int64, device=block_indices.device)
    with on_device(bits):
        _masks[cdiv(bits.numel(), ROWS),](block_indices, bits, bits.numel(), n, ROWS)
    return bits


def known(k: Tensor, v: Tensor, block_indices: Tensor, masks: Masks) -> tuple[Tensor, Tensor]:
    """The fields of `Masks`, made where they are not known."""
    bits = _bits(block_indices) if masks.bits is None else masks.bits
    return bits, finite_keys(k, v) if masks.finite is None else masks.finite


def _chosen(bits: Tensor, layout: Layout) -> BlockMask:
    return BlockMask(bits, layout.config.l_sel, layout.num_keys - layout.num_queries)


def forward(
    q: Tensor, k: Tensor, v: Tensor, block_indices: Tensor, layout: Layout, scale: float, masks: Masks,
    whole: Whole | None,
) -> tuple[Tensor, Tensor, Tensor, Masks]:  # fmt: skip
    """(o, lse, keys read, masks); arguments as of `selected.forward`, of one document and at most 64 blocks."""
    bits, finite = known(k, v, block_indices, masks)
    attended = compressed_window.forward(q, k, v, None, None, finite, scale, _chosen(bits, layout), whole)
    return *attended, Masks(bits, finite)


def gradients(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, lse: Tensor, delta: Tensor, block_indices: Tensor, layout: Layout,
    scale: float, more_dq: tuple[Tensor, Tensor] | None, wide: bool, masks: Masks,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(dq, dk, dv); arguments as of `selected.gradients`."""
    (bits, finite), bounds = known(k, v, block_indices, masks), 4 * (None,)
    dq, *parts = compressed_window.gradients(
        q, k, v, finite, do, lse, delta, *bounds, ENOUGH_PROGRAMS, scale, wide, _chosen(bits, layout), more_dq
    )
    return dq, *partial_sums.add_parts(parts, torch.float32 if wide else k.dtype)
