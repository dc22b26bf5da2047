"""dk and dv of the window and of compressed attention: `compressed_window._backward_kv` with Hopper's instructions.

A program keeps 128 keys and values in shared memory, half of them for each of two consumers of four warps: while one
computes exponentials, the other one multiplies. The producer, four warps more, has TMA bring tiles of queries and of
do, which both read: boxes of tokens × heads, as many heads as divide the group, so that no row is padding. p and ds go
into their products as registers, while the scores of the next tile are multiplied.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import jit
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from nsa.triton_backend import tuning
from nsa.triton_backend.hopper.tile import (
    any_nonfinite,
    barriers,
    bring,
    descriptor,
    descriptors,
    kernel,
    slots_of,
    store_rows,
    stretches,
    tile,
    wait,
    wait_until_empty,
    zero_rows_of,
)
from nsa.triton_backend.launch import LOG2E
from nsa.triton_backend.tuning import cdiv, next_power_of_2

KERNEL = "hopper.compressed_window_backward_kv"
MIN_TILES = 64
"""Of queries per program: with fewer, to begin and to end takes a tenth of its time."""
WORKER_WARPS, WORKER_REGISTERS = (4, 4), (240, 240)
"""Of the two consumers; registers of a thread. The producer is the first partition: a consumer in its place spills."""


@jit
def _within(key, lo, hi):
    """`intervals.within`; flipping the top bit of both makes a signed comparison an unsigned one."""
    return ((key - lo) ^ -(2**31)) < ((hi - lo) ^ -(2**31))


@jit
def _place(number, start, steps, own, splits, BOXES: gl.constexpr):
    """(step of queries, box of heads in it) of a program's `number`-th tile: every `splits`-th step from `start` down;
    behind the first step comes the last one."""
    step = start - number // BOXES * splits - own
    return gl.where(step < 0, step + steps, step), number % BOXES


@jit
def _load_rows(base, b, token, head, row, S, HQ, HEADS: gl.constexpr):
    """lse or delta [B, S, Hq] of rows of a tile that begins at this token and head; 0 behind the last token."""
    own_token = token + row // HEADS
    return gl.load(base + ((b.to(gl.int64) * S + own_token) * HQ + head + row % HEADS), mask=own_token < S, other=0.0)


@jit
def _producer(
    Q, Q_REST, K, K_REST, V, DO, LSE, DELTA, b, h, first_key, first, start, steps, own, splits, tiles, masked_from,
    masked_to, S, HQ, k_slots, k_rest_slots, v_slots, keys_full, q_slots, q_rest_slots, do_slots, rows,
    q_full, q_empty, do_full, do_empty, rows_full, REST: gl.constexpr, ROWS: gl.constexpr, HEADS: gl.constexpr,
    BOXES: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Bring keys and values, and tile after tile of queries and do with their lse and delta."""
    BT: gl.constexpr = ROWS // HEADS
    for half in gl.static_range(2):
        full, key = keys_full.index(half), first_key + half * BN
        mbarrier.expect(full, K.block_type.nbytes + V.block_type.nbytes + (K_REST.block_type.nbytes if REST > 0 else 0))
        tma.async_copy_global_to_shared(K, [b, key, h, 0], full, k_slots.index(half))
        tma.async_copy_global_to_shared(V, [b, key, h, 0], full, v_slots.index(half))
        if REST > 0:
            tma.async_copy_global_to_shared(K_REST, [b, key, h, 0], full, k_rest_slots.index(half))
    row = gl.arange(0, ROWS, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    flat: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [gl.num_warps(), 1], [1, 0])
    for number in range(0, tiles):
        slot = number % STAGES
        step, box = _place(number, start, steps, own, splits, BOXES)
        token, head = first + step * BT, h * HEADS * BOXES + box * HEADS
        # before a slot is waited for, so that these are there when it is empty
        lse = _load_rows(LSE, b, token, head, row, S, HQ, HEADS)
        delta = _load_rows(DELTA, b, token, head, row, S, HQ, HEADS)
        wait_until_empty(q_empty, number, STAGES)
        mbarrier.expect(q_full.index(slot), Q.block_type.nbytes + (Q_REST.block_type.nbytes if REST > 0 else 0))
        tma.async_copy_global_to_shared(Q, [b, token, head, 0], q_full.index(slot), q_slots.index(slot))
        if REST > 0:
            tma.async_copy_global_to_shared(Q_REST, [b, token, head, 0], q_full.index(slot), q_rest_slots.index(slot))
        bring(DO, b, token, head, do_slots, do_full, do_empty, number, STAGES)
        if any_nonfinite(
            (lse == lse) | (number < masked_from) | (number >= masked_to)
        ):  # an lse of NaN: `launch.backward_rows`
            # What products of the consumers still read of such rows makes scores and changes of rows whose p is
            # NaN, or 0 by the mask; their sums wait for `rows_full`.
            wait(q_full, number, STAGES)
            wait(do_full, number, STAGES)
            for first_row in gl.static_range(0, ROWS, 8):  # few at a time: the producer has few registers
                own_row = first_row + gl.arange(0, 8, gl.SliceLayout(1, flat))
                own_lse = _load_rows(LSE, b, token, head, own_row, S, HQ, HEADS)
                finite = own_lse == own_lse
                zero_rows_of(tile(q_slots, number, STAGES).slice(first_row, 8, dim=0), finite, flat)
                zero_rows_of(tile(do_slots, number, STAGES).slice(first_row, 8, dim=0), finite, flat)
                if REST > 0:
                    zero_rows_of(tile(q_rest_slots, number, STAGES).slice(first_row, 8, dim=0), finite, flat)
        rows.index(2 * slot).store(lse)
        rows.index(2 * slot + 1).store(delta)
        mbarrier.arrive(rows_full.index(slot))


@jit
def _consumer(
    HALF: gl.constexpr, LO, HI, DK_OUT, DV_OUT, b, h, first_key, first, start, steps, own, splits, tiles, masked_from,
    masked_to, S, T, HKV, scale, to_base_2,
    k_slots, k_rest_slots, v_slots, keys_full, q_slots, q_rest_slots, do_slots, rows,
    q_full, q_empty, do_full, do_empty, rows_full, D: gl.constexpr, REST: gl.constexpr, ROWS: gl.constexpr,
    HEADS: gl.constexpr, BOXES: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """dk and dv of one half of the program's keys."""
    WARPS: gl.constexpr = gl.num_warps()
    gl.static_assert(BN == 16 * WARPS, "a warpgroup takes 64 keys")
    BT: gl.constexpr = ROWS // HEADS
    of_s: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, ROWS, 16])  # [keys, rows]
    of_k: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, D, 16])  # [keys, channels]
    of_p: gl.constexpr = gl.DotOperandLayout(0, of_k, 2)
    flat: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    first_key = first_key + HALF * BN
    key = gl.expand_dims(first_key + gl.arange(0, BN, gl.SliceLayout(1, of_s)), 1)
    row = gl.arange(0, ROWS, gl.SliceLayout(0, of_s))
    k, v = tile(k_slots, HALF, 2), tile(v_slots, HALF, 2)
    dk, dv = gl.zeros([BN, D], gl.float32, of_k), gl.zeros([BN, D], gl.float32, of_k)
    nothing = gl.zeros([BN, ROWS], gl.float32, of_s)
    mbarrier.wait(keys_full.index(HALF), 0)
    wait(q_full, 0, STAGES, tiles > 0)
    s = warpgroup_mma(k, tile(q_slots, 0, STAGES).permute((1, 0)), nothing, use_acc=False)
    if REST > 0:
        of_k_rest: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, REST, 16])
        k_rest, dk_rest = tile(k_rest_slots, HALF, 2), gl.zeros([BN, REST], gl.float32, of_k_rest)
        s = warpgroup_mma(k_rest, tile(q_rest_slots, 0, STAGES).permute((1, 0)), s)
    # Tile after tile: the scores of the next one are multiplied while the sums of this one are waited for.
    for stretch in gl.static_range(3):
        begin = 0 if stretch == 0 else (masked_from if stretch == 1 else masked_to)
        stop = masked_from if stretch == 0 else (masked_to if stretch == 1 else tiles)
        for number in range(begin, stop):
            q, do = tile(q_slots, number, STAGES), tile(do_slots, number, STAGES)
            wait(do_full, number, STAGES)
            changes = warpgroup_mma(v, do.permute((1, 0)), nothing, use_acc=False, is_async=True)
            wait(rows_full, number, STAGES)
            lse_slot, delta_slot = rows.index(number % STAGES * 2), rows.index(number % STAGES * 2 + 1)
            lse = gl.expand_dims(lse_slot.load(gl.SliceLayout(0, of_s)), 0)
            delta = gl.expand_dims(delta_slot.load(gl.SliceLayout(0, of_s)), 0)
            p = gl.exp2(s * to_base_2 - lse)
            if stretch == 1:
                step, _ = _place(number, start, steps, own, splits, BOXES)
                token = first + step * BT + row // HEADS
                lo, hi = gl.load(LO + token, mask=token < S, other=0), gl.load(HI + token, mask=token < S, other=0)
                p = gl.where(_within(key, gl.expand_dims(lo, 0), gl.expand_dims(hi, 0)), p, 0.0)
            p_16 = gl.convert_layout(p.to(q_slots.dtype), of_p)
            sums_of_v = warpgroup_mma(p_16, do, dv, is_async=True)
            dp = warpgroup_mma_wait(1, deps=[changes])
            ds = p * (dp - delta)
            if stretch == 1:  # `intervals.masked_pair`
                ds = gl.where(p == 0.0, 0.0, ds)
            ds_16 = gl.convert_layout(ds.to(q_slots.dtype), of_p)
            sums_of_k = warpgroup_mma(ds_16, q, dk, is_async=True)
            if REST > 0:
                q_rest = tile(q_rest_slots, number, STAGES)
                ds_rest = gl.convert_layout(ds_16, gl.DotOperandLayout(0, of_k_rest, 2))
                sums_of_rest = warpgroup_mma(ds_rest, q_rest, dk_rest, is_async=True)
            then = number + 1
            wait(q_full, then, STAGES, then < tiles)
            # behind the last: whatever stands there
            scores = warpgroup_mma(
                k, tile(q_slots, then, STAGES).permute((1, 0)), nothing, use_acc=False, is_async=True
            )
            if REST > 0:
                next_rest = tile(q_rest_slots, then, STAGES).permute((1, 0))
                scores = warpgroup_mma(k_rest, next_rest, scores, is_async=True)
                dv, dk, dk_rest = warpgroup_mma_wait(2, deps=[sums_of_v, sums_of_k, sums_of_rest])
            else:
                dv, dk = warpgroup_mma_wait(1, deps=[sums_of_v, sums_of_k])
            mbarrier.arrive(q_empty.index(number % STAGES))
            mbarrier.arrive(do_empty.index(number % STAGES))
            s = warpgroup_mma_wait(0, deps=[scores])
    key = (first_key + gl.arange(0, BN, gl.SliceLayout(1, flat))).to(gl.int64)
    out = ((own * gl.num_programs(2) + b).to(gl.int64) * T + key) * HKV + h
    store_rows(DK_OUT, out * (D + REST), key < T, dk * scale, D, flat)
    if REST > 0:
        store_rows(DK_OUT, out * (D + REST) + D, key < T, dk_rest * scale, REST, flat)
    store_rows(DV_OUT, out * D, key < T, dv, D, flat)


@kernel
def _backward(
    Q, Q_REST, K, K_REST, V, DO, LO, HI, LSE, DELTA, SEEN_FROM, SEEN_TO, DK_OUT, DV_OUT, S, T, HQ, HKV, scale,
    to_base_2, splits, D: gl.constexpr, REST: gl.constexpr, ROWS: gl.constexpr, HEADS: gl.constexpr,
    BOXES: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr,
    WORKER_WARPS: gl.constexpr, WORKER_REGISTERS: gl.constexpr,
):  # fmt: skip
    gl.static_assert(STAGES > 1, "the next queries are waited for before these are given back")
    BT: gl.constexpr = ROWS // HEADS
    first_key, own = gl.program_id(0) // splits * (2 * BN), gl.program_id(0) % splits
    h, b = gl.program_id(1), gl.program_id(2)
    last_key = gl.minimum(first_key + 2 * BN, T) - 1
    first, end = gl.load(SEEN_FROM + first_key), gl.load(SEEN_TO + last_key)
    steps, some, most = stretches(first, end, gl.load(SEEN_FROM + last_key), gl.load(SEEN_TO + first_key), BT)
    # Programs that run at the same time read the same queries at the same time, so that L2 serves all but one: of
    # keys that the last query sees, down from there; of a window's, which end one after the other, down from the
    # multiple of a window that all near it see. The steps that need a mask are then in the middle.
    period = gl.maximum(steps, 1) * BT
    multiple = gl.maximum((period - first % period) % period // BT, some - 1)
    start = most - 1 if end == S else gl.minimum(multiple, most - 1)
    masked_from = gl.maximum(gl.cdiv(start - some + 1 - own, splits), 0) * BOXES
    masked_to = gl.maximum(gl.cdiv(start + 1 + steps - most - own, splits), 0) * BOXES
    tiles = gl.maximum(gl.cdiv(steps - own, splits), 0) * BOXES

    k_slots, v_slots, q_slots, do_slots = slots_of(K, 2), slots_of(V, 2), slots_of(Q, STAGES), slots_of(DO, STAGES)
    if REST > 0:
        k_rest_slots, q_rest_slots = slots_of(K_REST, 2), slots_of(Q_REST, STAGES)
    else:
        k_rest_slots, q_rest_slots = None, None
    # lse and delta of each tile
    rows = gl.allocate_shared_memory(gl.float32, [2 * STAGES, ROWS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    keys_full, rows_full = barriers(2, 1), barriers(STAGES, 1)
    q_full, q_empty = barriers(STAGES, 1), barriers(STAGES, 2)
    do_full, do_empty = barriers(STAGES, 1), barriers(STAGES, 2)
    gl.warp_specialize([
        (_producer, (
            Q, Q_REST, K, K_REST, V, DO, LSE, DELTA, b, h, first_key, first, start, steps, own, splits, tiles,
            masked_from, masked_to, S, HQ, k_slots, k_rest_slots, v_slots, keys_full, q_slots, q_rest_slots, do_slots,
            rows, q_full, q_empty, do_full, do_empty, rows_full, REST, ROWS, HEADS, BOXES, BN, STAGES)),
        (_consumer, (
            0, LO, HI, DK_OUT, DV_OUT, b, h, first_key, first, start, steps, own, splits, tiles, masked_from, masked_to,
            S, T, HKV, scale, to_base_2, k_slots, k_rest_slots, v_slots, keys_full, q_slots, q_rest_slots, do_slots,
            rows, q_full, q_empty, do_full, do_empty, rows_full, D, REST, ROWS, HEADS, BOXES, BN, STAGES)),
        (_consumer, (
            1, LO, HI, DK_OUT, DV_OUT, b, h, first_key, first, start, steps, own, splits, tiles, masked_from, masked_to,
            S, T, HKV, scale, to_base_2, k_slots, k_rest_slots, v_slots, keys_full, q_slots, q_rest_slots, do_slots,
            rows, q_full, q_empty, do_full, do_empty, rows_full, D, REST, ROWS, HEADS, BOXES, BN, STAGES)),
    ], WORKER_WARPS, WORKER_REGISTERS)  # fmt: skip


def most_splits(q: Tensor, k: Tensor, v: Tensor) -> int:
    """Programs that share the queries of one tile of keys at most, so that each has enough of them."""
    rows = q.shape[1] * (q.shape[2] // k.shape[2])
    return next_power_of_2(max(rows // (tuning.shape(KERNEL, q, v).rows * MIN_TILES), 1))


def backward(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, lse: Tensor, delta: Tensor, bounds: Sequence[Tensor | None],
    of_k: Tensor, of_v: Tensor, scale: float,
) -> None:  # fmt: skip
    """Write the parts of dk and dv [splits, B, T, Hkv, D]; lse (base 2) and delta are those of `launch.backward_rows`.

    `bounds`: lo, hi, seen_from and seen_to of `compressed_window.gradients`, none of them None.
    """
    lo, hi, seen_from, seen_to = bounds
    (batch, length, heads, dk), (num_keys, num_kv_heads, d) = q.shape, v.shape[1:]
    shape = tuning.shape(KERNEL, q, v)
    splits, group = of_k.shape[0], heads // num_kv_heads
    in_box = min(group & -group, shape.rows)  # heads that TMA brings at a time: a power of two that divides the group
    tokens = shape.rows // in_box
    _backward[cdiv(num_keys, shape.keys) * splits, num_kv_heads, batch](
        *descriptors(q, tokens, in_box), *descriptors(k, shape.keys // 2), descriptor(v, shape.keys // 2),
        descriptor(do, tokens, in_box), lo, hi, lse, delta, seen_from, seen_to, of_k, of_v,
        length, num_keys, heads, num_kv_heads, scale, scale * LOG2E, splits,
        d, dk - d, shape.rows, in_box, group // in_box, shape.keys // 2, shape.num_stages,
        WORKER_WARPS, WORKER_REGISTERS, **shape.launch,
    )  # fmt: skip
