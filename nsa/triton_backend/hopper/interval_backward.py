"""`interval._backward_q`: scores and their gradients are two products at a time from what TMA brings."""

from __future__ import annotations

import triton
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from nsa.triton_backend import tuning
from nsa.triton_backend.hopper.masks import any_bad, blank, good_keys, stretches, visible_keys
from nsa.triton_backend.hopper.ring import (
    descriptor,
    fetch,
    kernel,
    load_rows,
    ring,
    rows_of,
    shared,
    start,
    store_rows,
    tile,
    wait,
)
from nsa.triton_backend.launch import LOG2E, strides


@kernel
def _backward_q(
    Q, K, V, GOOD, DO, LO, HI, LSE, DELTA, DQ, q_b, q_s, q_h, S, T, HQ, HKV, G, scale, to_base_2,
    D: gl.constexpr, BT: gl.constexpr, GP: gl.constexpr, BN: gl.constexpr,
    K_STAGES: gl.constexpr, V_STAGES: gl.constexpr,
):  # fmt: skip
    WARPS: gl.constexpr = gl.num_warps()
    gl.static_assert(BT * GP == 16 * WARPS, "a warpgroup takes 64 rows")
    of_s: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BN, 16])  # [rows, keys]
    of_q: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, D, 16])  # [rows, channels]
    flat: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])

    # the last queries see the most keys, so they start first
    first_token = (gl.num_programs(0) - 1 - gl.program_id(0)) * BT
    h, b = gl.program_id(1), gl.program_id(2)
    last_token = gl.minimum(first_token + BT, S) - 1
    first, end = gl.load(LO + first_token), gl.load(HI + last_token)
    tiles, some, most = stretches(first, end, gl.load(LO + last_token), gl.load(HI + first_token), BN)

    k_slots, k_full = ring(K, K_STAGES)
    v_slots, v_full = ring(V, V_STAGES)
    start(K, b, first, h, k_slots, k_full, K_STAGES, tiles, BN)
    start(V, b, first, h, v_slots, v_full, V_STAGES, tiles, BN)

    token, g, real = rows_of(first_token, S, G, BT, GP, gl.SliceLayout(1, flat))
    out = ((b.to(gl.int64) * S + token) * HQ + h * G + g) * D
    q_tile = shared(load_rows(Q, b.to(gl.int64) * q_b + token * q_s + (h * G + g) * q_h, real, D, flat))
    do_tile = shared(load_rows(DO, out, real, D, flat))
    fence_async_shared()

    row_token, row_g, row_real = rows_of(first_token, S, G, BT, GP, gl.SliceLayout(1, of_s))
    lo, hi = gl.load(LO + row_token, mask=row_real, other=0), gl.load(HI + row_token, mask=row_real, other=0)
    row = (b.to(gl.int64) * S + row_token) * HQ + h * G + row_g
    lse = gl.expand_dims(gl.load(LSE + row, mask=row_real, other=0.0), 1)
    delta = gl.expand_dims(gl.load(DELTA + row, mask=row_real, other=0.0), 1)
    good_base = GOOD + (b.to(gl.int64) * T * HKV + h)

    dq, nothing = gl.zeros([BT * GP, D], gl.float32, of_q), gl.zeros([BT * GP, BN], gl.float32, of_s)
    for stretch in gl.static_range(3):
        begin = 0 if stretch == 0 else (some if stretch == 1 else most)
        stop = some if stretch == 0 else (most if stretch == 1 else tiles)
        for number in range(begin, stop):
            at = first + number * BN
            if stretch != 1:
                good = good_keys(good_base, HKV, at, T, BN, gl.SliceLayout(1, flat))
                if any_bad(good):
                    blank(k_slots, k_full, number, K_STAGES, good, flat)
                    blank(v_slots, v_full, number, V_STAGES, good, flat)
            wait(k_full, number, K_STAGES)
            k = tile(k_slots, number, K_STAGES)
            scores = warpgroup_mma(q_tile, k.permute((1, 0)), nothing, use_acc=False, is_async=True)
            wait(v_full, number, V_STAGES)
            v = tile(v_slots, number, V_STAGES)
            changes = warpgroup_mma(do_tile, v.permute((1, 0)), nothing, use_acc=False, is_async=True)
            s = warpgroup_mma_wait(1, deps=[scores])
            p = gl.exp2(s * to_base_2 - lse)
            dp = warpgroup_mma_wait(0, deps=[changes])
            next_v = number + V_STAGES
            fetch(V, b, first + next_v * BN, h, v_slots, v_full, next_v, V_STAGES, next_v < tiles)
            ds = p * (dp - delta)
            if stretch != 1:
                ds = gl.where(visible_keys(at, lo, hi, BN, of_s), ds, 0.0)
            ds_16 = gl.convert_layout(ds.to(Q.dtype.element_ty), gl.DotOperandLayout(0, of_q, 2))
            dq = warpgroup_mma_wait(0, deps=[warpgroup_mma(ds_16, k, dq, is_async=True)])
            next_k = number + K_STAGES
            fetch(K, b, first + next_k * BN, h, k_slots, k_full, next_k, K_STAGES, next_k < tiles)
    store_rows(DQ, out, real, dq * scale, D, flat)


def backward_q(
    q: Tensor, k: Tensor, v: Tensor, good: Tensor, do: Tensor, lo: Tensor, hi: Tensor, lse: Tensor, delta: Tensor,
    dq: Tensor, scale: float,
) -> None:  # fmt: skip
    """Write dq; lse (base 2) and delta are those of `launch.backward_rows`."""
    (batch, length, heads, d), kv_heads = q.shape, k.shape[2]
    shape = tuning.shape("hopper.interval_backward_q", q, v)
    _backward_q[triton.cdiv(length, shape.tokens), kv_heads, batch](
        q, descriptor(k, shape.keys), descriptor(v, shape.keys), good, do, lo, hi, lse, delta, dq, *strides(q),
        length, k.shape[1], heads, kv_heads, heads // kv_heads, scale, scale * LOG2E,
        d, shape.tokens, shape.group, shape.keys, shape.num_stages, shape.value_stages, **shape.launch,
    )  # fmt: skip
