"""The selected branch where neighbouring queries chose alike: a block is brought once for all queries of a tile.

`hopper/selected.py` reads the blocks of one query, 512 KiB through L2 for 16 blocks of 64 keys of 128 channels. Here 4
queries of 16 heads are 64 rows, which a warpgroup multiplies with each block that any of them chose, under a mask of
those that did. The loop is that of `compressed_window._forward`; dq: `hopper/shared_blocks_dq.py`.
"""

from __future__ import annotations

from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import jit
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from nsa.geometry import Layout
from nsa.triton_backend import tuning
from nsa.triton_backend.block_unions import FORWARD_TOKENS, Unions
from nsa.triton_backend.hopper.tile import (
    descriptor,
    descriptors,
    fetch,
    finish,
    finite_keys,
    gated,
    kernel,
    load_rows,
    nonfinite,
    ring,
    rows_of,
    shared,
    softmax,
    store_rows,
    tile,
    wait,
    zero_rows,
)
from nsa.triton_backend.launch import LOG2E, strides

PERIOD = gl.constexpr(128)  # pieces of a sequence begin at multiples of so many tokens


@jit
def shares_blocks(counts, i, max_shared, TOKENS: gl.constexpr):
    """Whether the `i`-th tile of a head, of TOKENS queries, shares its blocks: where the previous tile has at most
    `max_shared` blocks (None: always); the first tile of each period always does.

    Its own blocks do not decide, so that the last bits of a query's results do not depend on what later queries chose.
    Nor do those of another period, so that a piece of a sequence that begins with a period has the bits of the whole. A
    piece that begins elsewhere is padded in front; its first tile may share where that of the whole does not.
    """
    if max_shared is None:
        shares = True
    else:
        shares = (i % (PERIOD // TOKENS) == 0) | (gl.load(counts + gl.maximum(i - 1, 0) * 2) <= max_shared)
    return shares


@jit
def first_key_of(entry, BT: gl.constexpr, BN: gl.constexpr):
    """Of the block of an entry of `Unions`, of BT queries."""
    return (entry >> (BT + 1)) * BN


@jit
def has_nonfinite(entry, BT: gl.constexpr):
    """Whether any key of that block is not finite."""
    return ((entry >> BT) & 1) != 0


@jit
def _first_key(entries, number, num_blocks, BT: gl.constexpr, BN: gl.constexpr):
    """Of the `number`-th block; of the last where there are not as many."""
    return first_key_of(gl.load(entries + gl.minimum(number, num_blocks - 1)), BT, BN)


@jit
def _start(source, b, h, entries, slots, full, STAGES: gl.constexpr, num_blocks, BT: gl.constexpr, BN: gl.constexpr):
    """Begin to bring the first STAGES blocks."""
    for number in gl.static_range(STAGES):
        at = _first_key(entries, number, num_blocks, BT, BN)
        fetch(source, b, at, h, slots, full, number, STAGES, number < num_blocks)


@kernel
def _forward(
    Q, K, K_REST, V, FINITE, UNIONS, COUNTS, O, LSE, READ, O_CMP, O_WIN, GATES, SUM, q_b, q_s, q_h,
    S, T, ahead, HQ, HKV, G, max_shared, to_base_2, ENTRIES: gl.constexpr, D: gl.constexpr, REST: gl.constexpr,
    BT: gl.constexpr, GP: gl.constexpr, BN: gl.constexpr, K_STAGES: gl.constexpr, V_STAGES: gl.constexpr,
):  # fmt: skip
    WARPS: gl.constexpr = gl.num_warps()
    ROWS: gl.constexpr = BT * GP
    gl.static_assert(ROWS == 16 * WARPS, "a warpgroup takes 64 rows")
    of_s: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BN, 16])  # [rows, keys]
    of_o: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, D, 16])  # [rows, channels]
    of_p: gl.constexpr = gl.DotOperandLayout(0, of_o, 2)
    flat: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])  # as memory is read and written

    i, h, b = gl.program_id(0), gl.program_id(1), gl.program_id(2)
    of_head = (b.to(gl.int64) * HKV + h) * gl.num_programs(0)
    counts, entries = COUNTS + of_head * 2, UNIONS + (of_head + i) * ENTRIES
    if not shares_blocks(counts, i, max_shared, BT):
        return
    num_blocks, num_full = gl.load(counts + i * 2), gl.load(counts + i * 2 + 1)
    k_slots, k_full = ring(K, K_STAGES)
    v_slots, v_full = ring(V, V_STAGES)
    _start(K, b, h, entries, k_slots, k_full, K_STAGES, num_blocks, BT, BN)
    _start(V, b, h, entries, v_slots, v_full, V_STAGES, num_blocks, BT, BN)
    if REST > 0:
        rest_slots, rest_full = ring(K_REST, K_STAGES)
        _start(K_REST, b, h, entries, rest_slots, rest_full, K_STAGES, num_blocks, BT, BN)

    token, g, real = rows_of(i * BT, S, G, BT, GP, gl.SliceLayout(1, flat))
    at_q = b.to(gl.int64) * q_b + token * q_s + (h * G + g) * q_h
    q = load_rows(Q, at_q, real, D, flat)
    nonfinite_q = gl.convert_layout(nonfinite(q), gl.SliceLayout(1, of_s))
    q_tile = shared(q)
    if REST > 0:
        q_rest = load_rows(Q, at_q + D, real, REST, flat)
        nonfinite_q |= gl.convert_layout(nonfinite(q_rest), gl.SliceLayout(1, of_s))
        q_rest_tile = shared(q_rest)
    fence_async_shared()

    finite_base = FINITE + (b.to(gl.int64) * T * HKV + h)
    in_tile = gl.arange(0, ROWS, gl.SliceLayout(1, of_s)) // GP
    behind = (i * BT + ahead + 1) + in_tile  # the first key that a row does not see
    m = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, of_s))
    l, read = gl.zeros_like(m), gl.zeros_like(in_tile)
    acc, nothing = gl.zeros([ROWS, D], gl.float32, of_o), gl.zeros([ROWS, BN], gl.float32, of_s)
    p = gl.convert_layout(nothing.to(Q.dtype.element_ty), of_p)
    wait(k_full, 0, K_STAGES)
    if REST > 0:
        wait(rest_full, 0, K_STAGES)
    # Block after block: scores of this one, sums of the one before. The first takes the mask of the last ones too.
    for stretch in gl.static_range(3):
        begin = 0 if stretch == 0 else (1 if stretch == 1 else gl.maximum(num_full, 1))
        stop = 1 if stretch == 0 else (num_full if stretch == 1 else num_blocks)
        for number in range(begin, stop):
            entry = gl.load(entries + number)
            at, nonfinite_keys = first_key_of(entry, BT, BN), has_nonfinite(entry, BT)
            next_k_at = _first_key(entries, number + K_STAGES, num_blocks, BT, BN)
            k = tile(k_slots, number, K_STAGES).permute((1, 0))
            scores = warpgroup_mma(q_tile, k, nothing, use_acc=False, is_async=True)
            if REST > 0:
                k_rest = tile(rest_slots, number, K_STAGES).permute((1, 0))
                scores = warpgroup_mma(q_rest_tile, k_rest, scores, is_async=True)
            if stretch > 0:
                next_v_at = _first_key(entries, number - 1 + V_STAGES, num_blocks, BT, BN)
                wait(v_full, number - 1, V_STAGES)
                sums = warpgroup_mma(p, tile(v_slots, number - 1, V_STAGES), acc, is_async=True)
                s = warpgroup_mma_wait(1, deps=[scores])
            else:
                s = warpgroup_mma_wait(0, deps=[scores])
            next_k = number + K_STAGES
            fetch(K, b, next_k_at, h, k_slots, k_full, next_k, K_STAGES, next_k < num_blocks)
            if REST > 0:
                fetch(K_REST, b, next_k_at, h, rest_slots, rest_full, next_k, K_STAGES, next_k < num_blocks)
            chose = ((entry >> in_tile) & 1) != 0
            if stretch == 1:
                seen = gl.expand_dims(chose, 1)
                read += gl.where(chose, BN, 0)
            else:
                end = gl.where(chose, behind, 0)
                seen = gl.expand_dims(at + gl.arange(0, BN, gl.SliceLayout(0, of_s)), 0) < gl.expand_dims(end, 1)
                read += gl.maximum(gl.minimum(end - at, BN), 0)
            if nonfinite_keys:
                finite = finite_keys(finite_base, HKV, at, T, BN, gl.SliceLayout(0, of_s))
                s = gl.where(gl.expand_dims(finite, 0), s, float("nan"))
            exps, alpha, m, l = softmax(gl.where(seen, s, float("-inf")), m, l, to_base_2)
            next_p = gl.convert_layout(exps.to(Q.dtype.element_ty), of_p)
            wait(k_full, number + 1, K_STAGES, number + 1 < num_blocks)  # here, as in `compressed_window._forward`
            if REST > 0:
                wait(rest_full, number + 1, K_STAGES, number + 1 < num_blocks)
            if stretch > 0:
                acc, p, next_p = warpgroup_mma_wait(0, deps=[sums, p, next_p])
                next_v = number - 1 + V_STAGES
                fetch(V, b, next_v_at, h, v_slots, v_full, next_v, V_STAGES, next_v < num_blocks)
            if nonfinite_keys:  # 0 · NaN would reach queries that do not see them
                finite = finite_keys(finite_base, HKV, at, T, BN, gl.SliceLayout(1, flat))
                zero_rows(v_slots, v_full, number, V_STAGES, finite, flat)
            acc = acc * gl.expand_dims(gl.convert_layout(alpha, gl.SliceLayout(1, of_o)), 1)
            p = next_p
    wait(v_full, num_blocks - 1, V_STAGES)
    acc = warpgroup_mma(p, tile(v_slots, num_blocks - 1, V_STAGES), acc)

    factor, lse = finish(m, l, to_base_2, nonfinite_q & (read > 0))
    row_token, row_g, row_real = rows_of(i * BT, S, G, BT, GP, gl.SliceLayout(1, of_s))
    gl.store(LSE + ((b.to(gl.int64) * S + row_token) * HQ + h * G + row_g), lse, mask=row_real)
    gl.store(READ + ((b.to(gl.int64) * S + row_token) * HKV + h), read, mask=row_real & (row_g == 0))
    factor = gl.convert_layout(factor, gl.SliceLayout(1, of_o))
    token, g, real = rows_of(i * BT, S, G, BT, GP, gl.SliceLayout(1, flat))
    row = (b.to(gl.int64) * S + token) * HQ + h * G + g
    o = gl.convert_layout((acc * gl.expand_dims(factor, 1)).to(O.dtype.element_ty), flat)
    store_rows(O, row * D, real, o, D, flat)
    if SUM is not None:
        o_cmp, o_win = load_rows(O_CMP, row * D, real, D, flat), load_rows(O_WIN, row * D, real, D, flat)
        store_rows(SUM, row * D, real, gated(GATES, row, real, o_cmp, o, o_win), D, flat)


def forward(
    q: Tensor, k: Tensor, v: Tensor, finite: Tensor, unions: Unions, layout: Layout, scale: float,
    o: Tensor, lse: Tensor, read: Tensor, whole: tuple[Tensor, Tensor, Tensor, Tensor] | None,
    max_shared: int | None,
) -> None:  # fmt: skip
    """Write o, lse and read, and the gated sum of a `whole` call, of the tiles that `shares_blocks` names;
    `selected.forward` says what they are. `unions` are of FORWARD_TOKENS queries."""
    (batch, length, heads, dk), (num_keys, num_kv_heads, d) = q.shape, v.shape[1:]
    shape, (_, _, tiles, entries) = tuning.shape("hopper.shared_blocks_forward", q, v), unions.blocks.shape
    _forward[tiles, num_kv_heads, batch](
        q, *descriptors(k, shape.keys), descriptor(v, shape.keys), finite, unions.blocks, unions.counts, o, lse, read,
        *(whole or 4 * (None,)), *strides(q), length, num_keys, layout.num_keys - length, heads, num_kv_heads,
        heads // num_kv_heads, max_shared, scale * LOG2E, entries, d, dk - d, FORWARD_TOKENS,
        shape.rows // FORWARD_TOKENS, shape.keys, shape.num_stages, shape.value_stages, **shape.launch,
    )  # fmt: skip
