"""The selected branch: a program per token and group reads the blocks that it chose.

The heads of a group share each key they load. Gradients of keys and values are those of `selected_kv_major.py`, which
serves other calls as well: `dispatch.py`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa.geometry import Layout, num_selection_blocks
from nsa.triton_backend import block_unions, hopper, selected_kv_major, selected_masked, tuning
from nsa.triton_backend.dispatch import SelectionBlocks, Variant, max_shared_blocks, variant
from nsa.triton_backend.gated_sum import gated
from nsa.triton_backend.launch import LOG2E, MAX_TILE, backward_rows, finite_keys, strides, unit_stride
from nsa.triton_backend.launching.lanes import QUERIES, lane
from nsa.triton_backend.launching.relaunch import on_device
from nsa.triton_backend.selected_masked import NO_MASKS, Masks
from nsa.triton_backend.tile import (
    add_branches,
    dot,
    finish,
    kernel,
    load_rows,
    nonfinite,
    online_softmax,
    product,
    store_rows,
)
from nsa.triton_backend.tuning import cdiv, next_power_of_2


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
    Q, K, V, BLOCKS, STARTS, O, LSE, READ, O_CMP, O_WIN, GATES, SUM, q_b, q_s, q_h, k_b, k_s, k_h, v_b, v_s, v_h,
    S, ahead, HQ, HKV, G, to_base_2,
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
    # where steps do not divide a block, its last one needs a mask although the query sees the whole block
    whole = _whole_blocks(chosen, token, start, N, NP, SIZE) * STEPS if BN * STEPS == SIZE else 0

    m = tl.full([GP], float("-inf"), tl.float32)
    l, acc = tl.zeros([GP], tl.float32), tl.zeros([GP, DVP], tl.float32)
    read = whole * BN
    for step in range(whole):  # a flat loop, which is what the compiler pipelines
        k, v, _ = _block(chosen, step, start, token, k_base, k_s, v_base, v_s, False, SIZE, STEPS, DK, DKP, DV, DVP, BN)
        m, l, acc = online_softmax(product(q, k), v, m, l, acc, to_base_2)
    for step in range(whole, N * STEPS):
        k, v, visible = _block(
            chosen, step, start, token, k_base, k_s, v_base, v_s, True, SIZE, STEPS, DK, DKP, DV, DVP, BN
        )
        s = tl.where(visible[None, :], product(q, k), float("-inf"))
        m, l, acc = online_softmax(s, v, m, l, acc, to_base_2)
        read += tl.sum(visible.to(tl.int32), axis=0)
    o, lse = finish(m, l, acc, nonfinite(q) & (read > 0))
    row = (b * S + i) * HQ + h * G + g
    o = o.to(O.dtype.element_ty)
    store_rows(O, row * DV, real, o, DV, DVP)
    if SUM is not None:
        o_cmp, o_win = load_rows(O_CMP, row * DV, real, DV, DVP), load_rows(O_WIN, row * DV, real, DV, DVP)
        store_rows(SUM, row * DV, real, gated(GATES, row, real, o_cmp, o, o_win), DV, DVP)
    tl.store(LSE + row, lse, mask=real)
    tl.store(READ + (b * S + i) * HKV + h, read)


@kernel
def _backward_q(
    Q, K, V, DO, BLOCKS, STARTS, LSE, DELTA, DQ, DQ_CMP, DQ_WIN, q_b, q_s, q_h, k_b, k_s, k_h, v_b, v_s, v_h,
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
    dq = add_branches(dq * scale, DQ_CMP, DQ_WIN, row, real, DQ, DK, DKP)
    store_rows(DQ, row * DK, real, dq, DK, DKP)


def forward(
    q: Tensor,  # [B, S, Hq, Dk]
    k: Tensor,  # [B, T, Hkv, Dk]
    v: Tensor,  # [B, T, Hkv, Dv]
    block_indices: Tensor,  # int32 [B, S, Hkv, n], distinct, -1 for none
    layout: Layout,
    scale: float,
    masks: Masks = NO_MASKS,  # as far as they are known already
    whole: tuple[Tensor, Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Masks]:
    """(o, lse, keys read) over the tokens of each query's blocks at positions <= its own; masks, if it reads any.

    Of a `whole` call (o_cmp, o_win, gates, sum), all contiguous, the gated sum of the branches is written too.
    """
    q, k, v, block_indices = unit_stride(q), unit_stride(k), unit_stride(v), block_indices.contiguous()
    (batch, length, heads, _), (num_kv_heads, dv) = q.shape, v.shape[2:]
    blocks = _blocks(layout, block_indices.shape[-1])
    kernel = variant("selected_forward", q, k, v, blocks)
    if kernel is Variant.MASKED:
        return selected_masked.forward(q, k, v, block_indices, layout, scale, masks, whole)
    o, lse = q.new_empty(batch, length, heads, dv), q.new_empty(batch, length, heads, dtype=torch.float32)
    read = q.new_empty(batch, length, num_kv_heads, dtype=torch.int32)
    if o.numel() == 0:
        return o, lse, read, NO_MASKS
    if kernel is Variant.KV_MAJOR:
        selected_kv_major.forward(q, k, v, block_indices, layout, scale, masks.finite, o, lse, read, whole, blocks)
        return o, lse, read, NO_MASKS
    if kernel is Variant.SHARED:
        finite = finite_keys(k, v) if masks.finite is None else masks.finite
        unions = block_unions.unions(block_indices, finite, layout, block_unions.FORWARD_TOKENS)
        max_shared = max_shared_blocks("selected_forward", q, k, v, blocks)
        with on_device(q):
            hopper.shared_blocks.forward(q, k, v, finite, unions, layout, scale, o, lse, read, whole, max_shared)
            if max_shared is not None:
                of_others = unions.counts, max_shared
                hopper.selected.forward(q, k, v, block_indices, layout, scale, o, lse, read, whole, of_others)
    elif kernel is Variant.HOPPER:
        with on_device(q):
            hopper.selected.forward(q, k, v, block_indices, layout, scale, o, lse, read, whole)
    else:
        sizes, launch = _per_token("selected_forward", q, v, block_indices, layout)
        with on_device(q):
            _forward[length, num_kv_heads, batch](
                q, k, v, block_indices, layout.starts, o, lse, read, *(whole or 4 * (None,)),
                *strides(q), *strides(k), *strides(v),
                length, layout.num_keys - length, heads, num_kv_heads, heads // num_kv_heads, scale * LOG2E,
                *sizes, **launch,
            )  # fmt: skip
    return o, lse, read, NO_MASKS


def gradients(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, lse: Tensor, delta: Tensor, block_indices: Tensor, layout: Layout,
    scale: float, more_dq: tuple[Tensor, Tensor] | None = None, wide: bool = False, masks: Masks = NO_MASKS,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(dq, dk, dv); lse (base 2) and delta are those of `launch.backward_rows`, do is contiguous.

    `more_dq`, those of the other branches, contiguous, are added to dq; the first may be overwritten. `wide` leaves dk
    and dv in float32. `masks` are those of `forward`, of the same call. dq is made in the lane QUERIES.
    """
    q, k, v, block_indices = unit_stride(q), unit_stride(k), unit_stride(v), block_indices.contiguous()
    (_, length, heads, _), num_kv_heads = q.shape, k.shape[2]
    blocks = _blocks(layout, block_indices.shape[-1])
    kernel = variant("selected_backward_q", q, k, v, blocks)
    if q.numel() == 0:
        return torch.empty_like(q), k.new_zeros(k.shape), v.new_zeros(v.shape)
    rows = do, lse, delta, block_indices, layout, scale
    if kernel is Variant.MASKED:
        return selected_masked.gradients(q, k, v, *rows, more_dq, wide, masks)
    # in the place of the compressed branch's, of which each program reads what it overwrites
    dq = None if more_dq is None else more_dq[0]
    if kernel is Variant.KV_MAJOR:
        dq = torch.empty(q.shape, dtype=q.dtype, device=q.device) if dq is None else dq
        return dq, *selected_kv_major.backward(q, k, v, *rows, dq, more_dq, wide, blocks)
    dk, dv = selected_kv_major.backward(q, k, v, *rows, None, None, wide, blocks)
    with lane(QUERIES), on_device(q):
        if dq is None:  # not before: without lanes, the partial sums of dk and dv are freed now
            dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        of_rows = layout, scale, lse, delta, dq, more_dq
        if kernel is Variant.SHARED:
            finite = finite_keys(k, v) if masks.finite is None else masks.finite
            unions = block_unions.unions(block_indices, finite, layout, block_unions.DQ_TOKENS)
            max_shared = max_shared_blocks("selected_backward_q", q, k, v, blocks)
            hopper.shared_blocks_dq.backward_q(q, k, v, finite, unions, do, *of_rows, max_shared)
            if max_shared is not None:
                hopper.selected.backward_q(q, k, v, do, block_indices, *of_rows, (unions.counts, max_shared))
        elif kernel is Variant.HOPPER:
            hopper.selected.backward_q(q, k, v, do, block_indices, *of_rows)
        else:
            sizes, launch = _per_token("selected_backward_q", q, v, block_indices, layout)
            _backward_q[length, num_kv_heads, q.shape[0]](
                q, k, v, do, block_indices, layout.starts, lse, delta, dq, *(more_dq or (None, None)),
                *strides(q), *strides(k), *strides(v),
                length, layout.num_keys - length, heads, num_kv_heads, heads // num_kv_heads, scale, scale * LOG2E,
                *sizes, **launch,
            )  # fmt: skip
    return dq, dk, dv


def backward(
    do: Tensor | None, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor,
    block_indices: Tensor, layout: Layout, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(dq, dk, dv), from what `forward` was given and gave; None is a gradient of 0."""
    do = torch.zeros_like(o) if do is None else do.contiguous()
    return gradients(q, k, v, do, *backward_rows(do, o, lse, dlse), block_indices, layout, scale)


def finite_keys_of(q: Tensor, k: Tensor, v: Tensor, layout: Layout) -> Tensor | None:
    """`launch.finite_keys` for `forward` in a call of all branches; None where the kernel that serves it reads none."""
    kernel = variant("selected_forward", q, k, v, _blocks(layout, layout.config.n_sel))
    return finite_keys(k, v) if kernel in (Variant.MASKED, Variant.KV_MAJOR, Variant.SHARED) else None


def masks_of_backward(q: Tensor, k: Tensor, v: Tensor, block_indices: Tensor, layout: Layout, masks: Masks) -> Masks:
    """`masks`, and those that `gradients` of unit strides would have to make, which several lanes read."""
    kernel = variant("selected_backward_q", q, k, v, _blocks(layout, block_indices.shape[-1]))
    if kernel is not Variant.MASKED or not q.numel():
        return masks
    return Masks(*selected_masked.known(k, v, block_indices, masks))


def makes_masks(q: Tensor, k: Tensor, v: Tensor, layout: Layout) -> bool:
    """Whether `forward` gives masks, in a call of all branches."""
    return variant("selected_forward", q, k, v, _blocks(layout, layout.config.n_sel)) is Variant.MASKED


def _blocks(layout: Layout, n: int) -> SelectionBlocks:
    """What the choice of a kernel looks at; n blocks per query."""
    config = layout.config
    forced = min((config.init_blocks + config.local_blocks) / max(n, 1), 1.0)
    whole = layout.sequence_tokens
    count = layout.max_blocks if whole is None else num_selection_blocks(whole, config)
    return SelectionBlocks(config.l_sel, forced, count, n, layout.cu_seqlens is not None, whole)


def _per_token(
    kernel: str, q: Tensor, v: Tensor, block_indices: Tensor, layout: Layout
) -> tuple[tuple[int, ...], dict[str, int]]:
    """Constants and launch of a kernel that takes one token per program."""
    group, dk, dv, size = q.shape[2] // v.shape[2], q.shape[3], v.shape[3], layout.config.l_sel
    shape = tuning.shape(kernel, q, v)
    keys = min(tuning.padded(size), shape.keys)
    steps = cdiv(size, keys)
    n = block_indices.shape[-1]
    constants = (n, next_power_of_2(n), size, steps, dk, dv, shape.dk, shape.dv, tuning.padded(group), keys)
    return constants, shape.launch
