"""What several programs leave of one query, block or key, added up.

Of `selected_kv_major.py` it is added in the order of the choice and of the tiles. dk and dv of `compressed_window.py`
come in parts where several programs share the queries of a tile of keys.

The kernels that go through the queries again add what the other branches gave, in a call of all branches: the gated
sum forward, dq backward.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa.triton_backend.gated_sum import gated
from nsa.triton_backend.launching.relaunch import on_device
from nsa.triton_backend.tile import LN2, add_branches, kernel, load_rows, store_rows
from nsa.triton_backend.tuning import cdiv

SUMS, PARTS_AT_ONCE = 256, 8  # of dk and dv: elements per program, and parts that it loads at a time
KEYS_OF_SUM, TILES_AT_ONCE = 16, 4  # of dk and dv of blocks: keys per program, and tiles that it loads at a time


@kernel
def merge_blocks(
    O_PART, LSE_PART, READ_PART, BLOCKS, O, LSE, READ, O_CMP, O_WIN, GATES, SUM, first_query, count, S, HQ, HKV, G,
    N: tl.constexpr, NP: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr, GP: tl.constexpr,
):  # fmt: skip
    """The partial outputs of one query's blocks become its output; SUM, if not None, is Eq. 5 of all branches."""
    local, h, b = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    i = first_query + local
    slot, g = tl.arange(0, NP), tl.arange(0, GP)
    real = g < G
    chosen = (b * S + i) * HKV + h
    taken = tl.load(BLOCKS + chosen * N + slot, mask=slot < N, other=-1) >= 0
    row = ((b * HKV + h) * count + local) * N
    lse = tl.load(LSE_PART + (row + slot[:, None]) * G + g[None, :], mask=taken[:, None] & real[None, :],
                  other=float("-inf"))  # fmt: skip
    m = tl.max(lse, axis=0)
    m = tl.where(m == float("-inf"), 0.0, m)
    l = tl.sum(tl.exp2(lse - m[None, :]), axis=0)
    acc = tl.zeros([GP, DVP], tl.float32)
    for s in tl.static_range(N):
        there = real & (tl.load(BLOCKS + chosen * N + s) >= 0)
        weight = tl.exp2(tl.load(LSE_PART + (row + s) * G + g, mask=there, other=float("-inf")) - m)
        acc += weight[:, None] * load_rows(O_PART, ((row + s) * G + g) * DV, there, DV, DVP).to(tl.float32)
    safe_l = tl.where(l == 0.0, 1.0, l)
    out = (b * S + i) * HQ + h * G + g
    o = (acc * (1.0 / safe_l)[:, None]).to(O.dtype.element_ty)
    store_rows(O, out * DV, real, o, DV, DVP)
    if SUM is not None:
        o_cmp, o_win = load_rows(O_CMP, out * DV, real, DV, DVP), load_rows(O_WIN, out * DV, real, DV, DVP)
        store_rows(SUM, out * DV, real, gated(GATES, out, real, o_cmp, o, o_win), DV, DVP)
    tl.store(LSE + out, tl.where(l == 0.0, float("-inf"), (m + tl.log2(safe_l)) * LN2), mask=real)
    read = tl.sum(tl.load(READ_PART + row + slot, mask=taken, other=0), axis=0)
    tl.store(READ + chosen, read)


@triton.jit
def _sum_tiles(PART, FIRST_TILE, BEGIN, END, OUT, number, place, out, inside, SIZE: tl.constexpr, D: tl.constexpr,
               DP: tl.constexpr, BN: tl.constexpr, MORE: tl.constexpr, ADDED: tl.constexpr,
               AT_ONCE: tl.constexpr):  # fmt: skip
    first_tile, past = tl.load(FIRST_TILE + number), tl.load(FIRST_TILE + number + 1)
    held, changed = inside, inside
    if ADDED:
        begin = tl.load(BEGIN + first_tile, mask=first_tile < past, other=0)
        has_first = begin < tl.load(END + first_tile, mask=first_tile < past, other=0)
        holds, first_tile = has_first | MORE, first_tile + 1
        changed = inside & ((first_tile < past) | (holds == 0))
        held = changed & holds
    acc = tl.zeros([BN, DP], tl.float32)
    if MORE or ADDED:
        acc += load_rows(OUT, out * D, held, D, DP)
    for first in range(first_tile, past, AT_ONCE):
        for tile in tl.static_range(AT_ONCE):  # loads that do not wait for one another
            there = first + tile < past
            begin = tl.load(BEGIN + first + tile, mask=there, other=0)
            written = begin < tl.load(END + first + tile, mask=there, other=0)
            acc += load_rows(PART, ((first + tile) * SIZE + place) * D, inside & written, D, DP)
    store_rows(OUT, out * D, changed, acc, D, DP)


@kernel
def sum_dkdv(
    DK_PART, DV_PART, FIRST_TILE, BEGIN, END, BLOCK_FROM, BLOCK_TO, DK_OUT, DV_OUT, T, HKV, max_blocks,
    SIZE: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, DKP: tl.constexpr, DVP: tl.constexpr, BN: tl.constexpr,
    MORE: tl.constexpr, ADDED: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """DK_OUT and DV_OUT [B, T, Hkv, D] = the sum of each block's parts, tile after tile, or 0 where it has none; `MORE`
    adds it to what they hold. `ADDED`: the kernel has added each block's first tile itself, or written it."""
    number, place = tl.program_id(0).to(tl.int64), tl.program_id(1) * BN + tl.arange(0, BN)
    kv_row = number // max_blocks
    key = tl.load(BLOCK_FROM + number % max_blocks) + place
    inside = (place < SIZE) & (key < tl.load(BLOCK_TO + number % max_blocks))
    out = (kv_row // HKV * T + key) * HKV + kv_row % HKV
    if tl.program_id(2) == 0:
        _sum_tiles(
            DK_PART, FIRST_TILE, BEGIN, END, DK_OUT, number, place, out, inside, SIZE, DK, DKP, BN, MORE, ADDED, AT_ONCE
        )  # fmt: skip
    else:
        _sum_tiles(
            DV_PART, FIRST_TILE, BEGIN, END, DV_OUT, number, place, out, inside, SIZE, DV, DVP, BN, MORE, ADDED, AT_ONCE
        )  # fmt: skip


@kernel
def sum_dq(
    PART, BLOCKS, DQ_CMP, DQ_WIN, OUT, first_query, count, S, HQ, HKV, G, scale,
    N: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, GP: tl.constexpr,
):  # fmt: skip
    """OUT [B, S, Hq, D] = scale times the sum of PART [B, Hkv, count, N, G, D] over the blocks of each query, and
    those of the other branches if not None."""
    local, h, b = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    i, g = first_query + local, tl.arange(0, GP)
    row = ((b * HKV + h) * count + local) * N
    acc = tl.zeros([GP, DP], tl.float32)
    for slot in tl.static_range(N):
        there = (g < G) & (tl.load(BLOCKS + ((b * S + i) * HKV + h) * N + slot) >= 0)
        acc += load_rows(PART, ((row + slot) * G + g) * D, there, D, DP).to(tl.float32)
    out = (b * S + i) * HQ + h * G + g
    acc = add_branches(acc * scale, DQ_CMP, DQ_WIN, out, g < G, OUT, D, DP)
    store_rows(OUT, out * D, g < G, acc, D, DP)


@triton.jit
def _add_up(PARTS, OUT, count, splits, BN: tl.constexpr, AT_ONCE: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BN + tl.arange(0, BN)
    total = tl.zeros([BN], tl.float32)
    for first in range(0, splits, AT_ONCE):  # loads that do not wait for one another
        number = first + tl.arange(0, AT_ONCE).to(tl.int64)
        real = (number < splits)[:, None] & (place < count)[None, :]
        total += tl.sum(tl.load(PARTS + number[:, None] * count + place[None, :], mask=real, other=0.0), axis=0)
    tl.store(OUT + place, total.to(OUT.dtype.element_ty), mask=place < count)


@kernel
def _add_kv_parts(
    K_PARTS, V_PARTS, DK_OUT, DV_OUT, k_count, v_count, splits, BN: tl.constexpr, AT_ONCE: tl.constexpr
):  # fmt: skip
    """DK_OUT and DV_OUT: the sums of `splits` parts of so many elements."""
    if tl.program_id(1) == 0:
        _add_up(K_PARTS, DK_OUT, k_count, splits, BN, AT_ONCE)
    else:
        _add_up(V_PARTS, DV_OUT, v_count, splits, BN, AT_ONCE)


def add_parts(parts: Sequence[Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(dk, dv) [B, T, Hkv, D] in `dtype`, from float32 parts [splits, B, T, Hkv, D]."""
    of_k, of_v = parts
    if len(of_k) == 1:
        return of_k[0].to(dtype), of_v[0].to(dtype)
    dk, dv = (x.new_empty(x.shape[1:], dtype=dtype) for x in parts)
    if of_k.numel():
        with on_device(of_k):
            most = max(dk.numel(), dv.numel())
            _add_kv_parts[cdiv(most, SUMS), 2](
                of_k, of_v, dk, dv, dk.numel(), dv.numel(), len(of_k), SUMS, PARTS_AT_ONCE
            )
    return dk, dv
