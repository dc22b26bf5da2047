"""`scores._group_probabilities`: the next product runs beside the exponentials of this one."""

from __future__ import annotations

from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from nsa.triton_backend.hopper import CHANNELS
from nsa.triton_backend.hopper.tile import (
    descriptors,
    fetch,
    kernel,
    load_rows,
    ring,
    rows_of,
    shared,
    start,
    tile,
    wait,
)
from nsa.triton_backend.launch import strides
from nsa.triton_backend.tuning import Shape


@kernel
def _group_probabilities(
    Q, K, K_REST, LSE, LO, HI, P, q_b, q_s, q_h, first_query, count, S, SLOTS, HQ, HKV, G, to_base_2, splits,
    D: gl.constexpr, REST: gl.constexpr, BT: gl.constexpr, GP: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    WARPS: gl.constexpr = gl.num_warps()
    gl.static_assert(BN == 16 * WARPS, "a warpgroup takes 64 blocks")
    gl.static_assert(STAGES > 1, "two tiles are waited for before the first is given back")
    of_s: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BT * GP, 16])  # [blocks, rows]
    flat: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    of_p: gl.constexpr = gl.BlockedLayout([1, 1], [32, 1], [2, WARPS // 2], [0, 1])  # [blocks, queries], as written
    # the last queries see the most blocks, so they start first
    number, split = gl.num_programs(0) // splits - 1 - gl.program_id(0) // splits, gl.program_id(0) % splits
    h, b = gl.program_id(1), gl.program_id(2)
    first_token, end_query = first_query + number * BT, first_query + count
    last_token = gl.minimum(first_token + BT, end_query) - 1
    first, end = gl.load(LO + first_token), gl.load(HI + last_token)
    per_split = gl.cdiv(gl.cdiv(end - first, BN), splits) * BN
    first += split * per_split
    end = gl.minimum(end, first + per_split)
    tiles = gl.cdiv(gl.maximum(end - first, 0), BN)

    slots, full = ring(K, STAGES)
    start(K, b, first, h, slots, full, STAGES, tiles, BN)
    token, g, real = rows_of(first_token, end_query, G, BT, GP, gl.SliceLayout(1, flat))
    at_q = b.to(gl.int64) * q_b + token * q_s + (h * G + g) * q_h
    q_tile = shared(load_rows(Q, at_q, real, D, flat))
    if REST > 0:
        rest_slots, rest_full = ring(K_REST, STAGES)
        start(K_REST, b, first, h, rest_slots, rest_full, STAGES, tiles, BN)
        q_rest_tile = shared(load_rows(Q, at_q + D, real, REST, flat))
    fence_async_shared()
    token, g, real = rows_of(first_token, end_query, G, BT, GP, gl.SliceLayout(0, of_s))
    lse = (
        gl.load(LSE + ((b.to(gl.int64) * S + token) * HQ + h * G + g), mask=real, other=float("inf"))
        * 1.4426950408889634
    )

    query = first_token + gl.arange(0, BT, gl.SliceLayout(0, of_p))
    place = gl.arange(0, BN, gl.SliceLayout(1, of_p))
    out = ((b.to(gl.int64) * count + query - first_query) * HKV + h) * SLOTS
    nothing = gl.zeros([BN, BT * GP], gl.float32, of_s)
    wait(full, 0, STAGES, tiles > 0)
    s = warpgroup_mma(tile(slots, 0, STAGES), q_tile.permute((1, 0)), nothing, use_acc=False)
    wait(full, 1, STAGES, tiles > 1)
    if REST > 0:
        wait(rest_full, 0, STAGES, tiles > 0)
        s = warpgroup_mma(tile(rest_slots, 0, STAGES), q_rest_tile.permute((1, 0)), s)
        wait(rest_full, 1, STAGES, tiles > 1)
    for this in range(tiles):
        then, wanted = this + STAGES, this + STAGES < tiles
        fetch(K, b, first + then * BN, h, slots, full, then, STAGES, wanted)
        k = tile(slots, this + 1, STAGES)  # behind the last there is one more product, of whatever stands there
        scores = warpgroup_mma(k, q_tile.permute((1, 0)), nothing, use_acc=False, is_async=True)
        if REST > 0:
            fetch(K_REST, b, first + then * BN, h, rest_slots, rest_full, then, STAGES, wanted)
            k_rest = tile(rest_slots, this + 1, STAGES)
            scores = warpgroup_mma(k_rest, q_rest_tile.permute((1, 0)), scores, is_async=True)
        p = gl.exp2(s * to_base_2 - gl.expand_dims(lse, 0))
        p = gl.convert_layout(gl.sum(p.reshape([BN, BT, GP]), 2), of_p)
        slot = first + this * BN + place
        inside = gl.expand_dims(slot < end, 1) & gl.expand_dims(query < end_query, 0)
        gl.store(P + (gl.expand_dims(out, 0) + gl.expand_dims(slot, 1)), p, mask=inside)
        wait(full, this + 2, STAGES, this + 2 < tiles)  # here, as in `compressed_window._forward`
        if REST > 0:
            wait(rest_full, this + 2, STAGES, this + 2 < tiles)
        s = warpgroup_mma_wait(0, deps=[scores])


def group_probabilities(
    q: Tensor, k_cmp: Tensor, lse: Tensor, bounds: tuple[Tensor, Tensor], p: Tensor, first: int, count: int,
    splits: int, shape: Shape, to_base_2: float,
) -> None:  # fmt: skip
    """Write p of `count` queries from `first` on, where a tile of theirs sees a block."""
    (batch, length, heads, dk), (slots, num_kv_heads) = q.shape, k_cmp.shape[1:3]
    tiles = -(-count // shape.tokens)
    _group_probabilities[tiles * splits, num_kv_heads, batch](
        q, *descriptors(k_cmp, shape.keys), lse, *bounds, p, *strides(q),
        first, count, length, slots, heads, num_kv_heads, heads // num_kv_heads, to_base_2, splits,
        CHANNELS, dk - CHANNELS, shape.tokens, shape.group, shape.keys, shape.num_stages, **shape.launch,
    )  # fmt: skip
