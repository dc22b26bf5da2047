"""The selected branch, backward, with the loop over blocks of keys: which queries chose this block?

A program takes up to PAIRS queries that chose one block (`inverted_index.py`) and writes a partial sum of its dk and
dv; a second kernel adds a block's partial sums in order. For small groups it writes the block's share of each query's
dq as well, since a program per query would read 16 KiB of keys and values for every 4 KiB of queries, gradients and
shares; another kernel adds the n shares. No atomics, so that it repeats bit for bit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa.geometry import Layout
from nsa.triton_backend import inverted_index, tuning
from nsa.triton_backend.launch import LOG2E, on_device, strides
from nsa.triton_backend.tile import dot, kernel, load_rows, product, spoilt, store_rows

PAIRS = 512  # queries per partial sum
MAX_GROUP = 8  # from 16 heads on, shares of dq weigh as much as the keys and values that need not travel
SCRATCH = 2**29  # elements of shares of dq that exist at a time
LAST = tl.constexpr(2**31 - 2**30)  # above any query


@kernel
def _gradients(
    Q, K, V, DO, QUERIES, SHARES, BEGIN, END, BLOCK, BLOCK_FROM, BLOCK_TO, LSE, DELTA, DK_PART, DV_PART, DQ_PART,
    q_b, q_s, q_h, k_b, k_s, k_h, v_b, v_s, v_h, S, ahead, HQ, HKV, G, max_blocks, scale, to_base_2,
    SIZE: tl.constexpr, SIZEP: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    DKP: tl.constexpr, DVP: tl.constexpr, BT: tl.constexpr, GP: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """DK_PART and DV_PART float32 [tiles, SIZE, D]; DQ_PART [shares, G, Dk], or None where dq is not wanted."""
    tile = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BN + tl.arange(0, BN)
    begin, end, number = tl.load(BEGIN + tile), tl.load(END + tile), tl.load(BLOCK + tile)
    if begin == end:
        return
    kv_row = number // max_blocks
    b, h = kv_row // HKV, kv_row % HKV
    key = tl.load(BLOCK_FROM + number % max_blocks) + place
    inside = (place < SIZE) & (key < tl.load(BLOCK_TO + number % max_blocks))
    k = load_rows(K + b * k_b + h * k_h, key * k_s, inside, DK, DKP)
    v = load_rows(V + b * v_b + h * v_h, key * v_s, inside, DV, DVP)
    if DQ_PART is not None:  # a query that does not see a key must not meet what is not finite in it
        finite_k = tl.where(spoilt(k)[:, None], 0.0, k)

    # queries ascend: only the first of them may stand inside the block, at most one per token of it
    first = begin + tl.arange(0, SIZEP)
    query = tl.load(QUERIES + first, mask=first < end, other=LAST)
    partly = tl.sum((query + ahead < tl.max(key, axis=0)).to(tl.int32), axis=0)
    whole = tl.minimum(begin + tl.cdiv(partly, BT) * BT, end)

    dk, dv = tl.zeros([BN, DKP], tl.float32), tl.zeros([BN, DVP], tl.float32)
    for stretch in tl.static_range(2):
        for at in range(begin if stretch == 0 else whole, whole if stretch == 0 else end, BT):
            pair = at + tl.arange(0, BT * GP) // GP
            g = tl.arange(0, BT * GP) % GP
            real = (pair < end) & (g < G)
            i = tl.load(QUERIES + pair, mask=real, other=0).to(tl.int64)
            row = (b * S + i) * HQ + h * G + g
            lse, delta = tl.load(LSE + row, mask=real, other=0.0), tl.load(DELTA + row, mask=real, other=0.0)
            loaded = real & (lse == lse) if stretch == 0 else real
            q = load_rows(Q + b * q_b, i * q_s + (h * G + g) * q_h, loaded, DK, DKP)
            do = load_rows(DO, row * DV, loaded, DV, DVP)
            p = tl.exp2(product(k, q) * to_base_2 - lse[None, :])  # [keys, rows]
            ds = p * (product(v, do) - delta[None, :])
            if stretch == 0:
                visible = inside[:, None] & (key[:, None] <= (i + ahead)[None, :])
                p, ds = tl.where(visible, p, 0.0), tl.where(visible, ds, 0.0)
            elif SIZE < BN:  # beyond the block p may overflow, and dq adds up over all places
                ds = tl.where(inside[:, None], ds, 0.0)
            dv = dot(p.to(do.dtype), do, dv)
            dk = dot(ds.to(q.dtype), q, dk)
            if DQ_PART is not None:
                dq = dot(tl.trans(ds.to(k.dtype)), finite_k, tl.zeros([BT * GP, DKP], tl.float32))
                share = tl.load(SHARES + pair, mask=real, other=0).to(tl.int64)
                store_rows(DQ_PART, (share * G + g) * DK, real, dq, DK, DKP)
    out = tile * SIZE + place
    store_rows(DK_PART, out * DK, place < SIZE, dk * scale, DK, DKP)
    store_rows(DV_PART, out * DV, place < SIZE, dv, DV, DVP)


@kernel
def _sum_of_keys(
    PART, FIRST_TILE, BLOCK_FROM, BLOCK_TO, OUT, T, HKV, max_blocks,
    SIZE: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BN: tl.constexpr, MORE: tl.constexpr,
):  # fmt: skip
    """OUT [B, T, Hkv, D] = the sum of each block's parts, tile after tile; `MORE` adds it to what OUT holds."""
    number, place = tl.program_id(0).to(tl.int64), tl.program_id(1) * BN + tl.arange(0, BN)
    kv_row = number // max_blocks
    key = tl.load(BLOCK_FROM + number % max_blocks) + place
    inside = (place < SIZE) & (key < tl.load(BLOCK_TO + number % max_blocks))
    out = (kv_row // HKV * T + key) * HKV + kv_row % HKV
    acc = tl.zeros([BN, DP], tl.float32)
    if MORE:
        acc += load_rows(OUT, out * D, inside, D, DP)
    for tile in range(tl.load(FIRST_TILE + number), tl.load(FIRST_TILE + number + 1)):
        acc += load_rows(PART, (tile * SIZE + place) * D, inside, D, DP)
    store_rows(OUT, out * D, inside, acc, D, DP)


@kernel
def _sum_of_queries(
    PART, BLOCKS, OUT, first_query, count, S, HQ, HKV, G, scale,
    N: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, GP: tl.constexpr,
):  # fmt: skip
    """OUT [B, S, Hq, D] = scale times the sum of the shares [B, Hkv, count, N, G, D] of the blocks of each query."""
    local, h, b = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    i, g = first_query + local, tl.arange(0, GP)
    row = ((b * HKV + h) * count + local) * N
    acc = tl.zeros([GP, DP], tl.float32)
    for slot in tl.static_range(N):
        there = (g < G) & (tl.load(BLOCKS + ((b * S + i) * HKV + h) * N + slot) >= 0)
        acc += load_rows(PART, ((row + slot) * G + g) * D, there, D, DP).to(tl.float32)
    store_rows(OUT, ((b * S + i) * HQ + h * G + g) * D, g < G, acc * scale, D, DP)


def gives_dq(q: Tensor, v: Tensor, layout: Layout) -> bool:
    """Whether dq comes from here, or faster from a program per query."""
    one_tile = layout.config.l_sel <= tuning.shape("selected_backward_kv", q, v).keys
    return one_tile and q.shape[2] // v.shape[2] <= MAX_GROUP


def gradients(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, lse: Tensor, delta: Tensor,
    block_indices: Tensor, layout: Layout, scale: float, dq: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(dk, dv), from partial sums over tiles of queries that chose the same block; dq [B, S, Hq, Dk] is written to."""
    (batch, length, heads, dk), kv_heads = q.shape, k.shape[2]
    n, group = block_indices.shape[-1], heads // kv_heads
    at_a_time = length if dq is None else max(min(SCRATCH // (batch * heads * n * dk), length), 1)
    in_one_go = at_a_time == length
    sums = [x.new_zeros(x.shape, dtype=x.dtype if in_one_go else torch.float32) for x in (k, v)]
    for first in range(0, length, at_a_time):
        count = min(at_a_time, length - first)
        shares = None if dq is None else q.new_empty(batch * kv_heads * count * n, group, dk)
        _of_keys(q, k, v, do, lse, delta, block_indices, first, count, layout, scale, sums, shares)
        if dq is not None:
            with on_device(q):
                _sum_of_queries[count, kv_heads, batch](
                    shares, block_indices, dq, first, count, length, heads, kv_heads, group, scale,
                    n, dk, tuning.padded(dk), triton.next_power_of_2(group), num_warps=2,
                )  # fmt: skip
    return sums[0].to(k.dtype), sums[1].to(v.dtype)


def _of_keys(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, lse: Tensor, delta: Tensor, block_indices: Tensor, first: int,
    count: int, layout: Layout, scale: float, sums: list[Tensor], shares: Tensor | None,
) -> None:  # fmt: skip
    """Write, or add to those of earlier queries, what these give to dk and dv, and their shares of dq."""
    (batch, length, heads, dk), (num_keys, kv_heads, dv) = q.shape, v.shape[1:]
    size, max_blocks = layout.config.l_sel, layout.max_blocks
    tiles = inverted_index.build(block_indices, layout, first, first + count, chunk=count, size=PAIRS, with_slots=False)
    block_from, block_to = layout.block_tokens

    shape = tuning.shape("selected_backward_kv", q, v)
    keys = min(tuning.padded(size), shape.keys)
    parts = [q.new_empty(tiles.begin.numel(), size, d, dtype=torch.float32) for d in (dk, dv)]
    with on_device(q):
        _gradients[tiles.begin.numel(), triton.cdiv(size, keys)](
            q, k, v, do, tiles.query, None if shares is None else tiles.pair, tiles.begin, tiles.end, tiles.cell,
            block_from, block_to, lse, delta, *parts, shares, *strides(q), *strides(k), *strides(v),
            length, num_keys - length, heads, kv_heads, heads // kv_heads, max_blocks, scale, scale * LOG2E,
            size, tuning.padded(size), dk, dv, shape.dk, shape.dv, shape.tokens, shape.group, keys, **shape.launch,
        )  # fmt: skip
        for part, out in zip(parts, sums, strict=True):
            _sum_of_keys[batch * kv_heads * max_blocks, triton.cdiv(size, keys)](
                part, tiles.first_tile, block_from, block_to, out, num_keys, kv_heads, max_blocks,
                size, out.shape[3], tuning.padded(out.shape[3]), keys, first > 0,
            )  # fmt: skip
