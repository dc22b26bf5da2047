"""The selected branch: a program per token and group reads the blocks that it chose.

The heads of a group share each key they load. The backward pass for keys and values turns the choice around
(`nsa.inverted_index`): a program takes up to PAIRS queries that chose one block and writes a partial sum, and a
second kernel adds a block's partial sums in order; no atomics, so it repeats bit for bit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa import inverted_index
from nsa.geometry import Layout
from nsa.triton_backend import by_block, tuning
from nsa.triton_backend.launch import LOG2E, MAX_TILE, backward_rows, on_device, strides, unit_stride
from nsa.triton_backend.tile import (
    dot,
    finish,
    kernel,
    load_rows,
    online_softmax,
    product,
    spoilt,
    store_rows,
)

PAIRS = 512  # queries per partial sum
LAST = tl.constexpr(2**31 - 2**30)  # above any query


@triton.jit
def _whole_blocks(chosen, token, start, N: tl.constexpr, NP: tl.constexpr, SIZE: tl.constexpr):
    """How many of a query's blocks it sees the whole of. Blocks ascend, so that these come first; -1 is last."""
    slot = tl.arange(0, NP)
    block = tl.load(chosen + slot, mask=slot < N, other=-1)
    return tl.sum(((block >= 0) & (start + (block + 1) * SIZE - 1 <= token)).to(tl.int32), axis=0)


@triton.jit
def _block(chosen, step, start, token, k_base, k_s, v_base, v_s, MASKED: tl.constexpr, SIZE: tl.constexpr,
           STEPS: tl.constexpr, DK: tl.constexpr, DKP: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr,
           BN: tl.constexpr):  # fmt: skip
    """(k, v, which of them the query sees) of one step over the blocks; what it does not see is not even loaded."""
    place = (step % STEPS * BN + tl.arange(0, BN)).to(tl.int64 if SIZE > MAX_TILE else tl.int32)
    block = tl.load(chosen + step // STEPS)
    first = start + block * SIZE  # int64
    visible = (block >= 0) & (first + place <= token) & (place < SIZE)
    loaded = visible if MASKED else None
    k = load_rows(k_base + first * k_s, place * k_s, loaded, DK, DKP)
    return k, load_rows(v_base + first * v_s, place * v_s, loaded, DV, DVP), visible


@kernel
def _forward(
    Q, K, V, BLOCKS, STARTS, O, LSE, READ, q_b, q_s, q_h, k_b, k_s, k_h, v_b, v_s, v_h, S, ahead, HQ, HKV, G, to_base_2,
    N: tl.constexpr, NP: tl.constexpr, SIZE: tl.constexpr, STEPS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    DKP: tl.constexpr, DVP: tl.constexpr, GP: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    i, h, b = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    token, start = i + ahead, tl.load(STARTS + i)
    g = tl.arange(0, GP)
    real = g < G
    q = load_rows(Q + b * q_b + i * q_s, (h * G + g) * q_h, real, DK, DKP)
    k_base, v_base = K + b * k_b + h * k_h, V + b * v_b + h * v_h

    chosen = BLOCKS + ((b * S + i) * HKV + h) * N
    whole = _whole_blocks(chosen, token, start, N, NP, SIZE) * STEPS if BN * STEPS == SIZE else 0

    top = tl.full([GP], float("-inf"), tl.float32)
    total, acc = tl.zeros([GP], tl.float32), tl.zeros([GP, DVP], tl.float32)
    read = whole * BN
    for step in range(whole):  # a flat loop, which is what the compiler pipelines
        k, v, _ = _block(chosen, step, start, token, k_base, k_s, v_base, v_s, False, SIZE, STEPS, DK, DKP, DV, DVP, BN)
        top, total, acc = online_softmax(product(q, k), v, top, total, acc, to_base_2)
    for step in range(whole, N * STEPS):
        k, v, visible = _block(
            chosen, step, start, token, k_base, k_s, v_base, v_s, True, SIZE, STEPS, DK, DKP, DV, DVP, BN
        )
        s = tl.where(visible[None, :], product(q, k), float("-inf"))
        top, total, acc = online_softmax(s, v, top, total, acc, to_base_2)
        read += tl.sum(visible.to(tl.int32), axis=0)
    o, lse = finish(top, total, acc, to_base_2, spoilt(q) & (read > 0))
    row = (b * S + i) * HQ + h * G + g
    store_rows(O, row * DV, real, o, DV, DVP)
    tl.store(LSE + row, lse, mask=real)
    tl.store(READ + (b * S + i) * HKV + h, read)


@kernel
def _backward_q(
    Q, K, V, DO, BLOCKS, STARTS, LSE, DELTA, DQ, q_b, q_s, q_h, k_b, k_s, k_h, v_b, v_s, v_h,
    S, ahead, HQ, HKV, G, scale, to_base_2,
    N: tl.constexpr, NP: tl.constexpr, SIZE: tl.constexpr, STEPS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    DKP: tl.constexpr, DVP: tl.constexpr, GP: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    i, h, b = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    token, start = i + ahead, tl.load(STARTS + i)
    g = tl.arange(0, GP)
    real = g < G
    row = (b * S + i) * HQ + h * G + g
    q = load_rows(Q + b * q_b + i * q_s, (h * G + g) * q_h, real, DK, DKP)
    do = load_rows(DO, row * DV, real, DV, DVP)
    lse, delta = tl.load(LSE + row, mask=real, other=0.0), tl.load(DELTA + row, mask=real, other=0.0)
    k_base, v_base = K + b * k_b + h * k_h, V + b * v_b + h * v_h

    chosen = BLOCKS + ((b * S + i) * HKV + h) * N
    whole = _whole_blocks(chosen, token, start, N, NP, SIZE) * STEPS if BN * STEPS == SIZE else 0

    dq = tl.zeros([GP, DKP], tl.float32)
    for step in range(whole):
        k, v, _ = _block(chosen, step, start, token, k_base, k_s, v_base, v_s, False, SIZE, STEPS, DK, DKP, DV, DVP, BN)
        p = tl.exp2(product(q, k) * to_base_2 - lse[:, None])
        ds = p * (product(do, v) - delta[:, None])
        dq = dot(ds.to(k.dtype), k, dq)
    for step in range(whole, N * STEPS):
        k, v, visible = _block(
            chosen, step, start, token, k_base, k_s, v_base, v_s, True, SIZE, STEPS, DK, DKP, DV, DVP, BN
        )
        p = tl.exp2(product(q, k) * to_base_2 - lse[:, None])
        ds = p * (product(do, v) - delta[:, None])
        dq = dot(tl.where(visible[None, :], ds, 0.0).to(k.dtype), k, dq)
    store_rows(DQ, row * DK, real, dq * scale, DK, DKP)


@kernel
def _backward_kv(
    Q, K, V, DO, QUERIES, BEGIN, END, BLOCK, BLOCK_FROM, BLOCK_TO, LSE, DELTA, DK_PART, DV_PART,
    q_b, q_s, q_h, k_b, k_s, k_h, v_b, v_s, v_h, S, ahead, HQ, HKV, G, max_blocks, scale, to_base_2,
    SIZE: tl.constexpr, SIZEP: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    DKP: tl.constexpr, DVP: tl.constexpr, BT: tl.constexpr, GP: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BN + tl.arange(0, BN)
    begin, end, number = tl.load(BEGIN + tile), tl.load(END + tile), tl.load(BLOCK + tile)
    if begin == end:
        return
    kv_row = number // max_blocks
    b, h = kv_row // HKV, kv_row % HKV
    key = tl.load(BLOCK_FROM + number % max_blocks) + place
    inside = (place < SIZE) & (key < tl.load(BLOCK_TO + number % max_blocks))
    k = load_rows(K + b * k_b + h * k_h, key * k_s, inside, DK, DKP)
    v = load_rows(V + b * v_b + h * v_h, key * v_s, inside, DV, DVP)

    # queries ascend: only the first of them may stand inside the block, at most one per token of it
    first = begin + tl.arange(0, SIZEP)
    query = tl.load(QUERIES + first, mask=first < end, other=LAST)
    partly = tl.sum((query + ahead < tl.max(key, axis=0)).to(tl.int32), axis=0)
    whole = tl.minimum(begin + tl.cdiv(partly, BT) * BT, end)

    dk, dv = tl.zeros([BN, DKP], tl.float32), tl.zeros([BN, DVP], tl.float32)
    for stretch in tl.static_range(2):
        for at in range(begin if stretch == 0 else whole, whole if stretch == 0 else end, BT):
            pair = at + tl.arange(0, BT * GP) // GP
            g = tl.arange(0, BT * GP) % GP
            real = (pair < end) & (g < G)
            i = tl.load(QUERIES + pair, mask=real, other=0).to(tl.int64)
            row = (b * S + i) * HQ + h * G + g
            lse, delta = tl.load(LSE + row, mask=real, other=0.0), tl.load(DELTA + row, mask=real, other=0.0)
            loaded = real & (lse == lse) if stretch == 0 else real
            q = load_rows(Q + b * q_b, i * q_s + (h * G + g) * q_h, loaded, DK, DKP)
            do = load_rows(DO, row * DV, loaded, DV, DVP)
            p = tl.exp2(product(k, q) * to_base_2 - lse[None, :])  # [keys, rows]
            ds = p * (product(v, do) - delta[None, :])
            if stretch == 0:
                visible = key[:, None] <= (i + ahead)[None, :]
                p, ds = tl.where(visible, p, 0.0), tl.where(visible, ds, 0.0)
            dv = dot(p.to(do.dtype), do, dv)
            dk = dot(ds.to(q.dtype), q, dk)
    out = tile * SIZE + place
    store_rows(DK_PART, out * DK, place < SIZE, dk * scale, DK, DKP)
    store_rows(DV_PART, out * DV, place < SIZE, dv, DV, DVP)


@kernel
def _sum_parts(
    PART, FIRST_TILE, BLOCK_FROM, BLOCK_TO, OUT, T, HKV, max_blocks,
    SIZE: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """OUT [B, T, Hkv, D] = the sum of each block's parts, tile after tile."""
    number, place = tl.program_id(0).to(tl.int64), tl.program_id(1) * BN + tl.arange(0, BN)
    kv_row = number // max_blocks
    key = tl.load(BLOCK_FROM + number % max_blocks) + place
    inside = (place < SIZE) & (key < tl.load(BLOCK_TO + number % max_blocks))
    acc = tl.zeros([BN, DP], tl.float32)
    for tile in range(tl.load(FIRST_TILE + number), tl.load(FIRST_TILE + number + 1)):
        acc += load_rows(PART, (tile * SIZE + place) * D, inside, D, DP)
    out = (kv_row // HKV * T + key) * HKV + kv_row % HKV
    store_rows(OUT, out * D, inside, acc, D, DP)


def forward(
    q: Tensor,  # [B, S, Hq, Dk]
    k: Tensor,  # [B, T, Hkv, Dk]
    v: Tensor,  # [B, T, Hkv, Dv]
    block_indices: Tensor,  # int32 [B, S, Hkv, n], distinct, -1 for none
    layout: Layout,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """(o, lse, keys read) over the tokens of each query's blocks at positions <= its own."""
    q, k, v, block_indices = unit_stride(q), unit_stride(k), unit_stride(v), block_indices.contiguous()
    (batch, length, heads, _), (kv_heads, dv) = q.shape, v.shape[2:]
    o, lse = q.new_empty(batch, length, heads, dv), q.new_empty(batch, length, heads, dtype=torch.float32)
    read = q.new_empty(batch, length, kv_heads, dtype=torch.int32)
    if o.numel() and by_block.serves(q, v, layout):
        by_block.forward(q, k, v, block_indices, layout, scale, o, lse, read)
    elif o.numel():
        sizes, launch = _per_token("selected_forward", q, v, block_indices, layout)
        with on_device(q):
            _forward[length, kv_heads, batch](
                q, k, v, block_indices, layout.starts, o, lse, read, *strides(q), *strides(k), *strides(v),
                length, layout.num_keys - length, heads, kv_heads, heads // kv_heads, scale * LOG2E,
                *sizes, **launch,
            )  # fmt: skip
    return o, lse, read


def backward(
    do: Tensor | None, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor,
    block_indices: Tensor, layout: Layout, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(dq, dk, dv), from what `forward` was given and gave; None is a gradient of 0."""
    q, k, v, block_indices = unit_stride(q), unit_stride(k), unit_stride(v), block_indices.contiguous()
    batch, length, heads, _ = q.shape
    kv_heads = k.shape[2]
    do = torch.zeros_like(o) if do is None else do.contiguous()
    lse, delta = backward_rows(do, o, lse, dlse)
    dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if dq.numel() == 0:
        return dq, k.new_zeros(k.shape), v.new_zeros(v.shape)
    sizes, launch = _per_token("selected_backward_q", q, v, block_indices, layout)
    with on_device(q):
        _backward_q[length, kv_heads, batch](
            q, k, v, do, block_indices, layout.starts, lse, delta, dq, *strides(q), *strides(k), *strides(v),
            length, layout.num_keys - length, heads, kv_heads, heads // kv_heads, scale, scale * LOG2E,
            *sizes, **launch,
        )  # fmt: skip
        dk, dv = _gradients_of_keys(q, k, v, do, lse, delta, block_indices, layout, scale)
    return dq, dk, dv


def _per_token(
    kernel: str, q: Tensor, v: Tensor, block_indices: Tensor, layout: Layout
) -> tuple[tuple[int, ...], dict[str, int]]:
    """Constants and launch of a kernel that takes one token per program."""
    group, dk, dv, size = q.shape[2] // v.shape[2], q.shape[3], v.shape[3], layout.config.l_sel
    shape = tuning.shape(kernel, q, v)
    keys = min(tuning.padded(size), shape.keys)
    steps = triton.cdiv(size, keys)
    n = block_indices.shape[-1]
    constants = (n, triton.next_power_of_2(n), size, steps, dk, dv, shape.dk, shape.dv, tuning.padded(group), keys)
    return constants, shape.launch


def _gradients_of_keys(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, lse: Tensor, delta: Tensor,
    block_indices: Tensor, layout: Layout, scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(dk, dv), from partial sums over tiles of queries that chose the same block."""
    (batch, length, heads, dk), (num_keys, kv_heads, dv) = q.shape, v.shape[1:]
    size, n, max_blocks = layout.config.l_sel, block_indices.shape[-1], layout.max_blocks
    chosen = block_indices.transpose(1, 2).long()  # [B, Hkv, S, n]
    kv_row = torch.arange(batch * kv_heads, device=q.device).view(batch, kv_heads, 1, 1)
    number = kv_row * max_blocks + layout.blocks_before[:, None] + chosen
    num_blocks = batch * kv_heads * max_blocks
    tiles = inverted_index.build(torch.where(chosen < 0, -1, number).flatten(), PAIRS, num_blocks)
    queries = (tiles.order // n % length).int()
    block_from, block_to = layout.block_tokens

    shape = tuning.shape("selected_backward_kv", q, v)
    keys = min(tuning.padded(size), shape.keys)
    dk_part = q.new_empty(tiles.begin.numel(), size, dk, dtype=torch.float32)
    dv_part = q.new_empty(tiles.begin.numel(), size, dv, dtype=torch.float32)
    _backward_kv[tiles.begin.numel(), triton.cdiv(size, keys)](
        q, k, v, do, queries, tiles.begin, tiles.end, tiles.block, block_from, block_to, lse, delta,
        dk_part, dv_part, *strides(q), *strides(k), *strides(v),
        length, num_keys - length, heads, kv_heads, heads // kv_heads, max_blocks, scale, scale * LOG2E,
        size, tuning.padded(size), dk, dv, shape.dk, shape.dv, shape.tokens, shape.group, keys, **shape.launch,
    )  # fmt: skip

    gradients = []
    for part, like in ((dk_part, k), (dv_part, v)):
        out = like.new_zeros(like.shape)
        _sum_parts[num_blocks, triton.cdiv(size, keys)](
            part, tiles.first_tile, block_from, block_to, out, num_keys, kv_heads, max_blocks,
            size, like.shape[3], tuning.padded(like.shape[3]), keys,
        )  # fmt: skip
        gradients.append(out)
    return gradients[0], gradients[1]
