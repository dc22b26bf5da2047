"""A cache's write: new keys and values of every set, and the mean of each block that they complete, in one launch.

Rows lie side by side or in pages. Programs copy tiles of (token, head) pairs; others take the means (phi = avg), of
old tokens from the cache and of new ones from where they came, since another program may not have stored them yet. A
mean has the bits that a prefill gives it: tokens are added in the same order (`compression._mean`).
How many tokens there were is read from the device where a CUDA graph needs that.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa.config import NSAConfig
from nsa.kv import KVView
from nsa.triton_backend.compression import BLOCKS
from nsa.triton_backend.decode_kernels import visible_blocks
from nsa.triton_backend.launching.relaunch import on_device
from nsa.triton_backend.tile import kernel, load_rows, store_rows
from nsa.triton_backend.tuning import cdiv, padded

PAIRS = 16  # (token, head) pairs per program


@triton.jit
def _row(TABLE, table_b, b, number, inside, rows, PAGE: tl.constexpr):
    """Where the row `number` of sequence b lies in its buffer: behind b · rows others, or in a page (PAGE > 0)."""
    if PAGE == 0:
        found = b * rows + number
    else:
        page = tl.load(TABLE + b * table_b + number // PAGE, mask=inside, other=0).to(tl.int64)
        found = page * PAGE + number % PAGE
    return found


@triton.jit
def _copy(
    K, V, K_OUT, V_OUT, TABLE, table_b, k_b, k_s, k_h, v_b, v_s, v_h, before, tile, b, rows, S, HKV,
    PAGE: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, DKP: tl.constexpr, DVP: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """One tile of the new rows of one set."""
    pair = tile.to(tl.int64) * BR + tl.arange(0, BR)
    i, h = pair // HKV, pair % HKV
    real = i < S
    out = _row(TABLE, table_b, b, before + i, real, rows, PAGE) * HKV + h
    k = load_rows(K + b * k_b, i * k_s + h * k_h, real, DK, DKP)
    v = load_rows(V + b * v_b, i * v_s + h * v_h, real, DV, DVP)
    store_rows(K_OUT, out * DK, real, k, DK, DKP)
    store_rows(V_OUT, out * DV, real, v, DV, DVP)


@triton.jit
def _means(
    NEW, HELD, OUT, TABLE, TABLE_CMP, table_b, cmp_table_b, x_b, x_s, x_h, before, full, first, b, h, rows, slots,
    HKV, L: tl.constexpr, STRIDE: tl.constexpr, PAGE: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    BN: tl.constexpr,
):  # fmt: skip
    """Write those of the blocks first … first + BN of one sequence and head that the new tokens complete."""
    block = first + tl.arange(0, BN)
    inside, total = block < full, tl.zeros([BN, DP], tl.float32)
    for number in range(L // STRIDE):
        stride = tl.zeros([BN, DP], tl.float32)
        for place in tl.static_range(STRIDE):
            token = (block + number) * STRIDE + place
            old = token < before
            held = HELD + (_row(TABLE, table_b, b, token, inside & old, rows, PAGE) * HKV + h) * D
            new = NEW + b * x_b + h * x_h + (token - before).to(tl.int64) * x_s
            x = load_rows(tl.where(old, held, new)[:, None], tl.zeros_like(token), inside, D, DP)
            stride += x.to(tl.float32)
        total += stride
    row = _row(TABLE_CMP, cmp_table_b, b, block, inside, slots, PAGE)
    store_rows(OUT, (row * HKV + h) * D, inside, total / L, D, DP)


@kernel
def _write(
    K_0, K_1, K_2, V_0, V_1, V_2, K_OUT_0, K_OUT_1, K_OUT_2, V_OUT_0, V_OUT_1, V_OUT_2, TABLE_0, TABLE_1, TABLE_2,
    K_CMP, V_CMP, TABLE_CMP, BEFORE, first, k_b, k_s, k_h, v_b, v_s, v_h, table_b, cmp_table_b, rows, slots, S, HKV,
    tiles,
    L: tl.constexpr, STRIDE: tl.constexpr, PAGE: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, DKP: tl.constexpr,
    DVP: tl.constexpr, BR: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """`tiles` programs for each set, then those of the compressed rows. K_1, K_2 and what belongs to them are None
    where there is one set, K_CMP and V_CMP where no means are written, BEFORE where `first` says it."""
    number, tile, b = tl.program_id(0) // tiles, tl.program_id(0) % tiles, tl.program_id(1).to(tl.int64)
    before = first if BEFORE is None else tl.load(BEFORE + b)
    if number == 0:
        _copy(K_0, V_0, K_OUT_0, V_OUT_0, TABLE_0, table_b, k_b, k_s, k_h, v_b, v_s, v_h, before, tile, b, rows, S, HKV,
              PAGE, DK, DV, DKP, DVP, BR)  # fmt: skip
    if K_1 is not None:
        if number == 1:
            _copy(K_1, V_1, K_OUT_1, V_OUT_1, TABLE_1, table_b, k_b, k_s, k_h, v_b, v_s, v_h, before, tile, b, rows, S,
                  HKV, PAGE, DK, DV, DKP, DVP, BR)  # fmt: skip
        if number == 2:
            _copy(K_2, V_2, K_OUT_2, V_OUT_2, TABLE_2, table_b, k_b, k_s, k_h, v_b, v_s, v_h, before, tile, b, rows, S,
                  HKV, PAGE, DK, DV, DKP, DVP, BR)  # fmt: skip
    if K_CMP is not None:
        sets: tl.constexpr = 1 if K_1 is None else 3
        at = tl.program_id(0) - sets * tiles
        done, full = visible_blocks(before - 1, L, STRIDE), visible_blocks(before + S - 1, L, STRIDE)
        block, h = done + at // HKV * BN, (at % HKV).to(tl.int64)
        if (at >= 0) & (block < full):
            _means(K_0, K_OUT_0, K_CMP, TABLE_0, TABLE_CMP, table_b, cmp_table_b, k_b, k_s, k_h, before, full,
                   block, b, h, rows, slots, HKV, L, STRIDE, PAGE, DK, DKP, BN)  # fmt: skip
            _means(V_0, V_OUT_0, V_CMP, TABLE_0, TABLE_CMP, table_b, cmp_table_b, v_b, v_s, v_h, before, full,
                   block, b, h, rows, slots, HKV, L, STRIDE, PAGE, DV, DVP, BN)  # fmt: skip


def write(
    k: Sequence[Tensor],
    v: Sequence[Tensor],
    into: Sequence[KVView],
    compressed: KVView | None,
    before: Tensor | int,
    config: NSAConfig,
) -> None:
    """Write k [B, S, Hkv, Dk] and v [B, S, Hkv, Dv] of one set or three behind the tokens that sequences have.

    `into` is where each set goes, contiguous and of one shape, its tables of one width; `before` how many tokens there
    are, int32 [B] or one number for all. `compressed` is where the mean of each block of the first set goes that the
    new tokens complete; None where it is not a mean, or nobody asks.
    """
    k, v = (_alike([x.to(into[0].k.dtype) for x in new]) for new in (k, v))
    (batch, length, num_kv_heads, dk), dv, pages = k[0].shape, v[0].shape[3], into[0].page_size
    if not batch * length:
        return
    tiles = cdiv(length * num_kv_heads, PAIRS)
    programs = len(into) * tiles
    if compressed is not None:
        programs += cdiv(length // config.d + 1, BLOCKS) * num_kv_heads
    none = (3 - len(into)) * (None,)
    tables, last = [view.table for view in into], None if compressed is None else compressed.table
    with on_device(k[0]):
        _write[programs, batch](
            *k, *none, *v, *none, *(view.k for view in into), *none, *(view.v for view in into), *none, *tables, *none,
            *((None, None) if compressed is None else (compressed.k, compressed.v)), last,
            *((before, 0) if isinstance(before, torch.Tensor) else (None, before)), *k[0].stride()[:3],
            *v[0].stride()[:3], *(0 if table is None else table.stride(0) for table in (tables[0], last)),
            into[0].k.shape[1], 0 if compressed is None else compressed.k.shape[1], length, num_kv_heads, tiles,
            config.l, config.d, pages, dk, dv, padded(dk), padded(dv), PAIRS, BLOCKS,
        )  # fmt: skip


def _alike(new: list[Tensor]) -> list[Tensor]:
    """The tensors of all sets, copied where their strides differ or channels are not side by side."""
    strides = new[0].stride()
    return new if strides[3] == 1 and all(x.stride() == strides for x in new) else [x.contiguous() for x in new]
