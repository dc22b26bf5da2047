"""`compressed_window._forward` and `_backward_q` with Hopper's instructions.

Forward: the sums of a tile run beside the scores of the next one, and beside their softmax. Backward: scores and their
gradients are two products at a time from what TMA brings. A tile of 64 rows is one warpgroup; three of them fit on a
multiprocessor, so that one computes while another waits.

Here and in the other kernels K_REST is the descriptor of the REST channels of keys beyond the first D, 0 or 64: they
have tiles and barriers of their own.
"""

from __future__ import annotations

from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from nsa.triton_backend import tuning
from nsa.triton_backend.hopper.tile import (
    any_nonfinite,
    descriptor,
    descriptors,
    fetch,
    finish,
    finite_keys,
    kernel,
    load_rows,
    nonfinite,
    ring,
    rows_of_tile,
    shared,
    softmax,
    start,
    store_rows,
    stretches,
    tile,
    tokens_of_tile,
    visible_keys,
    wait,
    zero_rows,
)
from nsa.triton_backend.launch import LOG2E, strides


@kernel
def _forward(
    Q, K, K_REST, V, FINITE, LO, HI, O, LSE, READ, q_b, q_s, q_h, S, T, HQ, HKV, G, to_base_2,
    D: gl.constexpr, REST: gl.constexpr, ROWS: gl.constexpr, GP: gl.constexpr, BN: gl.constexpr,
    K_STAGES: gl.constexpr, V_STAGES: gl.constexpr,
):  # fmt: skip
    WARPS: gl.constexpr = gl.num_warps()
    gl.static_assert(ROWS == 16 * WARPS, "a warpgroup takes 64 rows")
    of_s: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BN, 16])  # [rows, keys]
    of_o: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, D, 16])  # [rows, channels]
    of_p: gl.constexpr = gl.DotOperandLayout(0, of_o, 2)
    flat: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])  # as memory is read and written

    # the last queries see the most keys, so they start first
    rows_tile = gl.num_programs(0) - 1 - gl.program_id(0)
    h, b = gl.program_id(1), gl.program_id(2)
    first_token, last_token = tokens_of_tile(rows_tile, S, ROWS, GP)
    first, end = gl.load(LO + first_token), gl.load(HI + last_token)
    tiles, some, most = stretches(first, end, gl.load(LO + last_token), gl.load(HI + first_token), BN)
    tiles = gl.maximum(tiles, 1)  # rows that see no key still take one tile, so that there is no other case

    k_slots, k_full = ring(K, K_STAGES)
    v_slots, v_full = ring(V, V_STAGES)
    start(K, b, first, h, k_slots, k_full, K_STAGES, tiles, BN)
    start(V, b, first, h, v_slots, v_full, V_STAGES, tiles, BN)
    if REST > 0:
        rest_slots, rest_full = ring(K_REST, K_STAGES)
        start(K_REST, b, first, h, rest_slots, rest_full, K_STAGES, tiles, BN)

    token, g, real = rows_of_tile(rows_tile, S, G, ROWS, GP, gl.SliceLayout(1, flat))
    at_q = b.to(gl.int64) * q_b + token * q_s + (h * G + g) * q_h
    q = load_rows(Q, at_q, real, D, flat)
    nonfinite_q = gl.convert_layout(nonfinite(q), gl.SliceLayout(1, of_s))
    q_tile = shared(q)
    if REST > 0:
        q_rest = load_rows(Q, at_q + D, real, REST, flat)
        nonfinite_q |= gl.convert_layout(nonfinite(q_rest), gl.SliceLayout(1, of_s))
        q_rest_tile = shared(q_rest)
    fence_async_shared()

    row_token, row_g, row_real = rows_of_tile(rows_tile, S, G, ROWS, GP, gl.SliceLayout(1, of_s))
    lo, hi = gl.load(LO + row_token, mask=row_real, other=0), gl.load(HI + row_token, mask=row_real, other=0)
    finite_base = FINITE + (b.to(gl.int64) * T * HKV + h)

    m = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, of_s))
    l, read = gl.zeros_like(m), gl.zeros_like(lo)
    acc, nothing = gl.zeros([ROWS, D], gl.float32, of_o), gl.zeros([ROWS, BN], gl.float32, of_s)
    p = gl.convert_layout(nothing.to(Q.dtype.element_ty), of_p)
    wait(k_full, 0, K_STAGES)
    if REST > 0:
        wait(rest_full, 0, K_STAGES)
    # Tile after tile: scores of this one, sums of the one before. The first one has a mask, needed or not.
    for stretch in gl.static_range(4):
        begin = 0 if stretch == 0 else (1 if stretch == 1 else gl.maximum(some if stretch == 2 else most, 1))
        stop = 1 if stretch == 0 else (some if stretch == 1 else (most if stretch == 2 else tiles))
        for number in range(begin, stop):
            at = first + number * BN
            k = tile(k_slots, number, K_STAGES).permute((1, 0))
            scores = warpgroup_mma(q_tile, k, nothing, use_acc=False, is_async=True)
            if REST > 0:
                k_rest = tile(rest_slots, number, K_STAGES).permute((1, 0))
                scores = warpgroup_mma(q_rest_tile, k_rest, scores, is_async=True)
            if stretch > 0:
                wait(v_full, number - 1, V_STAGES)
                sums = warpgroup_mma(p, tile(v_slots, number - 1, V_STAGES), acc, is_async=True)
                s = warpgroup_mma_wait(1, deps=[scores])
            else:
                s = warpgroup_mma_wait(0, deps=[scores])
            next_k = number + K_STAGES
            fetch(K, b, first + next_k * BN, h, k_slots, k_full, next_k, K_STAGES, next_k < tiles)
            if REST > 0:
                fetch(K_REST, b, first + next_k * BN, h, rest_slots, rest_full, next_k, K_STAGES, next_k < tiles)
            if stretch != 2:
                finite = finite_keys(finite_base, HKV, at, T, BN, gl.SliceLayout(0, of_s))
                s = gl.where(gl.expand_dims(finite, 0), s, float("nan"))
                s = gl.where(visible_keys(at, lo, hi, BN, of_s), s, float("-inf"))
                read += gl.maximum(gl.minimum(hi, at + BN) - gl.maximum(lo, at), 0)
            else:
                read += BN
            exps, alpha, m, l = softmax(s, m, l, to_base_2)
            next_p = gl.convert_layout(exps.to(Q.dtype.element_ty), of_p)
            # The next scores' keys are waited for here, not above: ptxas moves the exponentials behind the wait for
            # the sums, beside which they should run, unless there is a branch between them.
            wait(k_full, number + 1, K_STAGES, number + 1 < tiles)
            if REST > 0:
                wait(rest_full, number + 1, K_STAGES, number + 1 < tiles)
            if stretch > 0:
                acc, p, next_p = warpgroup_mma_wait(0, deps=[sums, p, next_p])
                next_v = number - 1 + V_STAGES
                fetch(V, b, first + next_v * BN, h, v_slots, v_full, next_v, V_STAGES, next_v < tiles)
            if stretch != 2:  # noqa: SIM102 - the compiler decides this one, the GPU the next
                if any_nonfinite(finite):
                    again = finite_keys(finite_base, HKV, at, T, BN, gl.SliceLayout(1, flat))
                    zero_rows(v_slots, v_full, number, V_STAGES, again, flat)
            acc = acc * gl.expand_dims(gl.convert_layout(alpha, gl.SliceLayout(1, of_o)), 1)
            p = next_p
    wait(v_full, tiles - 1, V_STAGES)
    acc = warpgroup_mma(p, tile(v_slots, tiles - 1, V_STAGES), acc)

    factor, lse = finish(m, l, to_base_2, nonfinite_q & (hi > lo))
    gl.store(LSE + ((b.to(gl.int64) * S + row_token) * HQ + h * G + row_g), lse, mask=row_real)
    gl.store(READ + ((b.to(gl.int64) * S + row_token) * HKV + h), read, mask=row_real & (row_g == 0))
    factor = gl.convert_layout(factor, gl.SliceLayout(1, of_o))
    token, g, real = rows_of_tile(rows_tile, S, G, ROWS, GP, gl.SliceLayout(1, flat))
    out = ((b.to(gl.int64) * S + token) * HQ + h * G + g) * D
    store_rows(O, out, real, acc * gl.expand_dims(factor, 1), D, flat)


@kernel
def _backward_q(
    Q, K, K_REST, V, FINITE, DO, LO, HI, LSE, DELTA, DQ, q_b, q_s, q_h, S, T, HQ, HKV, G, scale, to_base_2,
    D: gl.constexpr, REST: gl.constexpr, ROWS: gl.constexpr, GP: gl.constexpr, BN: gl.constexpr,
    K_STAGES: gl.constexpr, V_STAGES: gl.constexpr,
):  # fmt: skip
    WARPS: gl.constexpr = gl.num_warps()
    gl.static_assert(ROWS == 16 * WARPS, "a warpgroup takes 64 rows")
    of_s: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BN, 16])  # [rows, keys]
    of_q: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, D, 16])  # [rows, channels]
    flat: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])

    # the last queries see the most keys, so they start first
    rows_tile = gl.num_programs(0) - 1 - gl.program_id(0)
    h, b = gl.program_id(1), gl.program_id(2)
    first_token, last_token = tokens_of_tile(rows_tile, S, ROWS, GP)
    first, end = gl.load(LO + first_token), gl.load(HI + last_token)
    tiles, some, most = stretches(first, end, gl.load(LO + last_token), gl.load(HI + first_token), BN)

    k_slots, k_full = ring(K, K_STAGES)
    v_slots, v_full = ring(V, V_STAGES)
    start(K, b, first, h, k_slots, k_full, K_STAGES, tiles, BN)
    start(V, b, first, h, v_slots, v_full, V_STAGES, tiles, BN)
    if REST > 0:
        rest_slots, rest_full = ring(K_REST, K_STAGES)
        start(K_REST, b, first, h, rest_slots, rest_full, K_STAGES, tiles, BN)

    token, g, real = rows_of_tile(rows_tile, S, G, ROWS, GP, gl.SliceLayout(1, flat))
    of_head = (b.to(gl.int64) * S + token) * HQ + h * G + g
    at_q = b.to(gl.int64) * q_b + token * q_s + (h * G + g) * q_h
    q_tile = shared(load_rows(Q, at_q, real, D, flat))
    do_tile = shared(load_rows(DO, of_head * D, real, D, flat))
    if REST > 0:
        q_rest_tile = shared(load_rows(Q, at_q + D, real, REST, flat))
    fence_async_shared()

    row_token, row_g, row_real = rows_of_tile(rows_tile, S, G, ROWS, GP, gl.SliceLayout(1, of_s))
    lo, hi = gl.load(LO + row_token, mask=row_real, other=0), gl.load(HI + row_token, mask=row_real, other=0)
    row = (b.to(gl.int64) * S + row_token) * HQ + h * G + row_g
    lse = gl.expand_dims(gl.load(LSE + row, mask=row_real, other=0.0), 1)
    delta = gl.expand_dims(gl.load(DELTA + row, mask=row_real, other=0.0), 1)
    finite_base = FINITE + (b.to(gl.int64) * T * HKV + h)

    dq, nothing = gl.zeros([ROWS, D], gl.float32, of_q), gl.zeros([ROWS, BN], gl.float32, of_s)
    if REST > 0:
        of_q_rest: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, REST, 16])
        dq_rest = gl.zeros([ROWS, REST], gl.float32, of_q_rest)
    for stretch in gl.static_range(3):
        begin = 0 if stretch == 0 else (some if stretch == 1 else most)
        stop = some if stretch == 0 else (most if stretch == 1 else tiles)
        for number in range(begin, stop):
            at = first + number * BN
            if stretch != 1:
                finite = finite_keys(finite_base, HKV, at, T, BN, gl.SliceLayout(1, flat))
                if any_nonfinite(finite):
                    zero_rows(k_slots, k_full, number, K_STAGES, finite, flat)
                    zero_rows(v_slots, v_full, number, V_STAGES, finite, flat)
                    if REST > 0:
                        zero_rows(rest_slots, rest_full, number, K_STAGES, finite, flat)
            wait(k_full, number, K_STAGES)
            k = tile(k_slots, number, K_STAGES)
            scores = warpgroup_mma(q_tile, k.permute((1, 0)), nothing, use_acc=False, is_async=True)
            if REST > 0:
                wait(rest_full, number, K_STAGES)
                k_rest = tile(rest_slots, number, K_STAGES)
                scores = warpgroup_mma(q_rest_tile, k_rest.permute((1, 0)), scores, is_async=True)
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
            next_k = number + K_STAGES
            sums = warpgroup_mma(ds_16, k, dq, is_async=True)
            if REST > 0:
                ds_rest = gl.convert_layout(ds_16, gl.DotOperandLayout(0, of_q_rest, 2))
                rest_sums = warpgroup_mma(ds_rest, k_rest, dq_rest, is_async=True)
                dq, dq_rest = warpgroup_mma_wait(0, deps=[sums, rest_sums])
                fetch(K_REST, b, first + next_k * BN, h, rest_slots, rest_full, next_k, K_STAGES, next_k < tiles)
            else:
                dq = warpgroup_mma_wait(0, deps=[sums])
            fetch(K, b, first + next_k * BN, h, k_slots, k_full, next_k, K_STAGES, next_k < tiles)
    store_rows(DQ, of_head * (D + REST), real, dq * scale, D, flat)
    if REST > 0:
        store_rows(DQ, of_head * (D + REST) + D, real, dq_rest * scale, REST, flat)


def forward(
    q: Tensor, k: Tensor, v: Tensor, finite: Tensor, lo: Tensor, hi: Tensor, o: Tensor, lse: Tensor, read: Tensor,
    scale: float,
) -> None:  # fmt: skip
    """Write o, lse and read; `compressed_window.forward` says what they are."""
    (batch, length, heads, dk), (num_kv_heads, d) = q.shape, v.shape[2:]
    shape = tuning.shape("hopper.compressed_window_forward", q, v)
    _forward[shape.tiles(length), num_kv_heads, batch](
        q, *descriptors(k, shape.keys), descriptor(v, shape.keys), finite, lo, hi, o, lse, read, *strides(q),
        length, k.shape[1], heads, num_kv_heads, heads // num_kv_heads, scale * LOG2E,
        d, dk - d, shape.rows, shape.group, shape.keys, shape.num_stages, shape.value_stages, **shape.launch,
    )  # fmt: skip


def backward_q(
    q: Tensor, k: Tensor, v: Tensor, finite: Tensor, do: Tensor, lo: Tensor, hi: Tensor, lse: Tensor, delta: Tensor,
    dq: Tensor, scale: float,
) -> None:  # fmt: skip
    """Write dq; lse (base 2) and delta are those of `launch.backward_rows`."""
    (batch, length, heads, dk), (num_kv_heads, d) = q.shape, v.shape[2:]
    shape = tuning.shape("hopper.compressed_window_backward_q", q, v)
    _backward_q[shape.tiles(length), num_kv_heads, batch](
        q, *descriptors(k, shape.keys), descriptor(v, shape.keys), finite, do, lo, hi, lse, delta, dq,
        *strides(q), length, k.shape[1], heads, num_kv_heads, heads // num_kv_heads, scale, scale * LOG2E,
        d, dk - d, shape.rows, shape.group, shape.keys, shape.num_stages, shape.value_stages, **shape.launch,
    )  # fmt: skip
