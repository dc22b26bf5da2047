"""dq of the selected branch where neighbouring queries chose alike: a block is brought once for eight of them.

A persistent, warp-specialized kernel: a program for each multiprocessor takes tile after tile of queries. Its producer
has TMA bring the blocks that any of them chose, keys and values, into a ring. Two consumers, warpgroups of four queries
of up to 16 heads, read the same slots, and leave out the blocks that none of their own queries chose. So the blocks are
read half as often as by one warpgroup alone, and while one consumer computes exponentials, the other one multiplies.

Where neighbours chose different blocks, dq is faster by query (`hopper/selected.py`); each tile decides
(`shares_blocks`).
"""

from __future__ import annotations

from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import jit
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from nsa.geometry import Layout
from nsa.triton_backend import tuning
from nsa.triton_backend.block_unions import DQ_TOKENS, Unions
from nsa.triton_backend.hopper.shared_blocks import first_key_of, has_nonfinite, shares_blocks
from nsa.triton_backend.hopper.tile import (
    barriers,
    descriptor,
    descriptors,
    finite_keys,
    kernel,
    load_rows,
    rows_of,
    slots_of,
    store_dq,
    thread_barrier,
    tile,
    wait,
    wait_until_empty,
    zero_rows_of,
)
from nsa.triton_backend.launch import LOG2E, strides
from nsa.triton_backend.tuning import num_sms

KERNEL = "hopper.shared_blocks_backward_q"
ROWS_AT_A_TIME = gl.constexpr(8)  # rows that the producer, which has few registers, makes zero
WORKER_WARPS, WORKER_REGISTERS = (4, 4), (240, 240)
"""Of the two consumers; registers of a thread."""


@jit
def _in_round(step):
    """Which tile of the `step`-th round, of one for each program, is this program's.

    The first tile of each period always shares (`shares_blocks`). If each program took the same tile of every round,
    an even number of programs would leave all those tiles to a few.
    """
    programs = gl.num_programs(0)
    return (gl.program_id(0) + step * (1 - programs % 2)) % programs


@jit
def _place(step, tiles, HKV):
    """(number, tile of its head, head, sequence) of a program's `step`-th tile."""
    number = step * gl.num_programs(0) + _in_round(step)
    head = number // tiles
    return number, number % tiles, head % HKV, head // HKV


@jit
def _steps(total):
    """Tiles of this program."""
    rounds = total // gl.num_programs(0)
    return rounds + (_in_round(rounds) < total % gl.num_programs(0)).to(gl.int32)


@jit
def _bring(
    K, K_REST, V, b, at, h, number, k_slots, rest_slots, v_slots, there, REST: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Begin to bring a block; `there` is arrived at when all of it is."""
    slot = number % STAGES
    mbarrier.expect(there, K.block_type.nbytes + V.block_type.nbytes + (K_REST.block_type.nbytes if REST > 0 else 0))
    tma.async_copy_global_to_shared(K, [b, at, h, 0], there, k_slots.index(slot))
    tma.async_copy_global_to_shared(V, [b, at, h, 0], there, v_slots.index(slot))
    if REST > 0:
        tma.async_copy_global_to_shared(K_REST, [b, at, h, 0], there, rest_slots.index(slot))


@jit
def _producer(
    K, K_REST, V, FINITE, UNIONS, COUNTS, total, tiles, T, HKV, max_shared, k_slots, rest_slots, v_slots,
    full, empty, to_check, ENTRIES: gl.constexpr, REST: gl.constexpr, BT: gl.constexpr, BN: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Bring block after block; zeros in place of keys and values that are not finite (0 · NaN would reach queries that
    do not see them)."""
    flat: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [gl.num_warps(), 1], [1, 0])
    done, checked = 0, 0
    for step in range(0, _steps(total)):
        tile_number, i, h, b = _place(step, tiles, HKV)
        if shares_blocks(COUNTS + (tile_number - i) * 2, i, max_shared, BT):
            entries, num_blocks = UNIONS + tile_number.to(gl.int64) * ENTRIES, gl.load(COUNTS + tile_number * 2)
            finite_base = FINITE + (b.to(gl.int64) * T * HKV + h)
            entry = gl.load(entries)
            for number in range(0, num_blocks):
                at, nonfinite_keys = first_key_of(entry, BT, BN), has_nonfinite(entry, BT)
                entry = gl.load(entries + gl.minimum(number + 1, num_blocks - 1))
                wait_until_empty(empty, done, STAGES)
                if nonfinite_keys:
                    _bring(K, K_REST, V, b, at, h, done, k_slots, rest_slots, v_slots, to_check.index(0), REST, STAGES)
                    mbarrier.wait(to_check.index(0), checked & 1)
                    checked += 1
                    for row in gl.static_range(0, BN, ROWS_AT_A_TIME):
                        finite = finite_keys(finite_base, HKV, at + row, T, ROWS_AT_A_TIME, gl.SliceLayout(1, flat))
                        zero_rows_of(tile(k_slots, done, STAGES).slice(row, ROWS_AT_A_TIME, dim=0), finite, flat)
                        zero_rows_of(tile(v_slots, done, STAGES).slice(row, ROWS_AT_A_TIME, dim=0), finite, flat)
                        if REST > 0:
                            zero_rows_of(tile(rest_slots, done, STAGES).slice(row, ROWS_AT_A_TIME, dim=0), finite, flat)
                    thread_barrier()
                    mbarrier.arrive(full.index(done % STAGES))
                else:
                    there = full.index(done % STAGES)
                    _bring(K, K_REST, V, b, at, h, done, k_slots, rest_slots, v_slots, there, REST, STAGES)
                done += 1


@jit
def _consumer(
    PART: gl.constexpr, Q, DO, UNIONS, COUNTS, LSE, DELTA, DQ, DQ_CMP, DQ_WIN, q_b, q_s, q_h, S, ahead, HQ, HKV, G,
    total, tiles, max_shared, scale, to_base_2, q_tile, q_rest_tile, do_tile, k_slots, rest_slots, v_slots,
    full, empty, ENTRIES: gl.constexpr, D: gl.constexpr, REST: gl.constexpr, GP: gl.constexpr,
    BT: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """dq of the queries of one half of each tile."""
    WARPS: gl.constexpr = gl.num_warps()
    TOKENS: gl.constexpr = BT // 2
    ROWS: gl.constexpr = TOKENS * GP
    gl.static_assert(ROWS == 16 * WARPS, "a warpgroup takes 64 rows")
    of_s: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BN, 16])  # [rows, keys]
    of_q: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, D, 16])  # [rows, channels]
    flat: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])  # as memory is read and written
    in_tile = gl.arange(0, ROWS, gl.SliceLayout(1, of_s)) // GP
    nothing = gl.zeros([ROWS, BN], gl.float32, of_s)
    done = 0
    for step in range(0, _steps(total)):
        tile_number, i, h, b = _place(step, tiles, HKV)
        if shares_blocks(COUNTS + (tile_number - i) * 2, i, max_shared, BT):
            entries, num_blocks = UNIONS + tile_number.to(gl.int64) * ENTRIES, gl.load(COUNTS + tile_number * 2)
            first_query = i * BT + PART * TOKENS
            token, g, real = rows_of(first_query, S, G, TOKENS, GP, gl.SliceLayout(1, flat))
            at_row = (b.to(gl.int64) * S + token) * HQ + h * G + g
            at_q = b.to(gl.int64) * q_b + token * q_s + (h * G + g) * q_h
            q_tile.store(load_rows(Q, at_q, real, D, flat))
            do_tile.store(load_rows(DO, at_row * D, real, D, flat))
            if REST > 0:
                q_rest_tile.store(load_rows(Q, at_q + D, real, REST, flat))
            fence_async_shared()
            thread_barrier()
            row_token, row_g, row_real = rows_of(first_query, S, G, TOKENS, GP, gl.SliceLayout(1, of_s))
            row = (b.to(gl.int64) * S + row_token) * HQ + h * G + row_g
            lse = gl.expand_dims(gl.load(LSE + row, mask=row_real, other=0.0), 1)
            delta = gl.expand_dims(gl.load(DELTA + row, mask=row_real, other=0.0), 1)
            first_behind = first_query + ahead + 1
            behind = first_behind + in_tile  # the first key that a row does not see

            dq = gl.zeros([ROWS, D], gl.float32, of_q)
            if REST > 0:
                of_q_rest: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, REST, 16])
                dq_rest = gl.zeros([ROWS, REST], gl.float32, of_q_rest)
            entry = gl.load(entries)
            for number in range(0, num_blocks):
                at = first_key_of(entry, BT, BN)
                chosen_by = (entry >> (PART * TOKENS)) & ((1 << TOKENS) - 1)
                entry = gl.load(entries + gl.minimum(number + 1, num_blocks - 1))
                wait(full, done, STAGES)
                if chosen_by != 0:
                    k, v = tile(k_slots, done, STAGES), tile(v_slots, done, STAGES)
                    scores = warpgroup_mma(q_tile, k.permute((1, 0)), nothing, use_acc=False, is_async=True)
                    if REST > 0:
                        k_rest = tile(rest_slots, done, STAGES)
                        scores = warpgroup_mma(q_rest_tile, k_rest.permute((1, 0)), scores, is_async=True)
                    changes = warpgroup_mma(do_tile, v.permute((1, 0)), nothing, use_acc=False, is_async=True)
                    s = warpgroup_mma_wait(1, deps=[scores])
                    p = gl.exp2(s * to_base_2 - lse)
                    dp = warpgroup_mma_wait(0, deps=[changes])
                    chose = ((chosen_by >> in_tile) & 1) != 0
                    ds = gl.where(gl.expand_dims(chose, 1), p * (dp - delta), 0.0)
                    if at + BN > first_behind:
                        key = at + gl.arange(0, BN, gl.SliceLayout(0, of_s))
                        ds = gl.where(gl.expand_dims(key, 0) < gl.expand_dims(behind, 1), ds, 0.0)
                    ds_16 = gl.convert_layout(ds.to(Q.dtype.element_ty), gl.DotOperandLayout(0, of_q, 2))
                    sums = warpgroup_mma(ds_16, k, dq, is_async=True)
                    if REST > 0:
                        ds_rest = gl.convert_layout(ds_16, gl.DotOperandLayout(0, of_q_rest, 2))
                        rest_sums = warpgroup_mma(ds_rest, k_rest, dq_rest, is_async=True)
                        dq, dq_rest = warpgroup_mma_wait(0, deps=[sums, rest_sums])
                    else:
                        dq = warpgroup_mma_wait(0, deps=[sums])
                mbarrier.arrive(empty.index(done % STAGES))
                done += 1
            thread_barrier()  # no product reads q anywhere: its place serves to write dq row by row
            q_tile.store((dq * scale).to(DQ.dtype.element_ty))
            if REST > 0:
                q_rest_tile.store((dq_rest * scale).to(DQ.dtype.element_ty))
            fence_async_shared()
            thread_barrier()
            token, g, real = rows_of(first_query, S, G, TOKENS, GP, gl.SliceLayout(1, flat))
            at_dq = ((b.to(gl.int64) * S + token) * HQ + h * G + g) * (D + REST)
            store_dq(DQ, DQ_CMP, DQ_WIN, at_dq, real, q_tile.load(flat), D, flat)
            if REST > 0:
                store_dq(DQ, DQ_CMP, DQ_WIN, at_dq + D, real, q_rest_tile.load(flat), REST, flat)
            thread_barrier()  # nor does anybody read dq there when the next q is written


@kernel
def _backward(
    Q, K, K_REST, V, FINITE, DO, UNIONS, COUNTS, LSE, DELTA, DQ, DQ_CMP, DQ_WIN, q_b, q_s, q_h,
    S, T, ahead, HQ, HKV, G, total, tiles, max_shared, scale, to_base_2, ENTRIES: gl.constexpr, D: gl.constexpr,
    REST: gl.constexpr, GP: gl.constexpr, BT: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr,
    WORKER_WARPS: gl.constexpr, WORKER_REGISTERS: gl.constexpr,
):  # fmt: skip
    ROWS: gl.constexpr = BT // 2 * GP
    of_rows: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, D], Q.dtype.element_ty)
    k_slots, v_slots = slots_of(K, STAGES), slots_of(V, STAGES)
    q_tiles = gl.allocate_shared_memory(Q.dtype.element_ty, [2, ROWS, D], of_rows)
    do_tiles = gl.allocate_shared_memory(Q.dtype.element_ty, [2, ROWS, D], of_rows)
    if REST > 0:
        of_rest: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, REST], Q.dtype.element_ty)
        q_rest_tiles = gl.allocate_shared_memory(Q.dtype.element_ty, [2, ROWS, REST], of_rest)
        rest_slots = slots_of(K_REST, STAGES)
    else:
        q_rest_tiles, rest_slots = q_tiles, None
    full, empty = barriers(STAGES, 1), barriers(STAGES, 2)
    to_check = barriers(1, 1)  # of blocks that the producer makes finite before they are full
    gl.warp_specialize([
        (_producer, (
            K, K_REST, V, FINITE, UNIONS, COUNTS, total, tiles, T, HKV, max_shared, k_slots, rest_slots, v_slots,
            full, empty, to_check, ENTRIES, REST, BT, BN, STAGES)),
        (_consumer, (
            0, Q, DO, UNIONS, COUNTS, LSE, DELTA, DQ, DQ_CMP, DQ_WIN, q_b, q_s, q_h, S, ahead, HQ, HKV, G, total, tiles,
            max_shared, scale, to_base_2, q_tiles.index(0), q_rest_tiles.index(0), do_tiles.index(0), k_slots,
            rest_slots, v_slots, full, empty, ENTRIES, D, REST, GP, BT, BN, STAGES)),
        (_consumer, (
            1, Q, DO, UNIONS, COUNTS, LSE, DELTA, DQ, DQ_CMP, DQ_WIN, q_b, q_s, q_h, S, ahead, HQ, HKV, G, total, tiles,
            max_shared, scale, to_base_2, q_tiles.index(1), q_rest_tiles.index(1), do_tiles.index(1), k_slots,
            rest_slots, v_slots, full, empty, ENTRIES, D, REST, GP, BT, BN, STAGES)),
    ], WORKER_WARPS, WORKER_REGISTERS)  # fmt: skip


def backward_q(
    q: Tensor, k: Tensor, v: Tensor, finite: Tensor, unions: Unions, do: Tensor, layout: Layout,
    scale: float, lse: Tensor, delta: Tensor, dq: Tensor, more_dq: tuple[Tensor, Tensor] | None,
    max_shared: int | None,
) -> None:  # fmt: skip
    """Write dq, with `more_dq` of the other branches, of the tiles that `shares_blocks` names; `unions` are of
    DQ_TOKENS queries, lse (base 2) and delta are those of `launch.backward_rows`."""
    (batch, length, heads, dk), (num_keys, num_kv_heads, d) = q.shape, v.shape[1:]
    shape, (_, _, tiles, entries) = tuning.shape(KERNEL, q, v), unions.blocks.shape
    total = batch * num_kv_heads * tiles
    _backward[min(num_sms(q.device), total),](
        q, *descriptors(k, shape.keys), descriptor(v, shape.keys), finite, do, unions.blocks, unions.counts,
        lse, delta, dq, *(more_dq or (None, None)), *strides(q), length, num_keys, layout.num_keys - length, heads,
        num_kv_heads, heads // num_kv_heads, total, tiles, max_shared, scale, scale * LOG2E, entries, d, dk - d,
        shape.rows // DQ_TOKENS, DQ_TOKENS, shape.keys, shape.num_stages, WORKER_WARPS, WORKER_REGISTERS,
        **shape.launch,
    )  # fmt: skip
