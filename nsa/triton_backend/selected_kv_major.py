"""The selected branch with the loop over blocks of keys (KV-stationary): which queries chose this block?

`selected.py` gives each query a program, which reads each block of its choice once more: at 16 heads per group that is
32 KiB for every 4 KiB of queries, and the throughput of the GPU's L2 cache is the limit. Here a program keeps one block
and takes the queries that chose it (`index.py`), so that queries and partial outputs travel instead.

Forward: a second kernel merges the n partial outputs of each query. Queries are taken chunk by chunk, which bounds the
buffer of partial outputs. Backward: a program takes up to BACKWARD_PAIRS queries that chose one block and writes a
partial sum of its dk and dv; a second kernel adds a block's partial sums in order. Where it serves dq as well, it
writes the block's part of each query's dq, since a program per query would read 16 KiB of keys and values for every
4 KiB of queries, gradients and partial dq; another kernel adds a query's n parts. No atomics, so that it repeats bit
for bit. Which calls come here: `dispatch.py`.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from nsa.geometry import Layout
from nsa.triton_backend import hopper, index, tuning
from nsa.triton_backend.dispatch import SelectionBlocks, Variant, readable_by_tma, variant
from nsa.triton_backend.index import Index
from nsa.triton_backend.intervals import masked_pair
from nsa.triton_backend.launch import LOG2E, finite_keys, strides
from nsa.triton_backend.launching.lanes import QUERIES, join
from nsa.triton_backend.launching.relaunch import on_device
from nsa.triton_backend.partial_sums import KEYS_OF_SUM, TILES_AT_ONCE, merge_blocks, sum_dkdv, sum_dq
from nsa.triton_backend.tile import (
    dot,
    kernel,
    load_rows,
    nonfinite,
    per_key,
    per_row,
    product,
    rows_of,
    scores_of,
    store_rows,
    transposed,
)
from nsa.triton_backend.tuning import cdiv, next_power_of_2

CHUNK = 32768  # queries whose partial outputs exist at a time (fewer leave tiles half empty), or fewer where they pass
# elements of partial outputs, and of partial dq, that exist at a time; offsets among them have 32 bits
FORWARD_SCRATCH = 2**29
BACKWARD_SCRATCH = 2**29
INDEXED = 65536  # queries of which an inverted index exists at a time
FORWARD_PAIRS = 128  # queries per program
BACKWARD_PAIRS = 512  # queries per partial sum


@kernel
def _forward(
    Q, K, V, FINITE, QUERY_SLOT, BEGIN, END, CELL, FIRST_TILE, BLOCK_FROM, BLOCK_TO, O_PART, LSE_PART, READ_PART,
    q_b, q_s, q_h, k_b, k_s, k_h, v_b, v_s, v_h, first_cell, cells, first_query, count, ahead, T, HKV, G, max_blocks,
    to_base_2, N: tl.constexpr, SIZE: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, DKP: tl.constexpr,
    DVP: tl.constexpr, ROWS: tl.constexpr, GP: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """One tile of queries that chose one block: O_PART [B, Hkv, count, n, G, Dv], LSE_PART (base 2) and READ_PART."""
    BT: tl.constexpr = ROWS // GP
    tile = tl.load(FIRST_TILE + first_cell) + tl.program_id(0)
    if tile >= tl.load(FIRST_TILE + first_cell + cells):
        return
    begin, end, number = tl.load(BEGIN + tile), tl.load(END + tile), tl.load(CELL + tile) - first_cell
    if begin == end:
        return
    kv_row, block = number // max_blocks, number % max_blocks
    b, h = kv_row // HKV, kv_row % HKV
    place = tl.arange(0, BN)
    block_from, block_to = tl.load(BLOCK_FROM + block), tl.load(BLOCK_TO + block)
    key = block_from + place
    finite = tl.load(FINITE + (b * T + key) * HKV + h, mask=key < block_to, other=0) != 0
    # a key that is not finite makes the scores NaN of the queries that see it, and of no other
    k = tl.where(finite[:, None], load_rows(K + b * k_b + h * k_h, key * k_s, finite, DK, DKP), float("nan"))
    v = load_rows(V + b * v_b + h * v_h, key * v_s, finite, DV, DVP)
    # 32 bits from here on: indices of 64 cost the registers of a third program on the SM. Query i sees the first
    # i + to_own of the block's `size` keys.
    size, to_own = (block_to - block_from).to(tl.int32), (ahead + 1 - block_from).to(tl.int32)
    PAIRS, pairs = QUERY_SLOT + begin, (end - begin).to(tl.int32)
    first_row = kv_row * count * N
    # queries ascend: only the first of them may stand inside the block and not see the whole of it
    query = tl.load(PAIRS + place, mask=place < pairs, other=0) // N
    partly = tl.sum(((place < pairs) & (query + to_own < BN)).to(tl.int32), axis=0)
    whole = tl.cdiv(partly, BT) * BT if BN == SIZE else pairs

    for stretch in tl.static_range(2):
        start = 0 if stretch == 0 else whole
        stop = tl.minimum(whole, pairs) if stretch == 0 else pairs
        pair, g, real = rows_of(start, pairs, G, ROWS, GP)
        query_slot = tl.load(PAIRS + pair.to(tl.int32), mask=real, other=0)
        for at in range(start, stop, BT):
            pair, g, real = rows_of(at, pairs, G, ROWS, GP)
            later = pair.to(tl.int32) + BT  # prefetched one step ahead: what is loaded next depends on it
            next_query_slot = tl.load(PAIRS + later, mask=real & (later < pairs), other=0)
            i = query_slot // N
            q = load_rows(Q + b * q_b + h * G * q_h, i.to(tl.int64) * q_s + g * q_h, real, DK, DKP)
            s = product(q, k)
            read = tl.minimum(i + to_own, size)
            if stretch == 0:
                s = tl.where(place[None, :] < read[:, None], s, float("-inf"))
            # no running softmax: the tile has all keys of the block, and a query sees the first of them, so that l > 0
            m = tl.max(s, axis=1) * to_base_2
            p = tl.exp2(s * to_base_2 - m[:, None])
            l = tl.sum(p, axis=1)
            o = dot(p.to(v.dtype), v, tl.zeros([ROWS, DVP], tl.float32)) * (1.0 / l)[:, None]
            slot_in_chunk = query_slot - first_query * N
            row = slot_in_chunk * G + g
            store_rows(O_PART + first_row * G * DV, row * DV, real, o, DV, DVP)
            # a query that is not finite has no finite score, and its l is NaN
            tl.store(LSE_PART + first_row * G + row, m + tl.log2(l), mask=real)
            tl.store(READ_PART + first_row + slot_in_chunk, read, mask=real & (g == 0))
            query_slot = next_query_slot


def forward(
    q: Tensor, k: Tensor, v: Tensor, block_indices: Tensor, layout: Layout, scale: float, finite: Tensor | None,
    o: Tensor, lse: Tensor, read: Tensor, whole: tuple[Tensor, Tensor, Tensor, Tensor] | None, blocks: SelectionBlocks,
) -> None:  # fmt: skip
    """Write o [B, S, Hq, Dv], lse [B, S, Hq] and keys read [B, S, Hkv] of the selected branch.

    Of a `whole` call (o_cmp, o_win, gates, sum), all contiguous, the gated sum of the branches is written too. `blocks`
    are those that `selected.forward` chose the kernel by.
    """
    (batch, length, heads, _), (num_kv_heads, dv) = q.shape, v.shape[2:]
    group, n = heads // num_kv_heads, block_indices.shape[-1]
    cells = batch * num_kv_heads * layout.max_blocks  # (sequence, group, block), once more for every chunk of queries
    chunk = min(CHUNK, max(FORWARD_SCRATCH // (batch * heads * n * dv), 1), length)
    rows = batch * num_kv_heads * chunk * n
    parts = (
        q.new_empty(rows, group, dv),
        q.new_empty(rows, group, dtype=torch.float32),
        q.new_empty(rows, dtype=torch.int32),
    )
    finite = finite_keys(k, v) if finite is None else finite
    on_hopper = variant("selected_kv_major", q, k, v, blocks) is Variant.HOPPER
    pairs = hopper.selected_kv_major.PAIRS if on_hopper else FORWARD_PAIRS
    padded_dv = tuning.shape("selected_kv_major", q, v).dv
    for start in range(0, length, INDEXED):
        end = min(start + INDEXED, length)
        tiles = index.build(block_indices, layout, start, end, chunk=chunk, size=pairs)
        for first in range(start, end, chunk):
            count, first_cell = min(chunk, end - first), (first - start) // chunk * cells
            _forward_chunk(q, k, v, finite, tiles, layout, first_cell, cells, n, first, count, parts, scale, on_hopper)
            with on_device(q):
                merge_blocks[count, num_kv_heads, batch](
                    *parts, block_indices, o, lse, read, *(whole or 4 * (None,)),
                    first, count, length, heads, num_kv_heads, group,
                    n, next_power_of_2(n), dv, padded_dv, next_power_of_2(group), num_warps=2,
                )  # fmt: skip


def _forward_chunk(
    q: Tensor, k: Tensor, v: Tensor, finite: Tensor, tiles: Index, layout: Layout, first_cell: int, cells: int, n: int,
    first: int, count: int, parts: tuple[Tensor, Tensor, Tensor], scale: float, on_hopper: bool,
) -> None:  # fmt: skip
    """Write the `parts` o, lse and keys read of `count` queries, whose `cells` cells begin at `first_cell`."""
    (batch, length, heads, dk), (num_keys, num_kv_heads, dv) = q.shape, v.shape[1:]
    grid, size = (tiles.most_tiles(cells, batch * num_kv_heads * count * n),), layout.config.l_sel
    shape = tuning.shape("hopper.selected_kv_major" if on_hopper else "selected_kv_major", q, v)
    with on_device(q):
        if on_hopper:
            hopper.selected_kv_major.forward(
                q, k, v, finite, n, tiles, layout, grid, first_cell, cells, first, count, parts, scale, shape
            )
        else:
            _forward[grid](
                q, k, v, finite, tiles.query_slot, tiles.begin, tiles.end, tiles.cell, tiles.first_tile,
                *layout.block_tokens, *parts, *strides(q), *strides(k), *strides(v),
                first_cell, cells, first, count, num_keys - length, num_keys, num_kv_heads, heads // num_kv_heads,
                layout.max_blocks, scale * LOG2E,
                n, size, dk, dv, shape.dk, shape.dv, shape.rows, shape.group, tuning.padded(size), **shape.launch,
            )  # fmt: skip


@kernel
def _backward(
    Q, K, V, DO, QUERY_SLOT, BEGIN, END, BLOCK, BLOCK_FROM, BLOCK_TO, LSE, DELTA, DK_PART, DV_PART, DQ_PART,
    q_b, q_s, q_h, k_b, k_s, k_h, v_b, v_s, v_h, first_query, count, S, ahead, HQ, HKV, G, max_blocks, scale, to_base_2,
    N: tl.constexpr, SIZE: tl.constexpr, SIZEP: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    DKP: tl.constexpr, DVP: tl.constexpr, ROWS: tl.constexpr, GP: tl.constexpr, BN: tl.constexpr,
    ROWS_FIRST: tl.constexpr,
):  # fmt: skip
    """DK_PART and DV_PART float32 [tiles, SIZE, D]; DQ_PART [B, Hkv, count, n, G, Dk], or None where no
    dq is wanted."""
    BT: tl.constexpr = ROWS // GP
    # The next queries, as in `_forward`. Beside dq and keys first no registers are left for it: 7 % slower.
    PREFETCH: tl.constexpr = ROWS_FIRST or DQ_PART is None
    tile = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BN + tl.arange(0, BN)
    begin, end, number = tl.load(BEGIN + tile), tl.load(END + tile), tl.load(BLOCK + tile)
    if begin == end:
        return
    kv_row = number // max_blocks
    b, h = kv_row // HKV, kv_row % HKV
    block_from, block_to = tl.load(BLOCK_FROM + number % max_blocks), tl.load(BLOCK_TO + number % max_blocks)
    key, inside = block_from + place, place < block_to - block_from
    k = load_rows(K + b * k_b + h * k_h, key * k_s, inside, DK, DKP)
    v = load_rows(V + b * v_b + h * v_h, key * v_s, inside, DV, DVP)
    if DQ_PART is not None:  # a query that does not see a key must not meet what is not finite in it
        finite_k = tl.where(nonfinite(k)[:, None], 0.0, k)

    # 32 bits from here on, as in `_forward`
    size, to_own = (block_to - block_from).to(tl.int32), (ahead + 1 - block_from).to(tl.int32)
    pairs = (end - begin).to(tl.int32)
    PAIRS = QUERY_SLOT + begin
    first_head, first_row = h * G, b * S * HQ + h * G
    # queries ascend: only the first of them may stand inside the block, at most one per token of it
    first = tl.arange(0, SIZEP)
    query = tl.load(PAIRS + first, mask=first < pairs, other=0) // N
    partly = tl.sum(((first < pairs) & (query + to_own <= tl.max(place, axis=0))).to(tl.int32), axis=0)
    whole = tl.minimum(tl.cdiv(partly, BT) * BT, pairs)

    dk, dv = tl.zeros([BN, DKP], tl.float32), tl.zeros([BN, DVP], tl.float32)
    # Counted in 64 bits, and from tl.minimum(pairs, 0), which is 0 but no constant to the compiler: else it moves dk
    # and dv between the products that add to them, and ptxas serialises these (C7515), an eighth slower.
    for stretch in tl.static_range(2):
        start = tl.minimum(pairs, 0) if stretch == 0 else whole
        stop = whole if stretch == 0 else pairs
        if PREFETCH:
            pair, g, real = rows_of(start, pairs, G, ROWS, GP)
            query_slot = tl.load(PAIRS + pair.to(tl.int32), mask=real, other=0)
        for at in range(tl.cast(start, tl.int64), tl.cast(stop, tl.int64), BT):
            pair, g, real = rows_of(tl.cast(at, tl.int32), pairs, G, ROWS, GP)
            if PREFETCH:
                later = pair.to(tl.int32) + BT
                next_query_slot = tl.load(PAIRS + later, mask=real & (later < pairs), other=0)
            else:
                query_slot = tl.load(PAIRS + pair.to(tl.int32), mask=real, other=0)
            i = query_slot // N
            row = i.to(tl.int64) * HQ + g
            lse = tl.load(LSE + first_row + row, mask=real, other=0.0)
            delta = tl.load(DELTA + first_row + row, mask=real, other=0.0)
            loaded = real & (lse == lse) if stretch == 0 else real  # an lse of NaN: `launch.backward_rows`
            q = load_rows(Q + b * q_b + first_head * q_h, i.to(tl.int64) * q_s + g * q_h, loaded, DK, DKP)
            do = load_rows(DO + first_row * DV, row * DV, loaded, DV, DVP)
            p = tl.exp2(scores_of(q, k, ROWS_FIRST) * to_base_2 - per_row(lse, ROWS_FIRST))
            ds = p * (scores_of(do, v, ROWS_FIRST) - per_row(delta, ROWS_FIRST))
            if stretch == 0:
                seen_to = per_row(tl.where(real, tl.minimum(i + to_own, size), 0), ROWS_FIRST)
                p, ds = masked_pair(p, ds, per_key(place, ROWS_FIRST), 0, seen_to, ROWS_FIRST)
            elif SIZE < BN:  # beyond the block p may overflow, and dq adds up over all places
                ds = tl.where(per_key(inside, ROWS_FIRST), ds, 0.0)
            dv = dot(transposed(p.to(do.dtype), ROWS_FIRST), do, dv)
            dk = dot(transposed(ds.to(q.dtype), ROWS_FIRST), q, dk)
            if DQ_PART is not None:
                dq = dot(transposed(ds.to(k.dtype), not ROWS_FIRST), finite_k, tl.zeros([ROWS, DKP], tl.float32))
                # written where its query and slot stand, so that `sum_dq` adds in the order of the choice
                slot_in_chunk = query_slot - first_query * N
                store_rows(DQ_PART + kv_row * count * N * G * DK, (slot_in_chunk * G + g) * DK, real, dq, DK, DKP)
            if PREFETCH:
                query_slot = next_query_slot
    out = tile * SIZE + place
    store_rows(DK_PART, out * DK, place < SIZE, dk * scale, DK, DKP)
    store_rows(DV_PART, out * DV, place < SIZE, dv, DV, DVP)


def backward(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, lse: Tensor, delta: Tensor,
    block_indices: Tensor, layout: Layout, scale: float, dq: Tensor | None, more_dq: tuple[Tensor, Tensor] | None,
    wide: bool, blocks: SelectionBlocks,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(dk, dv), from partial sums over tiles of queries that chose the same block; dq [B, S, Hq, Dk] is written to.

    `more_dq`, contiguous and of that shape, are added to it. `wide` leaves dk and dv in float32. `blocks` are those
    that `selected.gradients` chose the kernel by.
    """
    (batch, length, heads, dk), num_kv_heads = q.shape, k.shape[2]
    n, group = block_indices.shape[-1], heads // num_kv_heads
    at_a_time = length if dq is None else max(min(BACKWARD_SCRATCH // (batch * heads * n * dk), length), 1)
    narrow = at_a_time == length and not wide
    # each key stands in a block, so that each row is written
    sums = [x.new_empty(x.shape, dtype=x.dtype if narrow else torch.float32) for x in (k, v)]
    # once for all chunks: while a second one is made, the first would still be held
    dq_part = None if dq is None else q.new_empty(batch * num_kv_heads * at_a_time * n, group, dk)
    on_hopper = variant("selected_backward_kv", q, k, v, blocks) is Variant.HOPPER and readable_by_tma(do)
    for first in range(0, length, at_a_time):
        count = min(at_a_time, length - first)
        _backward_chunk(q, k, v, do, lse, delta, block_indices, first, count, layout, scale, sums, dq_part, on_hopper)
        if dq is not None:
            join(QUERIES)  # which those of the other branches come from
            with on_device(q):
                sum_dq[count, num_kv_heads, batch](
                    dq_part, block_indices, *(more_dq or 2 * (None,)), dq,
                    first, count, length, heads, num_kv_heads, group, scale,
                    n, dk, tuning.padded(dk), next_power_of_2(group), num_warps=2,
                )  # fmt: skip
    return (sums[0], sums[1]) if wide else (sums[0].to(k.dtype), sums[1].to(v.dtype))


def _backward_chunk(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, lse: Tensor, delta: Tensor, block_indices: Tensor, first: int,
    count: int, layout: Layout, scale: float, sums: list[Tensor], dq_part: Tensor | None,
    on_hopper: bool,
) -> None:  # fmt: skip
    """Write, or add to those of earlier queries, what these give to dk and dv, and their partial dq."""
    (batch, length, heads, dk), (num_keys, num_kv_heads, dv) = q.shape, v.shape[1:]
    size, max_blocks = layout.config.l_sel, layout.max_blocks
    tiles = index.build(block_indices, layout, first, first + count, chunk=count, size=BACKWARD_PAIRS)
    block_from, block_to = layout.block_tokens

    shape = tuning.shape("hopper.selected_backward_kv" if on_hopper else "selected_backward_kv", q, v)
    keys = min(tuning.padded(size), shape.keys)
    parts = [q.new_empty(tiles.begin.numel(), size, d, dtype=torch.float32) for d in (dk, dv)]
    # Where dq is made for some queries at a time, most blocks have one tile of them, and the kernel adds its dk and dv
    # to those of earlier queries itself. With keys of 192 channels registers would be spilled: 48/8 heads of 192/128
    # took 2.5 % longer at 16k (H200). Heads of 64 were not measured.
    added = on_hopper and dq_part is not None and sums[0].dtype == torch.float32 and dk == hopper.CHANNELS
    with on_device(q):
        if on_hopper:
            hopper.selected_keys_and_values.backward(
                q, k, v, do, lse, delta, block_indices.shape[-1], tiles, layout, first, count, parts, dq_part,
                sums if added else (None, None), scale, shape,
            )  # fmt: skip
        else:
            _backward[tiles.begin.numel(), cdiv(size, keys)](
                q, k, v, do, tiles.query_slot, tiles.begin, tiles.end, tiles.cell,
                block_from, block_to, lse, delta, *parts, dq_part, *strides(q), *strides(k), *strides(v), first, count,
                length, num_keys - length, heads, num_kv_heads, heads // num_kv_heads, max_blocks, scale, scale * LOG2E,
                block_indices.shape[-1], size, tuning.padded(size), dk, dv,
                shape.dk, shape.dv, shape.rows, shape.group, keys, shape.rows_first, **shape.launch,
            )  # fmt: skip
        sum_dkdv[batch * num_kv_heads * max_blocks, cdiv(size, KEYS_OF_SUM), 2](
            *parts, tiles.first_tile, tiles.begin, tiles.end, block_from, block_to, *sums, num_keys, num_kv_heads,
            max_blocks,
            size, dk, dv, tuning.padded(dk), tuning.padded(dv), KEYS_OF_SUM, first > 0, added, TILES_AT_ONCE,
        )  # fmt: skip
