"""Partial outputs of the selected branch by block: `selected_kv_major._forward` with Hopper's instructions.

A program keeps one block of 64 keys and values in shared memory and takes up to `PAIRS` queries that chose it, wherever
they stand (`gathered.py`), 64 rows at a time. Rows are copied two steps ahead and scores multiplied one step ahead of
their softmax and output.
"""

from __future__ import annotations

from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import jit
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from nsa.geometry import Layout
from nsa.triton_backend.hopper.gathered import ALIGNED, gather, partly_seen, queries_of, wait_for_all_but
from nsa.triton_backend.hopper.tile import (
    any_nonfinite,
    descriptor,
    descriptors,
    fetch,
    finite_keys,
    kernel,
    release,
    ring,
    store_rows,
    tile,
    wait,
    zero_rows_of,
)
from nsa.triton_backend.index import Index
from nsa.triton_backend.launch import LOG2E, strides
from nsa.triton_backend.tuning import Shape

PAIRS = 256  # queries per program


@jit
def _fetch(
    Q, rows, q_s, q_h, q_slots, q_rest_slots, slot, D: gl.constexpr, REST: gl.constexpr, layout: gl.constexpr
):  # fmt: skip
    """Begin to bring the `rows` of `queries_of` into a slot."""
    query, g, real = rows
    at = (query.to(gl.int64) * q_s + g * q_h) * ALIGNED
    gather(Q, at, real, q_slots.index(slot), layout)
    if REST > 0:
        gather(Q + D, at, real, q_rest_slots.index(slot), layout)
    async_copy.commit_group()


@jit
def _nan_rows(there, finite, layout: gl.constexpr):
    """Make keys that are not `finite` NaN: so become the scores of the queries that see them, and no others."""
    x = there.load(layout)
    there.store(gl.where(gl.expand_dims(finite, 1), x, float("nan")).to(x.dtype))


@kernel
def _forward(
    Q, K, K_REST, V, FINITE, QUERY_SLOT, BEGIN, END, CELL, FIRST_TILE, BLOCK_FROM, O_PART, LSE_PART, READ_PART,
    q_b, q_s, q_h, first_cell, cells, first_query, count, T, ahead, HKV, max_blocks, to_base_2,
    N: gl.constexpr, G: gl.constexpr, D: gl.constexpr, REST: gl.constexpr, ROWS: gl.constexpr, BN: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """O_PART [B, Hkv, count, n, G, Dv], LSE_PART (base 2) and READ_PART of up to PAIRS queries that chose one block."""
    WARPS: gl.constexpr = gl.num_warps()
    gl.static_assert(ROWS == 16 * WARPS, "a warpgroup takes 64 rows")
    gl.static_assert(STAGES > 1, "the next queries are waited for before these are given back")
    of_s: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BN, 16])  # [rows, keys]
    of_o: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, D, 16])  # [rows, channels]
    of_p: gl.constexpr = gl.DotOperandLayout(0, of_o, 2)
    flat: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])  # as memory is read
    # As memory is written: a warp has the 16 rows that it has of a product, so that no other one is waited for.
    gl.static_assert(WARPS == 4 and D == 128, "the sides of this layout")
    of_out: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [8, 0], [0, 32], [0, 64]],
        [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]],
        [],
        [ROWS, D],
    )

    part = gl.load(FIRST_TILE + first_cell) + gl.program_id(0)
    if part >= gl.load(FIRST_TILE + first_cell + cells):
        return
    begin, end, cell = gl.load(BEGIN + part), gl.load(END + part), gl.load(CELL + part) - first_cell
    if begin == end:
        return
    kv_row, block = (cell // max_blocks).to(gl.int32), cell % max_blocks
    b, h = kv_row // HKV, kv_row % HKV
    block_from = gl.load(BLOCK_FROM + block).to(gl.int32)
    k_slot, k_full = ring(K, 1)
    v_slot, v_full = ring(V, 1)
    fetch(K, b, block_from, h, k_slot, k_full, 0, 1, True)
    fetch(V, b, block_from, h, v_slot, v_full, 0, 1, True)
    if REST > 0:
        k_rest_slot, k_rest_full = ring(K_REST, 1)
        fetch(K_REST, b, block_from, h, k_rest_slot, k_rest_full, 0, 1, True)

    pairs, pairs_base = (end - begin).to(gl.int32), QUERY_SLOT + begin
    q_base, first_row = Q + (b.to(gl.int64) * q_b + h * G * q_h) * ALIGNED, kv_row.to(gl.int64) * count * N
    o_base, lse_base, read_base = O_PART + first_row * G * D, LSE_PART + first_row * G, READ_PART + first_row
    of_tile: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, D], Q.dtype.element_ty)
    q_slots = gl.allocate_shared_memory(Q.dtype.element_ty, [STAGES, ROWS, D], of_tile)
    q_rest_slots = q_slots  # where there are none, nobody asks for them
    if REST > 0:
        of_rest: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, REST], Q.dtype.element_ty)
        q_rest_slots = gl.allocate_shared_memory(Q.dtype.element_ty, [STAGES, ROWS, REST], of_rest)

    to_own = (ahead + 1 - block_from).to(gl.int32)  # query i sees the first i + to_own keys of the block
    partly = partly_seen(pairs_base, pairs, to_own, N, BN, gl.BlockedLayout([1], [32], [WARPS], [0]))
    tiles, masked = gl.cdiv(pairs * G, ROWS), gl.cdiv(partly * G, ROWS)
    for number in gl.static_range(STAGES):
        rows = queries_of(pairs_base, number, pairs, N, G, ROWS, gl.SliceLayout(1, flat))
        _fetch(q_base, rows, q_s, q_h, q_slots, q_rest_slots, number, D, REST, flat)
    # which queries come next is known one tile ahead: what is copied depends on it
    rows = queries_of(pairs_base, STAGES, pairs, N, G, ROWS, gl.SliceLayout(1, flat))

    k, v = tile(k_slot, 0, 1), tile(v_slot, 0, 1)
    wait(k_full, 0, 1)
    wait(v_full, 0, 1)
    if REST > 0:
        k_rest = tile(k_rest_slot, 0, 1)
        wait(k_rest_full, 0, 1)
    finite_base = FINITE + (b.to(gl.int64) * T * HKV + h)
    finite = finite_keys(finite_base, HKV, block_from, T, BN, gl.SliceLayout(1, flat))
    if any_nonfinite(finite):
        _nan_rows(k, finite, flat)
        if REST > 0:
            _nan_rows(k_rest, finite, flat)
        zero_rows_of(v, finite, flat)
    nothing, no_o = gl.zeros([ROWS, BN], gl.float32, of_s), gl.zeros([ROWS, D], gl.float32, of_o)
    key = gl.expand_dims(gl.arange(0, BN, gl.SliceLayout(0, of_s)), 0)
    wait_for_all_but(STAGES - 1)
    s = warpgroup_mma(q_slots.index(0), k.permute((1, 0)), nothing, use_acc=False)
    if REST > 0:
        s = warpgroup_mma(q_rest_slots.index(0), k_rest.permute((1, 0)), s)
    for stretch in gl.static_range(2):
        for number in range(0 if stretch == 0 else masked, masked if stretch == 0 else tiles):
            wait_for_all_but(STAGES - 2)
            next_slot = (number + 1) % STAGES  # behind the last tile: zeros
            keys = k.permute((1, 0))
            scores = warpgroup_mma(q_slots.index(next_slot), keys, nothing, use_acc=False, is_async=True)
            if REST > 0:
                keys_rest = k_rest.permute((1, 0))
                scores = warpgroup_mma(q_rest_slots.index(next_slot), keys_rest, scores, is_async=True)
            row = number * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, of_s))
            real, g = row // G < pairs, row % G
            query_slot = gl.load(pairs_base + row // G, mask=real, other=0)
            _fetch(q_base, rows, q_s, q_h, q_slots, q_rest_slots, number % STAGES, D, REST, flat)
            rows = queries_of(pairs_base, number + STAGES + 1, pairs, N, G, ROWS, gl.SliceLayout(1, flat))
            read = gl.minimum(query_slot // N + to_own, BN)
            if stretch == 0:
                s = gl.where(key < gl.expand_dims(read, 1), s, float("-inf"))
            # no running softmax: the tile has all keys of the block, and a query sees the first of them, so that l > 0
            m = gl.max(s, 1) * to_base_2
            p = gl.exp2(s * to_base_2 - gl.expand_dims(m, 1))
            l = gl.sum(p, 1)
            p_16 = gl.convert_layout(p.to(Q.dtype.element_ty), of_p)
            sums = warpgroup_mma(p_16, v, no_o, use_acc=False, is_async=True)
            slot_in_chunk = query_slot - first_query * N
            out = slot_in_chunk * G + g
            # a query that is not finite has no finite score, and its l is NaN
            gl.store(lse_base + out, m + gl.log2(l), mask=real)
            gl.store(read_base + slot_in_chunk, read, mask=real & (g == 0))
            factor = gl.expand_dims(gl.convert_layout(1.0 / l, gl.SliceLayout(1, of_o)), 1)
            o, s = warpgroup_mma_wait(0, deps=[sums, scores])
            at = gl.convert_layout(out * D, gl.SliceLayout(1, of_out))
            there = gl.convert_layout(real, gl.SliceLayout(1, of_out))
            store_rows(o_base, at, there, o * factor, D, of_out)
    async_copy.wait_group(0)
    release(k_full, 1)
    release(v_full, 1)
    if REST > 0:
        release(k_rest_full, 1)


def forward(
    q: Tensor, k: Tensor, v: Tensor, finite: Tensor, n: int, tiles: Index, layout: Layout, grid: tuple[int],
    first_cell: int, cells: int, first: int, count: int, parts: tuple[Tensor, Tensor, Tensor], scale: float,
    shape: Shape,
) -> None:  # fmt: skip
    """Write the `parts` o [B, Hkv, count, n, G, Dv], lse (base 2) and keys read of `count` queries from the `first` on,
    of which each chose n blocks: the tiles of `cells` cells from `first_cell` on, as many as `grid` has at most.

    `shape` is that of "hopper.selected_kv_major".
    """
    (_, length, heads, dk), (num_keys, num_kv_heads, d) = q.shape, v.shape[1:]
    steps = [step // ALIGNED.value for step in strides(q)]
    _forward[grid](
        q, *descriptors(k, shape.keys), descriptor(v, shape.keys), finite, tiles.query_slot, tiles.begin, tiles.end,
        tiles.cell, tiles.first_tile, layout.block_tokens[0], *parts, *steps, first_cell, cells, first, count,
        num_keys, num_keys - length, num_kv_heads, layout.max_blocks, scale * LOG2E,
        n, heads // num_kv_heads, d, dk - d, shape.rows, shape.keys, shape.num_stages, **shape.launch,
    )  # fmt: skip
