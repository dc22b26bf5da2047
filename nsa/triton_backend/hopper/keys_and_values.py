"""dk and dv of the window and of compressed attention: `compressed_window._backward_kv` with Hopper's instructions.

A program keeps 64 keys and values in shared memory, and TMA brings tiles of queries and of do: boxes of tokens × heads,
as many heads as divide the group, so that no row is padding. p and ds go into their products as registers, while the
scores of the next tile are multiplied.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import jit
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from nsa.triton_backend import tuning
from nsa.triton_backend.hopper.tile import (
    any_nonfinite,
    descriptor,
    descriptors,
    fetch,
    kernel,
    release,
    ring,
    store_rows,
    stretches,
    tile,
    wait,
    zero_rows,
)
from nsa.triton_backend.launch import LOG2E
from nsa.triton_backend.tuning import cdiv


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
def _fetch_queries(
    source, b, first, head, place, slots, full, number, STAGES: gl.constexpr, BT: gl.constexpr, HEADS: gl.constexpr,
    wanted,
):  # fmt: skip
    """`fetch` of a box of BT tokens × HEADS heads."""
    step, box = place
    fetch(source, b, first + step * BT, head + box * HEADS, slots, full, number, STAGES, wanted)


@kernel
def _backward(
    Q, Q_REST, K, K_REST, V, DO, LO, HI, LSE, DELTA, SEEN_FROM, SEEN_TO, DK_OUT, DV_OUT, S, T, HQ, HKV, scale,
    to_base_2, splits, D: gl.constexpr, REST: gl.constexpr, ROWS: gl.constexpr, HEADS: gl.constexpr,
    BOXES: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    WARPS: gl.constexpr = gl.num_warps()
    gl.static_assert(BN == 16 * WARPS, "a warpgroup takes 64 keys")
    gl.static_assert(STAGES > 1, "the next queries are waited for before these are given back")
    BT: gl.constexpr = ROWS // HEADS
    of_s: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, ROWS, 16])  # [keys, rows]
    of_k: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, D, 16])  # [keys, channels]
    of_p: gl.constexpr = gl.DotOperandLayout(0, of_k, 2)
    flat: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])

    first_key, own = gl.program_id(0) // splits * BN, gl.program_id(0) % splits
    h, b = gl.program_id(1), gl.program_id(2)
    last_key = gl.minimum(first_key + BN, T) - 1
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

    k_slot, k_full = ring(K, 1)
    v_slot, v_full = ring(V, 1)
    fetch(K, b, first_key, h, k_slot, k_full, 0, 1, True)
    fetch(V, b, first_key, h, v_slot, v_full, 0, 1, True)
    q_slots, q_full = ring(Q, STAGES)
    do_slots, do_full = ring(DO, STAGES)
    if REST > 0:
        k_rest_slot, k_rest_full = ring(K_REST, 1)
        fetch(K_REST, b, first_key, h, k_rest_slot, k_rest_full, 0, 1, True)
        q_rest_slots, q_rest_full = ring(Q_REST, STAGES)
    head = h * HEADS * BOXES
    for number in gl.static_range(STAGES):
        place, wanted = _place(number, start, steps, own, splits, BOXES), number < tiles
        _fetch_queries(Q, b, first, head, place, q_slots, q_full, number, STAGES, BT, HEADS, wanted)
        if REST > 0:
            _fetch_queries(Q_REST, b, first, head, place, q_rest_slots, q_rest_full, number, STAGES, BT, HEADS, wanted)
        _fetch_queries(DO, b, first, head, place, do_slots, do_full, number, STAGES, BT, HEADS, wanted)

    key = gl.expand_dims(first_key + gl.arange(0, BN, gl.SliceLayout(1, of_s)), 1)
    row = gl.arange(0, ROWS, gl.SliceLayout(0, of_s))
    flat_row = gl.arange(0, ROWS, gl.SliceLayout(1, flat))
    of_sequence = b.to(gl.int64) * S * HQ + head
    lse_base, delta_base = LSE + of_sequence, DELTA + of_sequence
    k, v = tile(k_slot, 0, 1), tile(v_slot, 0, 1)
    dk, dv = gl.zeros([BN, D], gl.float32, of_k), gl.zeros([BN, D], gl.float32, of_k)
    nothing = gl.zeros([BN, ROWS], gl.float32, of_s)
    wait(k_full, 0, 1)
    wait(v_full, 0, 1)
    wait(q_full, 0, STAGES, tiles > 0)
    s = warpgroup_mma(k, tile(q_slots, 0, STAGES).permute((1, 0)), nothing, use_acc=False)
    if REST > 0:
        of_k_rest: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, REST, 16])
        k_rest, dk_rest = tile(k_rest_slot, 0, 1), gl.zeros([BN, REST], gl.float32, of_k_rest)
        wait(k_rest_full, 0, 1)
        wait(q_rest_full, 0, STAGES, tiles > 0)
        s = warpgroup_mma(k_rest, tile(q_rest_slots, 0, STAGES).permute((1, 0)), s)
    # Tile after tile: the scores of the next one are multiplied while the sums of this one are waited for.
    for stretch in gl.static_range(3):
        begin = 0 if stretch == 0 else (masked_from if stretch == 1 else masked_to)
        stop = masked_from if stretch == 0 else (masked_to if stretch == 1 else tiles)
        for number in range(begin, stop):
            q, do = tile(q_slots, number, STAGES), tile(do_slots, number, STAGES)
            wait(do_full, number, STAGES)
            changes = warpgroup_mma(v, do.permute((1, 0)), nothing, use_acc=False, is_async=True)
            step, box = _place(number, start, steps, own, splits, BOXES)
            token = first + step * BT + row // HEADS
            at = token * HQ + box * HEADS + row % HEADS
            lse = gl.expand_dims(gl.load(lse_base + at, mask=token < S, other=0.0), 0)
            delta = gl.expand_dims(gl.load(delta_base + at, mask=token < S, other=0.0), 0)
            p = gl.exp2(s * to_base_2 - lse)
            if stretch == 1:
                lo, hi = gl.load(LO + token, mask=token < S, other=0), gl.load(HI + token, mask=token < S, other=0)
                p = gl.where(_within(key, gl.expand_dims(lo, 0), gl.expand_dims(hi, 0)), p, 0.0)
            p_16 = gl.convert_layout(p.to(Q.dtype), of_p)
            if stretch == 1:
                dp = warpgroup_mma_wait(0, deps=[changes])
                flat_token = first + step * BT + flat_row // HEADS
                flat_at = flat_token * HQ + box * HEADS + flat_row % HEADS
                flat_lse = gl.load(lse_base + flat_at, mask=flat_token < S, other=0.0)
                if any_nonfinite(flat_lse == flat_lse):  # an lse of NaN: `launch.backward_rows`
                    zero_rows(q_slots, q_full, number, STAGES, flat_lse == flat_lse, flat)
                    zero_rows(do_slots, do_full, number, STAGES, flat_lse == flat_lse, flat)
                    if REST > 0:
                        zero_rows(q_rest_slots, q_rest_full, number, STAGES, flat_lse == flat_lse, flat)
                sums_of_v = warpgroup_mma(p_16, do, dv, is_async=True)
            else:
                sums_of_v = warpgroup_mma(p_16, do, dv, is_async=True)
                dp = warpgroup_mma_wait(1, deps=[changes])
            ds = p * (dp - delta)
            if stretch == 1:  # `intervals.masked_pair`
                ds = gl.where(p == 0.0, 0.0, ds)
            ds_16 = gl.convert_layout(ds.to(Q.dtype), of_p)
            sums_of_k = warpgroup_mma(ds_16, q, dk, is_async=True)
            if REST > 0:
                q_rest = tile(q_rest_slots, number, STAGES)
                ds_rest = gl.convert_layout(ds_16, gl.DotOperandLayout(0, of_k_rest, 2))
                sums_of_rest = warpgroup_mma(ds_rest, q_rest, dk_rest, is_async=True)
            then, wanted = number + 1, number + 1 < tiles
            wait(q_full, then, STAGES, wanted)
            next_q = tile(q_slots, then, STAGES).permute((1, 0))  # behind the last: whatever stands there
            scores = warpgroup_mma(k, next_q, nothing, use_acc=False, is_async=True)
            if REST > 0:
                wait(q_rest_full, then, STAGES, wanted)
                scores = warpgroup_mma(k_rest, tile(q_rest_slots, then, STAGES).permute((1, 0)), scores, is_async=True)
                dv, dk, dk_rest = warpgroup_mma_wait(2, deps=[sums_of_v, sums_of_k, sums_of_rest])
            else:
                dv, dk = warpgroup_mma_wait(1, deps=[sums_of_v, sums_of_k])
            then, wanted = number + STAGES, number + STAGES < tiles
            place = _place(then, start, steps, own, splits, BOXES)
            _fetch_queries(DO, b, first, head, place, do_slots, do_full, then, STAGES, BT, HEADS, wanted)
            _fetch_queries(Q, b, first, head, place, q_slots, q_full, then, STAGES, BT, HEADS, wanted)
            if REST > 0:
                _fetch_queries(
                    Q_REST, b, first, head, place, q_rest_slots, q_rest_full, then, STAGES, BT, HEADS, wanted
                )
            s = warpgroup_mma_wait(0, deps=[scores])
    release(k_full, 1)
    release(v_full, 1)
    if REST > 0:
        release(k_rest_full, 1)
    key = (first_key + gl.arange(0, BN, gl.SliceLayout(1, flat))).to(gl.int64)
    out = ((own * gl.num_programs(2) + b).to(gl.int64) * T + key) * HKV + h
    store_rows(DK_OUT, out * (D + REST), key < T, dk * scale, D, flat)
    if REST > 0:
        store_rows(DK_OUT, out * (D + REST) + D, key < T, dk_rest * scale, REST, flat)
    store_rows(DV_OUT, out * D, key < T, dv, D, flat)


def backward(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, lse: Tensor, delta: Tensor, bounds: Sequence[Tensor | None],
    of_k: Tensor, of_v: Tensor, scale: float,
) -> None:  # fmt: skip
    """Write the parts of dk and dv [splits, B, T, Hkv, D]; lse (base 2) and delta are those of `launch.backward_rows`.

    `bounds`: lo, hi, seen_from and seen_to of `compressed_window.gradients`, none of them None.
    """
    lo, hi, seen_from, seen_to = bounds
    (batch, length, heads, dk), (num_keys, num_kv_heads, d) = q.shape, v.shape[1:]
    shape = tuning.shape("hopper.compressed_window_backward_kv", q, v)
    splits, group = of_k.shape[0], heads // num_kv_heads
    in_box = min(group & -group, shape.rows)  # heads that TMA brings at a time: a power of two that divides the group
    tokens = shape.rows // in_box
    _backward[cdiv(num_keys, shape.keys) * splits, num_kv_heads, batch](
        *descriptors(q, tokens, in_box), *descriptors(k, shape.keys), descriptor(v, shape.keys),
        descriptor(do, tokens, in_box), lo, hi, lse, delta, seen_from, seen_to, of_k, of_v,
        length, num_keys, heads, num_kv_heads, scale, scale * LOG2E, splits,
        d, dk - d, shape.rows, in_box, group // in_box, shape.keys, shape.num_stages, **shape.launch,
    )  # fmt: skip
