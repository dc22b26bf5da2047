"""dk, dv and partial dq of the selected branch: `selected_kv_major._backward` with Hopper's instructions.

A program keeps one block of 64 keys and values in shared memory and takes up to `BACKWARD_PAIRS` queries that chose it,
wherever they stand (`gathered.py`). The loop is that of `keys_and_values._backward`.
"""

from __future__ import annotations

from collections.abc import Sequence

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
    kernel,
    load_rows,
    nonfinite,
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


@jit
def _fetch(
    of_rows, of_numbers, Q, DO, LSE, DELTA, q_s, q_h, HQ, q_slots, q_rest_slots, do_slots, lse_slots, delta_slots,
    slot, D: gl.constexpr, REST: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """Begin to bring a tile into a slot: of `queries_of`, in the layout of its rows and in that of a number per row."""
    query, g, real = of_rows
    row_query, row_g, row_real = of_numbers
    at_q, row = (query.to(gl.int64) * q_s + g * q_h) * ALIGNED, query.to(gl.int64) * HQ + g
    at_number = row_query.to(gl.int64) * HQ + row_g
    gather(Q, at_q, real, q_slots.index(slot), layout)
    if REST > 0:
        gather(Q + D, at_q, real, q_rest_slots.index(slot), layout)
    gather(DO, row * D, real, do_slots.index(slot), layout)
    async_copy.async_copy_global_to_shared(lse_slots.index(slot), LSE + at_number, row_real)
    async_copy.async_copy_global_to_shared(delta_slots.index(slot), DELTA + at_number, row_real)
    async_copy.commit_group()


@jit
def _zero_nonfinite_rows(there, layout: gl.constexpr):
    """Zero keys that are not finite: 0 · NaN would reach dq of queries that do not see them. Queries that do see them
    have an lse of NaN."""
    finite = ~nonfinite(there.load(layout))
    if any_nonfinite(finite):
        zero_rows_of(there, finite, layout)


@jit
def _keys_of(cell, place, BLOCK_FROM, BLOCK_TO, T, HKV, max_blocks):
    """(rows of [B, T, Hkv], whether there is one) of a cell's keys."""
    kv_row, key = cell // max_blocks, gl.load(BLOCK_FROM + cell % max_blocks) + place
    return (kv_row // HKV * T + key) * HKV + kv_row % HKV, key < gl.load(BLOCK_TO + cell % max_blocks)


@jit
def _write(
    DK, DV, row, inside, dk, dv, MORE: gl.constexpr, D: gl.constexpr, REST: gl.constexpr, layout: gl.constexpr
):  # fmt: skip
    """Write D channels of dk and dv to these rows, added to what stands there if `MORE`."""
    if MORE:
        dk = load_rows(DK, row * (D + REST), inside, D, layout) + gl.convert_layout(dk, layout)
    store_rows(DK, row * (D + REST), inside, dk, D, layout)
    if MORE:
        dv = load_rows(DV, row * D, inside, D, layout) + gl.convert_layout(dv, layout)
    store_rows(DV, row * D, inside, dv, D, layout)


@kernel
def _backward(
    Q, K, K_REST, V, DO, QUERY_SLOT, BEGIN, END, CELL, FIRST_TILE, BLOCK_FROM, BLOCK_TO, LSE, DELTA, DK_PART, DV_PART,
    DQ_PART, DK_SUM, DV_SUM, q_b, q_s, q_h, first_query, count, S, T, ahead, HQ, HKV, max_blocks, scale, to_base_2,
    N: gl.constexpr, G: gl.constexpr, D: gl.constexpr, REST: gl.constexpr, ROWS: gl.constexpr, BN: gl.constexpr,
    STAGES: gl.constexpr, MORE: gl.constexpr,
):  # fmt: skip
    """DK_PART and DV_PART float32 [tiles, BN, D]; DQ_PART [B, Hkv, count, n, G, Dk], or None where no dq is wanted.

    DK_SUM and DV_SUM float32 [B, T, Hkv, D], if not None, get the part of each block's first tile in its place, added
    to what they hold if `MORE`.
    """
    WARPS: gl.constexpr = gl.num_warps()
    gl.static_assert(BN == 16 * WARPS, "a warpgroup takes 64 keys")
    gl.static_assert(STAGES > 1, "the next queries are waited for before these are given back")
    of_s: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, ROWS, 16])  # [keys, rows]
    of_k: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, D, 16])  # [keys, channels]
    of_p: gl.constexpr = gl.DotOperandLayout(0, of_k, 2)
    flat: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])  # as memory is read and written
    of_row: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    of_dq: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, ROWS, 16])  # [channels, rows]

    part = gl.program_id(0)
    begin, end, cell = gl.load(BEGIN + part), gl.load(END + part), gl.load(CELL + part)
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
    q_base, rows_base = Q + (b.to(gl.int64) * q_b + h * G * q_h) * ALIGNED, b.to(gl.int64) * S * HQ + h * G
    do_base, lse_base, delta_base = DO + rows_base * D, LSE + rows_base, DELTA + rows_base
    if DQ_PART is not None:
        dq_base = DQ_PART + kv_row.to(gl.int64) * count * (N * G * (D + REST))
    of_tile: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, D], Q.dtype.element_ty)
    one_per_row: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    q_slots = gl.allocate_shared_memory(Q.dtype.element_ty, [STAGES, ROWS, D], of_tile)
    do_slots = gl.allocate_shared_memory(Q.dtype.element_ty, [STAGES, ROWS, D], of_tile)
    lse_slots = gl.allocate_shared_memory(gl.float32, [STAGES, ROWS], one_per_row)
    delta_slots = gl.allocate_shared_memory(gl.float32, [STAGES, ROWS], one_per_row)
    q_rest_slots = q_slots  # where there are none, nobody asks for them
    if REST > 0:
        of_rest: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, REST], Q.dtype.element_ty)
        q_rest_slots = gl.allocate_shared_memory(Q.dtype.element_ty, [STAGES, ROWS, REST], of_rest)

    to_own = ahead + 1 - block_from  # query i sees the first i + to_own keys of the block
    partly = partly_seen(pairs_base, pairs, to_own, N, BN, of_row)
    tiles, masked = gl.cdiv(pairs * G, ROWS), gl.cdiv(partly * G, ROWS)

    for number in gl.static_range(STAGES):
        of_rows = queries_of(pairs_base, number, pairs, N, G, ROWS, gl.SliceLayout(1, flat))
        of_numbers = queries_of(pairs_base, number, pairs, N, G, ROWS, of_row)
        _fetch(
            of_rows, of_numbers, q_base, do_base, lse_base, delta_base, q_s, q_h, HQ, q_slots, q_rest_slots, do_slots,
            lse_slots, delta_slots, number, D, REST, flat,
        )  # fmt: skip

    key = gl.expand_dims(gl.arange(0, BN, gl.SliceLayout(1, of_s)), 1)
    k, v = tile(k_slot, 0, 1), tile(v_slot, 0, 1)
    dk, dv = gl.zeros([BN, D], gl.float32, of_k), gl.zeros([BN, D], gl.float32, of_k)
    nothing = gl.zeros([BN, ROWS], gl.float32, of_s)
    wait(k_full, 0, 1)
    wait(v_full, 0, 1)
    wait_for_all_but(STAGES - 1)
    if REST > 0:
        of_k_rest: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, REST, 16])
        k_rest, dk_rest = tile(k_rest_slot, 0, 1), gl.zeros([BN, REST], gl.float32, of_k_rest)
        wait(k_rest_full, 0, 1)
    if DQ_PART is not None:
        of_ds: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BN, ROWS], Q.dtype.element_ty)
        ds_slot = gl.allocate_shared_memory(Q.dtype.element_ty, [BN, ROWS], of_ds)
        dq_slot = gl.allocate_shared_memory(Q.dtype.element_ty, [ROWS, D], of_tile)
        if REST > 0:
            dq_rest_slot = gl.allocate_shared_memory(Q.dtype.element_ty, [ROWS, REST], of_rest)
        _zero_nonfinite_rows(k, flat)
        if REST > 0:
            _zero_nonfinite_rows(k_rest, flat)
    s = warpgroup_mma(k, q_slots.index(0).permute((1, 0)), nothing, use_acc=False)
    if REST > 0:
        s = warpgroup_mma(k_rest, q_rest_slots.index(0).permute((1, 0)), s)
    # Tile after tile: the scores of the next one are multiplied while the sums of this one are waited for.
    for stretch in gl.static_range(2):
        for number in range(0 if stretch == 0 else masked, masked if stretch == 0 else tiles):
            slot = number % STAGES
            q, do = q_slots.index(slot), do_slots.index(slot)
            changes = warpgroup_mma(v, do.permute((1, 0)), nothing, use_acc=False, is_async=True)
            then = number + STAGES
            of_rows = queries_of(pairs_base, then, pairs, N, G, ROWS, gl.SliceLayout(1, flat))
            of_numbers = queries_of(pairs_base, then, pairs, N, G, ROWS, of_row)
            if DQ_PART is not None:
                own_row = number * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, flat))
                own_real = own_row // G < pairs
                own_slot = gl.load(pairs_base + own_row // G, mask=own_real, other=0) - first_query * N
                own_slot = own_slot * G + own_row % G
            lse = gl.expand_dims(lse_slots.index(slot).load(gl.SliceLayout(0, of_s)), 0)
            delta = gl.expand_dims(delta_slots.index(slot).load(gl.SliceLayout(0, of_s)), 0)
            p = gl.exp2(s * to_base_2 - lse)
            if stretch == 0:
                own, _, there = queries_of(pairs_base, number, pairs, N, G, ROWS, gl.SliceLayout(0, of_s))
                p = gl.where(key < gl.expand_dims(gl.where(there, own + to_own, 0), 0), p, 0.0)
            p_16 = gl.convert_layout(p.to(Q.dtype.element_ty), of_p)
            if stretch == 0:
                dp = warpgroup_mma_wait(0, deps=[changes])
                flat_lse = lse_slots.index(slot).load(gl.SliceLayout(1, flat))
                if any_nonfinite(flat_lse == flat_lse):  # an lse of NaN: `launch.backward_rows`
                    zero_rows_of(q, flat_lse == flat_lse, flat)
                    zero_rows_of(do, flat_lse == flat_lse, flat)
                    if REST > 0:
                        zero_rows_of(q_rest_slots.index(slot), flat_lse == flat_lse, flat)
                sums_of_v = warpgroup_mma(p_16, do, dv, is_async=True)
            else:
                sums_of_v = warpgroup_mma(p_16, do, dv, is_async=True)
                dp = warpgroup_mma_wait(1, deps=[changes])
            ds = p * (dp - delta)
            if stretch == 0:  # `intervals.masked_pair`
                ds = gl.where(p == 0.0, 0.0, ds)
            ds_16 = gl.convert_layout(ds.to(Q.dtype.element_ty), of_p)
            sums_of_k = warpgroup_mma(ds_16, q, dk, is_async=True)
            if REST > 0:
                ds_rest = gl.convert_layout(ds_16, gl.DotOperandLayout(0, of_k_rest, 2))
                sums_of_rest = warpgroup_mma(ds_rest, q_rest_slots.index(slot), dk_rest, is_async=True)
            if DQ_PART is not None:
                ds_slot.store(ds.to(Q.dtype.element_ty))
            wait_for_all_but(STAGES - 2)
            if DQ_PART is not None:
                no_dq = gl.zeros([D, ROWS], gl.float32, of_dq)
                sums_of_q = warpgroup_mma(k.permute((1, 0)), ds_slot, no_dq, use_acc=False, is_async=True)
                if REST > 0:  # no registers are left for all of them at a time
                    deps = [sums_of_v, sums_of_k, sums_of_rest, sums_of_q]
                    dv, dk, dk_rest, dq = warpgroup_mma_wait(0, deps=deps)
                    no_rest = gl.zeros([REST, ROWS], gl.float32, of_dq)
                    rest_of_q = warpgroup_mma(k_rest.permute((1, 0)), ds_slot, no_rest, use_acc=False, is_async=True)
            next_slot = (number + 1) % STAGES  # behind the last tile: zeros
            scores = warpgroup_mma(k, q_slots.index(next_slot).permute((1, 0)), nothing, use_acc=False, is_async=True)
            if REST > 0:
                next_rest = q_rest_slots.index(next_slot).permute((1, 0))
                scores = warpgroup_mma(k_rest, next_rest, scores, is_async=True)
                if DQ_PART is None:
                    dv, dk, dk_rest = warpgroup_mma_wait(2, deps=[sums_of_v, sums_of_k, sums_of_rest])
            elif DQ_PART is None:
                dv, dk = warpgroup_mma_wait(1, deps=[sums_of_v, sums_of_k])
            else:
                dv, dk, dq = warpgroup_mma_wait(1, deps=[sums_of_v, sums_of_k, sums_of_q])
            _fetch(
                of_rows, of_numbers, q_base, do_base, lse_base, delta_base, q_s, q_h, HQ, q_slots, q_rest_slots,
                do_slots, lse_slots, delta_slots, slot, D, REST, flat,
            )  # fmt: skip
            if DQ_PART is not None:
                dq_slot.permute((1, 0)).store(dq.to(Q.dtype.element_ty))
                if REST > 0:
                    dq_rest = warpgroup_mma_wait(2, deps=[rest_of_q])
                    dq_rest_slot.permute((1, 0)).store(dq_rest.to(Q.dtype.element_ty))
                    rest_rows = dq_rest_slot.load(flat)
                    store_rows(dq_base + D, own_slot * (D + REST), own_real, rest_rows, REST, flat)
                store_rows(dq_base, own_slot * (D + REST), own_real, dq_slot.load(flat), D, flat)
            s = warpgroup_mma_wait(0, deps=[scores])
    async_copy.wait_group(0)
    release(k_full, 1)
    release(v_full, 1)
    if REST > 0:
        release(k_rest_full, 1)
    place = gl.arange(0, BN, gl.SliceLayout(1, flat))
    out = part.to(gl.int64) * BN + place
    if DK_SUM is None:
        _write(DK_PART, DV_PART, out, place < BN, dk * scale, dv, False, D, REST, flat)
        if REST > 0:
            store_rows(DK_PART + D, out * (D + REST), place < BN, dk_rest * scale, REST, flat)
    else:
        gl.static_assert(REST == 0, "more channels would be spilled in the loop")
        same_cell = gl.load(CELL + part)  # not kept in registers through the loop, which needs them
        if gl.load(FIRST_TILE + same_cell) == part:
            at, inside = _keys_of(same_cell, place, BLOCK_FROM, BLOCK_TO, T, HKV, max_blocks)
            _write(DK_SUM, DV_SUM, at, inside, dk * scale, dv, MORE, D, REST, flat)
        else:
            _write(DK_PART, DV_PART, out, place < BN, dk * scale, dv, False, D, REST, flat)


def backward(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, lse: Tensor, delta: Tensor, n: int, tiles: Index,
    layout: Layout, first: int, count: int, parts: Sequence[Tensor], of_q: Tensor | None,
    sums: Sequence[Tensor | None], scale: float, shape: Shape,
) -> None:  # fmt: skip
    """Write the `parts` of dk and dv, float32 [tiles, l', D], of `count` queries from the `first` on, of which
    each chose n blocks, and those of dq [B, Hkv, count, n, G, Dk] if `of_q` is not None. The part of each block's first
    tile goes to the `sums` float32 [B, T, Hkv, D], if not None: it is added to them, unless the first query is 0.

    lse (base 2) and delta are those of `launch.backward_rows`; `shape` is that of "hopper.selected_backward_kv".
    """
    (_, length, heads, dk), (num_keys, num_kv_heads, d) = q.shape, v.shape[1:]
    steps = [step // ALIGNED.value for step in strides(q)]
    _backward[tiles.begin.numel(),](
        q, *descriptors(k, shape.keys), descriptor(v, shape.keys), do, tiles.query_slot, tiles.begin, tiles.end,
        tiles.cell, tiles.first_tile, *layout.block_tokens, lse, delta, *parts, of_q, *sums, *steps, first, count,
        length, num_keys, num_keys - length, heads, num_kv_heads, layout.max_blocks, scale, scale * LOG2E,
        n, heads // num_kv_heads, d, dk - d, shape.rows, shape.keys, shape.num_stages, first > 0, **shape.launch,
    )  # fmt: skip
