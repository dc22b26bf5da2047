"""The selected branch, forward, with the loop over blocks of keys: for many queries.

A program per query reads each block of its choice once more, and at 16 heads per group that is 32 KiB for every 4 KiB
of queries: the GPU's L2 cache sets the pace. Here a program keeps one block and takes the queries that chose it
(`inverted_index.py`), so that queries and partial outputs travel instead; a second kernel merges the n partial
outputs of each query. Queries are taken chunk by chunk, which bounds the buffer of partial outputs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa.geometry import Layout
from nsa.triton_backend import inverted_index, tuning
from nsa.triton_backend.launch import LOG2E, good_keys, on_device, strides
from nsa.triton_backend.tile import LN2, dot, kernel, load_rows, product, store_rows

MIN_QUERIES = 2048  # below, the sort costs more than it saves
MAX_GROUP = 8  # from 16 heads on, partial outputs weigh as much as the keys and values that need not travel
MAX_BLOCK_BYTES = 48 * 2**10  # of keys and values, which stay in shared memory
CHUNK = 32768  # queries whose partial outputs exist at a time (fewer leave tiles half empty), or fewer where they pass
SCRATCH = 2**29  # elements
INDEXED = 65536  # queries whose choice is turned around at a time
PAIRS = 128  # queries per program


@kernel
def _partial(
    Q, K, V, GOOD, QUERY_SLOT, BEGIN, END, CELL, FIRST_TILE, BLOCK_FROM, BLOCK_TO, O_PART, LSE_PART, READ_PART,
    q_b, q_s, q_h, k_b, k_s, k_h, v_b, v_s, v_h, first_cell, cells, first_query, count, ahead, T, HKV, G, max_blocks,
    to_base_2, N: tl.constexpr, SIZE: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, DKP: tl.constexpr,
    DVP: tl.constexpr, BT: tl.constexpr, GP: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """One tile of queries that chose one block: O_PART [B, Hkv, count, n, G, Dv], LSE_PART (base 2) and READ_PART."""
    tile = tl.load(FIRST_TILE + first_cell) + tl.program_id(0)
    if tile >= tl.load(FIRST_TILE + first_cell + cells):
        return
    begin, end, number = tl.load(BEGIN + tile), tl.load(END + tile), tl.load(CELL + tile) - first_cell
    kv_row, block = number // max_blocks, number % max_blocks
    b, h = kv_row // HKV, kv_row % HKV
    place = tl.arange(0, BN)
    block_from, block_to = tl.load(BLOCK_FROM + block), tl.load(BLOCK_TO + block)
    key = block_from + place
    inside = key < block_to
    k = load_rows(K + b * k_b + h * k_h, key * k_s, inside, DK, DKP)
    good = tl.load(GOOD + (b * T + key) * HKV + h, mask=inside, other=0) != 0
    v = load_rows(V + b * v_b + h * v_h, key * v_s, good, DV, DVP)
    # queries ascend: only the first of them may stand inside the block and not see the whole of it
    query = tl.load(QUERY_SLOT + begin + place, mask=begin + place < end, other=0) // N
    partly = tl.sum(((begin + place < end) & (query + ahead < tl.max(key, axis=0))).to(tl.int32), axis=0)
    whole = begin + tl.cdiv(partly, BT) * BT if BN == SIZE else end

    for stretch in tl.static_range(2):
        for at in range(begin if stretch == 0 else whole, tl.minimum(whole, end) if stretch == 0 else end, BT):
            pair = at + tl.arange(0, BT * GP) // GP
            g = tl.arange(0, BT * GP) % GP
            real = (pair < end) & (g < G)
            query_slot = tl.load(QUERY_SLOT + pair, mask=real, other=0)
            i = (query_slot // N).to(tl.int64)
            q = load_rows(Q + b * q_b, i * q_s + (h * G + g) * q_h, real, DK, DKP)
            s = tl.where(good[None, :], product(q, k), float("nan"))
            read = tl.minimum(i + ahead + 1, block_to) - block_from
            if stretch == 0:
                visible = inside[None, :] & (key[None, :] <= (i + ahead)[:, None])
                s = tl.where(visible, s, float("-inf"))
            top = tl.max(s, axis=1) * to_base_2
            p = tl.exp2(s * to_base_2 - top[:, None])
            total = tl.sum(p, axis=1)
            o = dot(p.to(v.dtype), v, tl.zeros([BT * GP, DVP], tl.float32)) * (1.0 / total)[:, None]
            row = (kv_row * count + i - first_query) * N + query_slot % N
            store_rows(O_PART, (row * G + g) * DV, real, o, DV, DVP)
            # a query that is not finite has no finite score, and its total is NaN
            tl.store(LSE_PART + row * G + g, top + tl.log2(total), mask=real)
            tl.store(READ_PART + row, read, mask=real & (g == 0))


@kernel
def _merge(
    O_PART, LSE_PART, READ_PART, BLOCKS, O, LSE, READ, first_query, count, S, HQ, HKV, G,
    N: tl.constexpr, NP: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr, GP: tl.constexpr,
):  # fmt: skip
    """The partial outputs of one query's blocks become its output."""
    local, h, b = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    i = first_query + local
    slot, g = tl.arange(0, NP), tl.arange(0, GP)
    real = g < G
    chosen = (b * S + i) * HKV + h
    taken = tl.load(BLOCKS + chosen * N + slot, mask=slot < N, other=-1) >= 0
    row = ((b * HKV + h) * count + local) * N
    lse = tl.load(LSE_PART + (row + slot[:, None]) * G + g[None, :], mask=taken[:, None] & real[None, :],
                  other=float("-inf"))  # fmt: skip
    top = tl.max(lse, axis=0)
    top = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(tl.exp2(lse - top[None, :]), axis=0)
    acc = tl.zeros([GP, DVP], tl.float32)
    for s in tl.static_range(N):
        there = real & (tl.load(BLOCKS + chosen * N + s) >= 0)
        weight = tl.exp2(tl.load(LSE_PART + (row + s) * G + g, mask=there, other=float("-inf")) - top)
        acc += weight[:, None] * load_rows(O_PART, ((row + s) * G + g) * DV, there, DV, DVP).to(tl.float32)
    something = tl.where(total == 0.0, 1.0, total)
    out = (b * S + i) * HQ + h * G + g
    store_rows(O, out * DV, real, acc * (1.0 / something)[:, None], DV, DVP)
    tl.store(LSE + out, tl.where(total == 0.0, float("-inf"), (top + tl.log2(something)) * LN2), mask=real)
    read = tl.sum(tl.load(READ_PART + row + slot, mask=taken, other=0), axis=0)
    tl.store(READ + chosen, read)


def serves(q: Tensor, v: Tensor, layout: Layout) -> bool:
    """Whether this way is the faster one."""
    many = q.shape[1] >= MIN_QUERIES and q.shape[2] // v.shape[2] <= MAX_GROUP
    shape = tuning.shape("by_block", q, v)
    block_bytes = tuning.padded(layout.config.l_sel) * (shape.dk + shape.dv) * q.element_size()
    return many and block_bytes <= MAX_BLOCK_BYTES


def forward(
    q: Tensor, k: Tensor, v: Tensor, block_indices: Tensor, layout: Layout, scale: float,
    o: Tensor, lse: Tensor, read: Tensor,
) -> None:  # fmt: skip
    """Write o [B, S, Hq, Dv], lse [B, S, Hq] and keys read [B, S, Hkv] of the selected branch."""
    (batch, length, heads, dk), (num_keys, kv_heads, dv) = q.shape, v.shape[1:]
    group, size, n, max_blocks = heads // kv_heads, layout.config.l_sel, block_indices.shape[-1], layout.max_blocks
    cells = batch * kv_heads * max_blocks  # (sequence, group, block), once more for every chunk of queries
    chunk = min(CHUNK, max(SCRATCH // (batch * heads * n * dv), 1), length)
    rows = batch * kv_heads * chunk * n
    o_part = q.new_empty(rows, group, dv)
    lse_part = q.new_empty(rows, group, dtype=torch.float32)
    read_part = q.new_empty(rows, dtype=torch.int32)
    good = good_keys(k, v)
    shape = tuning.shape("by_block", q, v)
    for start in range(0, length, INDEXED):
        end = min(start + INDEXED, length)
        tiles = inverted_index.build(block_indices, layout, start, end, chunk=chunk, size=PAIRS, with_slots=True)
        for first in range(start, end, chunk):
            count = min(chunk, end - first)
            pairs = batch * kv_heads * count * n
            with on_device(q):
                _partial[pairs // PAIRS + min(cells, pairs),](
                    q, k, v, good, tiles.query, tiles.begin, tiles.end, tiles.cell, tiles.first_tile,
                    *layout.block_tokens, o_part, lse_part, read_part, *strides(q), *strides(k), *strides(v),
                    (first - start) // chunk * cells, cells, first, count, num_keys - length, num_keys, kv_heads, group,
                    max_blocks, scale * LOG2E,
                    n, size, dk, dv, shape.dk, shape.dv, shape.tokens, shape.group, tuning.padded(size), **shape.launch,
                )  # fmt: skip
                _merge[count, kv_heads, batch](
                    o_part, lse_part, read_part, block_indices, o, lse, read, first, count, length, heads, kv_heads,
                    group, n, triton.next_power_of_2(n), dv, shape.dv, triton.next_power_of_2(group), num_warps=2,
                )  # fmt: skip
