"""`selected._forward` and `selected._backward_q`: one warp per token and group, blocks by TMA.

A warpgroup multiplies 64 rows at least, and a query has at most 16, the heads of its group: so one warp takes it, with
the instruction of older GPUs (`mma_v2`). Both are bound by what L2 gives. A ring asks for the next block while this one
is multiplied, with no registers for addresses.
"""

from __future__ import annotations

from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import jit
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mma_v2

from nsa.geometry import Layout
from nsa.triton_backend import tuning
from nsa.triton_backend.block_unions import DQ_TOKENS, FORWARD_TOKENS
from nsa.triton_backend.hopper.shared_blocks import shares_blocks
from nsa.triton_backend.hopper.tile import (
    descriptor,
    descriptors,
    fetch,
    finish,
    gated,
    kernel,
    load_rows,
    nonfinite,
    ring,
    softmax,
    store_dq,
    store_rows,
    tile,
    wait,
)
from nsa.triton_backend.launch import LOG2E, strides
from nsa.triton_backend.tuning import next_power_of_2


@jit
def _tiles(chosen, token, start, N: gl.constexpr, NP: gl.constexpr, SIZE: gl.constexpr, STEPS: gl.constexpr):
    """(tiles of blocks that the query sees the whole of, tiles of all). Blocks ascend; -1, which is none, is last."""
    slot = gl.arange(0, NP, gl.BlockedLayout([1], [32], [1], [0]))
    block = gl.load(chosen + slot, mask=slot < N, other=-1)
    whole = (block >= 0) & (start + (block + 1) * SIZE - 1 <= token)
    return gl.sum(whole.to(gl.int32), 0) * STEPS, gl.sum((block >= 0).to(gl.int32), 0) * STEPS


@jit
def _first_key(chosen, number, start, N: gl.constexpr, SIZE: gl.constexpr, STEPS: gl.constexpr, BN: gl.constexpr):
    """Of the `number`-th tile; of the last where there are not as many."""
    number = gl.minimum(number, N * STEPS - 1)
    return (start + gl.load(chosen + number // STEPS) * SIZE).to(gl.int32) + number % STEPS * BN


@jit
def _start(source, b, h, chosen, start, slots, full, STAGES: gl.constexpr, tiles,
           N: gl.constexpr, SIZE: gl.constexpr, STEPS: gl.constexpr, BN: gl.constexpr):  # fmt: skip
    """Begin to bring the first STAGES tiles of the chosen blocks."""
    for number in gl.static_range(STAGES):
        at = _first_key(chosen, number, start, N, SIZE, STEPS, BN)
        fetch(source, b, at, h, slots, full, number, STAGES, number < tiles)


@jit
def _shares_blocks(COUNTS, i, h, b, S, HKV, max_shared, TOKENS: gl.constexpr):
    """Whether the tile of a query does."""
    counts = COUNTS + (b.to(gl.int64) * HKV + h) * gl.cdiv(S, TOKENS) * 2
    return shares_blocks(counts, i // TOKENS, max_shared, TOKENS)


@kernel
def _forward(
    Q, K, K_REST, V, BLOCKS, STARTS, COUNTS, O, LSE, READ, O_CMP, O_WIN, GATES, SUM, q_b, q_s, q_h,
    S, ahead, HQ, HKV, G, max_shared, to_base_2, TOKENS: gl.constexpr, N: gl.constexpr, NP: gl.constexpr,
    SIZE: gl.constexpr, D: gl.constexpr, REST: gl.constexpr, GP: gl.constexpr, BN: gl.constexpr,
    K_STAGES: gl.constexpr, V_STAGES: gl.constexpr,
):  # fmt: skip
    STEPS: gl.constexpr = SIZE // BN
    mma: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, 1], [16, 8])
    left: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    right: gl.constexpr = gl.DotOperandLayout(1, mma, 2)
    flat: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [1, 1], [1, 0])  # as memory is read and written

    i, h, b = gl.program_id(0), gl.program_id(1), gl.program_id(2)
    if COUNTS is not None:
        elsewhere = _shares_blocks(COUNTS, i, h, b, S, HKV, max_shared, TOKENS)
        if elsewhere:
            return
    token, start = i.to(gl.int64) + ahead, gl.load(STARTS + i)
    chosen = BLOCKS + ((b.to(gl.int64) * S + i) * HKV + h) * N
    whole, tiles = _tiles(chosen, token, start, N, NP, SIZE, STEPS)
    k_slots, k_full = ring(K, K_STAGES)
    v_slots, v_full = ring(V, V_STAGES)
    _start(K, b, h, chosen, start, k_slots, k_full, K_STAGES, tiles, N, SIZE, STEPS, BN)
    _start(V, b, h, chosen, start, v_slots, v_full, V_STAGES, tiles, N, SIZE, STEPS, BN)
    if REST > 0:
        rest_slots, rest_full = ring(K_REST, K_STAGES)
        _start(K_REST, b, h, chosen, start, rest_slots, rest_full, K_STAGES, tiles, N, SIZE, STEPS, BN)

    g, row_g = gl.arange(0, GP, gl.SliceLayout(1, flat)), gl.arange(0, GP, gl.SliceLayout(1, mma))
    first_row = (b.to(gl.int64) * S + i) * HQ + h * G
    at_q = b.to(gl.int64) * q_b + i.to(gl.int64) * q_s + (h * G + g) * q_h
    q = load_rows(Q, at_q, g < G, D, flat)
    q_left = gl.convert_layout(q, left)
    if REST > 0:
        q_rest = load_rows(Q, at_q + D, g < G, REST, flat)
        q_rest_left = gl.convert_layout(q_rest, left)
        nonfinite_q = nonfinite(q) | nonfinite(q_rest)  # here, so that they need no registers in the loop

    m = gl.full([GP], float("-inf"), gl.float32, gl.SliceLayout(1, mma))
    l, acc, read = gl.zeros_like(m), gl.zeros([GP, D], gl.float32, mma), whole * BN
    for stretch in gl.static_range(2):
        for number in range(0 if stretch == 0 else whole, whole if stretch == 0 else tiles):
            next_k_at = _first_key(chosen, number + K_STAGES, start, N, SIZE, STEPS, BN)
            next_v_at = _first_key(chosen, number + V_STAGES, start, N, SIZE, STEPS, BN)
            wait(k_full, number, K_STAGES)
            k = tile(k_slots, number, K_STAGES).permute((1, 0)).load(right)
            s = mma_v2(q_left, k, gl.zeros([GP, BN], gl.float32, mma))
            next_k = number + K_STAGES
            fence_async_shared()
            fetch(K, b, next_k_at, h, k_slots, k_full, next_k, K_STAGES, next_k < tiles)
            if REST > 0:
                wait(rest_full, number, K_STAGES)
                s = mma_v2(q_rest_left, tile(rest_slots, number, K_STAGES).permute((1, 0)).load(right), s)
                fence_async_shared()
                fetch(K_REST, b, next_k_at, h, rest_slots, rest_full, next_k, K_STAGES, next_k < tiles)
            if stretch == 1:
                at = _first_key(chosen, number, start, N, SIZE, STEPS, BN)
                visible = at + gl.arange(0, BN, gl.SliceLayout(0, mma)) <= token
                s = gl.where(gl.expand_dims(visible, 0), s, float("-inf"))
                read += gl.sum(visible.to(gl.int32), 0)
            p, alpha, m, l = softmax(s, m, l, to_base_2)
            wait(v_full, number, V_STAGES)
            v = tile(v_slots, number, V_STAGES).load(right)
            if stretch == 1:  # what is not seen may not be finite
                seen = at + gl.arange(0, BN, gl.SliceLayout(1, right)) <= token
                v = gl.where(gl.expand_dims(seen, 1), v, 0.0).to(v.dtype)
            acc = mma_v2(gl.convert_layout(p.to(v.dtype), left), v, acc * gl.expand_dims(alpha, 1))
            next_v = number + V_STAGES
            fence_async_shared()
            fetch(V, b, next_v_at, h, v_slots, v_full, next_v, V_STAGES, next_v < tiles)

    if REST == 0:
        nonfinite_q = nonfinite(q)
    nonfinite_rows = gl.convert_layout(nonfinite_q, gl.SliceLayout(1, mma)) & (read > 0)
    factor, lse = finish(m, l, to_base_2, nonfinite_rows)
    gl.store(LSE + (first_row + row_g), lse, mask=row_g < G)
    gl.store(READ + ((b.to(gl.int64) * S + i) * HKV + h), read)
    row = first_row + g
    o = gl.convert_layout((acc * gl.expand_dims(factor, 1)).to(O.dtype.element_ty), flat)
    store_rows(O, row * D, g < G, o, D, flat)
    if SUM is not None:
        o_cmp, o_win = load_rows(O_CMP, row * D, g < G, D, flat), load_rows(O_WIN, row * D, g < G, D, flat)
        store_rows(SUM, row * D, g < G, gated(GATES, row, g < G, o_cmp, o, o_win), D, flat)


@kernel
def _backward_q(
    Q, K, K_REST, V, DO, BLOCKS, STARTS, COUNTS, LSE, DELTA, DQ, DQ_CMP, DQ_WIN, q_b, q_s, q_h,
    S, ahead, HQ, HKV, G, max_shared, scale, to_base_2, TOKENS: gl.constexpr, N: gl.constexpr, NP: gl.constexpr,
    SIZE: gl.constexpr, D: gl.constexpr, REST: gl.constexpr, GP: gl.constexpr, BN: gl.constexpr,
    K_STAGES: gl.constexpr, V_STAGES: gl.constexpr,
):  # fmt: skip
    STEPS: gl.constexpr = SIZE // BN
    mma: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, 1], [16, 8])
    left: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    right: gl.constexpr = gl.DotOperandLayout(1, mma, 2)
    flat: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [1, 1], [1, 0])

    i, h, b = gl.program_id(0), gl.program_id(1), gl.program_id(2)
    if COUNTS is not None:
        elsewhere = _shares_blocks(COUNTS, i, h, b, S, HKV, max_shared, TOKENS)
        if elsewhere:
            return
    token, start = i.to(gl.int64) + ahead, gl.load(STARTS + i)
    chosen = BLOCKS + ((b.to(gl.int64) * S + i) * HKV + h) * N
    whole, tiles = _tiles(chosen, token, start, N, NP, SIZE, STEPS)
    k_slots, k_full = ring(K, K_STAGES)
    v_slots, v_full = ring(V, V_STAGES)
    _start(K, b, h, chosen, start, k_slots, k_full, K_STAGES, tiles, N, SIZE, STEPS, BN)
    _start(V, b, h, chosen, start, v_slots, v_full, V_STAGES, tiles, N, SIZE, STEPS, BN)
    if REST > 0:
        rest_slots, rest_full = ring(K_REST, K_STAGES)
        _start(K_REST, b, h, chosen, start, rest_slots, rest_full, K_STAGES, tiles, N, SIZE, STEPS, BN)

    g, row_g = gl.arange(0, GP, gl.SliceLayout(1, flat)), gl.arange(0, GP, gl.SliceLayout(1, mma))
    first_row = (b.to(gl.int64) * S + i) * HQ + h * G
    at_q = b.to(gl.int64) * q_b + i.to(gl.int64) * q_s + (h * G + g) * q_h
    q = load_rows(Q, at_q, g < G, D, flat)
    do = load_rows(DO, (first_row + g) * D, g < G, D, flat)
    q, do = gl.convert_layout(q, left), gl.convert_layout(do, left)
    lse = gl.expand_dims(gl.load(LSE + (first_row + row_g), mask=row_g < G, other=0.0), 1)
    delta = gl.expand_dims(gl.load(DELTA + (first_row + row_g), mask=row_g < G, other=0.0), 1)

    dq = gl.zeros([GP, D], gl.float32, mma)
    if REST > 0:
        q_rest = gl.convert_layout(load_rows(Q, at_q + D, g < G, REST, flat), left)
        dq_rest = gl.zeros([GP, REST], gl.float32, mma)
    for stretch in gl.static_range(2):
        for number in range(0 if stretch == 0 else whole, whole if stretch == 0 else tiles):
            next_k_at = _first_key(chosen, number + K_STAGES, start, N, SIZE, STEPS, BN)
            next_v_at = _first_key(chosen, number + V_STAGES, start, N, SIZE, STEPS, BN)
            wait(k_full, number, K_STAGES)
            wait(v_full, number, V_STAGES)
            k_tile, v_tile = tile(k_slots, number, K_STAGES), tile(v_slots, number, V_STAGES)
            nothing = gl.zeros([GP, BN], gl.float32, mma)
            s = mma_v2(q, k_tile.permute((1, 0)).load(right), nothing)
            if REST > 0:
                wait(rest_full, number, K_STAGES)
                rest_tile = tile(rest_slots, number, K_STAGES)
                s = mma_v2(q_rest, rest_tile.permute((1, 0)).load(right), s)
            dp = mma_v2(do, v_tile.permute((1, 0)).load(right), nothing)
            p = gl.exp2(s * to_base_2 - lse)
            ds, k = p * (dp - delta), k_tile.load(right)
            if stretch == 1:  # what is not seen may not be finite
                at = _first_key(chosen, number, start, N, SIZE, STEPS, BN)
                visible = at + gl.arange(0, BN, gl.SliceLayout(0, mma)) <= token
                seen = at + gl.arange(0, BN, gl.SliceLayout(1, right)) <= token
                ds = gl.where(gl.expand_dims(visible, 0), ds, 0.0)
                k = gl.where(gl.expand_dims(seen, 1), k, 0.0).to(k.dtype)
            ds_left = gl.convert_layout(ds.to(k.dtype), left)
            dq = mma_v2(ds_left, k, dq)
            next_v, next_k = number + V_STAGES, number + K_STAGES
            if REST > 0:
                k_rest = rest_tile.load(right)
                if stretch == 1:
                    k_rest = gl.where(gl.expand_dims(seen, 1), k_rest, 0.0).to(k.dtype)
                dq_rest = mma_v2(ds_left, k_rest, dq_rest)
            fence_async_shared()
            if REST > 0:
                fetch(K_REST, b, next_k_at, h, rest_slots, rest_full, next_k, K_STAGES, next_k < tiles)
            fetch(V, b, next_v_at, h, v_slots, v_full, next_v, V_STAGES, next_v < tiles)
            fetch(K, b, next_k_at, h, k_slots, k_full, next_k, K_STAGES, next_k < tiles)
    row = (first_row + g) * (D + REST)
    store_dq(DQ, DQ_CMP, DQ_WIN, row, g < G, dq * scale, D, flat)
    if REST > 0:
        store_dq(DQ, DQ_CMP, DQ_WIN, row + D, g < G, dq_rest * scale, REST, flat)


def forward(
    q: Tensor, k: Tensor, v: Tensor, block_indices: Tensor, layout: Layout, scale: float,
    o: Tensor, lse: Tensor, read: Tensor, whole: tuple[Tensor, Tensor, Tensor, Tensor] | None,
    shared: tuple[Tensor, int] | None = None,
) -> None:  # fmt: skip
    """Write o, lse and read, and the gated sum of a `whole` call; `selected.forward` says what they are. With
    `shared`, counts int32 [B, Hkv, tiles, 2] of `Unions` of FORWARD_TOKENS queries and the most blocks that a tile
    shares, of the other tiles."""
    (batch, length, heads, _), num_kv_heads = q.shape, k.shape[2]
    constants, keys, options = _launch("forward", q, v, block_indices, layout)
    counts, max_shared = shared or (None, 0)
    _forward[length, num_kv_heads, batch](
        q, *descriptors(k, keys), descriptor(v, keys), block_indices, layout.starts, counts, o, lse, read,
        *(whole or 4 * (None,)), *strides(q),
        length, layout.num_keys - length, heads, num_kv_heads, heads // num_kv_heads, max_shared, scale * LOG2E,
        FORWARD_TOKENS, *constants, **options,
    )  # fmt: skip


def backward_q(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, block_indices: Tensor, layout: Layout, scale: float,
    lse: Tensor, delta: Tensor, dq: Tensor, more_dq: tuple[Tensor, Tensor] | None,
    shared: tuple[Tensor, int] | None = None,
) -> None:  # fmt: skip
    """Write dq, with `more_dq` of the other branches; lse (base 2) and delta are those of `launch.backward_rows`. With
    `shared`, as `forward` does, of DQ_TOKENS queries."""
    (batch, length, heads, _), num_kv_heads = q.shape, k.shape[2]
    constants, keys, options = _launch("backward_q", q, v, block_indices, layout)
    counts, max_shared = shared or (None, 0)
    _backward_q[length, num_kv_heads, batch](
        q, *descriptors(k, keys), descriptor(v, keys), do, block_indices, layout.starts, counts, lse, delta, dq,
        *(more_dq or (None, None)), *strides(q),
        length, layout.num_keys - length, heads, num_kv_heads, heads // num_kv_heads, max_shared, scale, scale * LOG2E,
        DQ_TOKENS, *constants, **options,
    )  # fmt: skip


def _launch(
    kernel: str, q: Tensor, v: Tensor, block_indices: Tensor, layout: Layout
) -> tuple[tuple[int, ...], int, dict[str, int]]:
    """(constants, keys per tile, keywords) of a kernel's launch."""
    shape, n = tuning.shape(f"hopper.selected_{kernel}", q, v), block_indices.shape[-1]
    group = tuning.padded(q.shape[2] // v.shape[2])
    d = v.shape[3]
    constants = (n, next_power_of_2(n), layout.config.l_sel, d, q.shape[3] - d, group, shape.keys)
    return (*constants, shape.num_stages, shape.value_stages), shape.keys, shape.launch
