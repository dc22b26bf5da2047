"""phi = avg (Eq. 7), its gradient, and which keys are finite: what is done to keys and values before any attention.

A block's mean is the sum of its strides, each the sum of its tokens, in float32: in the same order for every block, so
that blocks that hold the same are equal. In the backward pass each token adds up what the blocks that hold it got, and
what the other branches gave to the same tensor, and is rounded once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa.geometry import Layout
from nsa.triton_backend.launch import KEYS, are_finite, strides, unit_stride
from nsa.triton_backend.launching.relaunch import on_device
from nsa.triton_backend.tile import kernel, load_rows, nonfinite, store_rows
from nsa.triton_backend.tuning import cdiv, padded

BLOCKS = 8  # per program
TOKENS = 32  # per program of the gradient

Places = tuple[Tensor, Tensor, Tensor | None, Tensor | None]
"""`Layout.slot_tokens`, and of packed documents the first of `Layout.compressed_interval` and `Layout.positions`."""


@triton.jit
def _mean(base, row, first, used, L: tl.constexpr, STRIDE: tl.constexpr, SIZE: tl.constexpr, PADDED: tl.constexpr,
          BN: tl.constexpr):  # fmt: skip
    """[BN, PADDED] in float32: the mean of L rows from each block's `first` on; 0 where not `used`.

    Added row by row: the order in which tl.sum adds follows from the layout, which differs from kernel to kernel.
    """
    total = tl.zeros([BN, PADDED], tl.float32)
    for number in tl.static_range(L // STRIDE):
        stride = tl.zeros([BN, PADDED], tl.float32)
        for place in tl.static_range(STRIDE):
            rows = (first + number * STRIDE + place) * row
            stride += load_rows(base, rows, used, SIZE, PADDED).to(tl.float32)
        total += stride
    return total / L


@triton.jit
def _means(
    K, V, K_OUT, V_OUT, FINITE_OUT, SLOT_TOKEN, SLOT_USED, k_b, k_s, k_h, v_b, v_s, v_h, number, h, b, slots, HKV,
    L: tl.constexpr, STRIDE: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, DKP: tl.constexpr, DVP: tl.constexpr,
    BN: tl.constexpr,
):  # fmt: skip
    """The `number`-th BN blocks of one sequence and group."""
    slot = number * BN + tl.arange(0, BN)
    token = tl.load(SLOT_TOKEN + slot, mask=slot < slots, other=0)
    used = tl.load(SLOT_USED + slot, mask=slot < slots, other=0) != 0
    out = (b * slots + slot) * HKV + h
    k = _mean(K + b * k_b + h * k_h, k_s, token, used, L, STRIDE, DK, DKP, BN).to(K_OUT.dtype.element_ty)
    if V is not None:  # before k is stored, so that nothing keeps the loads of v behind it
        v = _mean(V + b * v_b + h * v_h, v_s, token, used, L, STRIDE, DV, DVP, BN).to(V_OUT.dtype.element_ty)
        store_rows(V_OUT, out * DV, slot < slots, v, DV, DVP)
        tl.store(FINITE_OUT + out, ~(nonfinite(k) | nonfinite(v)), mask=slot < slots)
    store_rows(K_OUT, out * DK, slot < slots, k, DK, DKP)


@kernel
def _prepare(
    K, V, K_OUT, V_OUT, FINITE_OUT, SLOT_TOKEN, SLOT_USED, K_1, V_1, FINITE_1, k_b, k_s, k_h, v_b, v_s, v_h,
    k1_b, k1_s, k1_h, v1_b, v1_s, v1_h, slots, first, T, HKV, tiles,
    L: tl.constexpr, STRIDE: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, DKP: tl.constexpr, DVP: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """The first `tiles` programs write K_OUT and V_OUT [B, slots, Hkv, D] and FINITE_OUT of both; the others write
    FINITE_1 [B, T, Hkv] of K_1 and V_1 from the token `first` on. V and K_1 may be None."""
    number, h, b = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    if number < tiles:
        _means(
            K, V, K_OUT, V_OUT, FINITE_OUT, SLOT_TOKEN, SLOT_USED, k_b, k_s, k_h, v_b, v_s, v_h, number, h, b, slots,
            HKV, L, STRIDE, DK, DV, DKP, DVP, BN,
        )  # fmt: skip
    elif K_1 is not None:
        key = first + (number - tiles) * BK + tl.arange(0, BK)
        finite = are_finite(
            K_1 + b * k1_b + h * k1_h, V_1 + b * v1_b + h * v1_h, key * k1_s, key * v1_s, key < T, DK, DV, DKP, DVP
        )
        tl.store(FINITE_1 + (b * T + key) * HKV + h, finite, mask=key < T)


@triton.jit
def _of_blocks(PART, token, lo, last, slots, part, b, h, HKV, SLOT_TOKEN, SLOT_USED, real, splits, L: tl.constexpr,
               STRIDE: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BN: tl.constexpr):  # fmt: skip
    """[BN, DP] in float32: what the blocks that hold each token give it, added over all parts."""
    acc = tl.zeros([BN, DP], tl.float32)
    for back in range(L // STRIDE):
        slot = last - back
        there = real & (slot >= lo) & (slot < slots)
        first = tl.load(SLOT_TOKEN + slot, mask=there, other=0)
        there &= tl.load(SLOT_USED + slot, mask=there, other=0) != 0
        there &= first <= token  # else it is the next document's
        row = ((b * slots + slot) * HKV + h) * D
        for number in range(splits):
            acc += load_rows(PART + number * part, row, there, D, DP).to(tl.float32)
    return acc / L


@kernel
def _gradient(
    DK_CMP, DV_CMP, DK_SEL, DV_SEL, DK_WIN, DV_WIN, DK_OUT, DV_OUT, LO, POSITIONS, SLOT_TOKEN, SLOT_USED,
    T, HKV, slots, batch, splits,
    L: tl.constexpr, STRIDE: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, DKP: tl.constexpr, DVP: tl.constexpr,
    BN: tl.constexpr,
):  # fmt: skip
    """DK_OUT and DV_OUT [B, T, Hkv, D]: gradients through the mean, from DK_CMP [splits, B, slots, Hkv, D], and those
    of the other branches. All of dv, or of the other branches, may be None; LO and POSITIONS where there is one
    document."""
    token = tl.program_id(0).to(tl.int64) * BN + tl.arange(0, BN)
    h, b = tl.program_id(1).to(tl.int64), (tl.program_id(2) // 2).to(tl.int64)
    real = token < T
    lo, position = tl.zeros_like(token), token
    if LO is not None:
        lo = tl.load(LO + token, mask=real, other=0).to(tl.int64)
        position = tl.load(POSITIONS + token, mask=real, other=0)
    last, rows = lo + position // STRIDE, batch * slots * HKV
    out = (b * T + token) * HKV + h
    if tl.program_id(2) % 2 == 0:
        dk = _of_blocks(
            DK_CMP, token, lo, last, slots, rows.to(tl.int64) * DK, b, h, HKV, SLOT_TOKEN, SLOT_USED, real, splits,
            L, STRIDE, DK, DKP, BN,
        )  # fmt: skip
        if DK_SEL is not None:
            dk += load_rows(DK_SEL, out * DK, real, DK, DKP).to(tl.float32)
            dk += load_rows(DK_WIN, out * DK, real, DK, DKP).to(tl.float32)
        store_rows(DK_OUT, out * DK, real, dk, DK, DKP)
    else:
        if DV_CMP is not None:
            dv = _of_blocks(
                DV_CMP, token, lo, last, slots, rows.to(tl.int64) * DV, b, h, HKV, SLOT_TOKEN, SLOT_USED, real, splits,
                L, STRIDE, DV, DVP, BN,
            )  # fmt: skip
            if DV_SEL is not None:
                dv += load_rows(DV_SEL, out * DV, real, DV, DVP).to(tl.float32)
                dv += load_rows(DV_WIN, out * DV, real, DV, DVP).to(tl.float32)
            store_rows(DV_OUT, out * DV, real, dv, DV, DVP)


def prepare(
    k: Tensor, v: Tensor | None, tokens: Tensor, used: Tensor, l: int, d: int, flagged: tuple[Tensor, Tensor] | None,
    first: int,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """(k_cmp, v_cmp, finite of both, finite of `flagged` (k, v) from the token `first` on); None of what is not given.

    k [B, T, Hkv, Dk] and v [B, T, Hkv, Dv]; tokens int64 [slots] and used bool [slots] are `Layout.slot_tokens`.
    """
    k, v = unit_stride(k), None if v is None else unit_stride(v)
    (batch, num_keys, num_kv_heads, dk), slots = k.shape, tokens.numel()
    dv = dk if v is None else v.shape[3]
    k_cmp = k.new_empty(batch, slots, num_kv_heads, dk)
    v_cmp = None if v is None else v.new_empty(batch, slots, num_kv_heads, dv)
    finite = None if v is None else k.new_empty(batch, slots, num_kv_heads, dtype=torch.bool)
    k1, v1 = (None, None) if flagged is None else map(unit_stride, flagged)
    finite_1 = None if k1 is None else k1.new_empty(k1.shape[:3], dtype=torch.bool)
    tiles = cdiv(slots, BLOCKS)
    programs = tiles + (0 if k1 is None else cdiv(max(num_keys - first, 0), KEYS))
    if programs and batch:
        with on_device(k):
            _prepare[programs, num_kv_heads, batch](
                k, v, k_cmp, v_cmp, finite, tokens, used, k1, v1, finite_1,
                *strides(k), *strides(k if v is None else v),
                *(2 * strides(k) if k1 is None or v1 is None else (*strides(k1), *strides(v1))),
                slots, first, num_keys, num_kv_heads, tiles,
                l, d, dk, dv, padded(dk), padded(dv), BLOCKS, KEYS,
            )  # fmt: skip
    return k_cmp, v_cmp, finite, finite_1


def gradients(
    compressed: Sequence[Tensor],
    others: Sequence[Tensor] | None,
    num_keys: int,
    places: Places,
    l: int,
    d: int,
    dtype: torch.dtype,
) -> tuple[Tensor, ...]:
    """dk, or (dk, dv), [B, T, Hkv, D] from those of the compressed ones [splits, B, slots, Hkv, D].

    `others` are (dk, dv, dk, dv) of the branches that read the same keys and values, contiguous, to be added.
    """
    dk_cmp, dv_cmp = compressed[0].contiguous(), compressed[1].contiguous() if len(compressed) > 1 else None
    (splits, batch, slots, num_kv_heads, dk), (tokens, used, lo, positions) = dk_cmp.shape, places
    dv = dk if dv_cmp is None else dv_cmp.shape[4]
    dk_sel, dv_sel, dk_win, dv_win = others or 4 * (None,)
    shapes = [(batch, num_keys, num_kv_heads, x.shape[4]) for x in compressed]
    out = tuple(x.new_empty(shape, dtype=dtype) for x, shape in zip(compressed, shapes, strict=True))
    if out[0].numel():
        with on_device(dk_cmp):
            _gradient[cdiv(num_keys, TOKENS), num_kv_heads, 2 * batch](
                dk_cmp, dv_cmp, dk_sel, dv_sel, dk_win, dv_win, *(*out, None)[:2], lo, positions, tokens, used,
                num_keys, num_kv_heads, slots, batch, splits, l, d, dk, dv, padded(dk), padded(dv), TOKENS,
            )  # fmt: skip
    return out


def mean(
    x: Tensor, tokens: Tensor, used: Tensor, lo: Tensor | None, positions: Tensor | None, l: int, d: int
) -> Tensor:  # fmt: skip
    """x [B, T, H, D] -> [B, slots, H, D]; `lo` and `positions` are for the backward pass."""
    return prepare(x, None, tokens, used, l, d, None, 0)[0]


def mean_backward(
    do: Tensor, length: int, tokens: Tensor, used: Tensor, lo: Tensor | None, positions: Tensor | None, l: int, d: int
) -> Tensor:
    """The gradient of x [B, T, H, D]."""
    return gradients((do[None],), None, length, (tokens, used, lo, positions), l, d, do.dtype)[0]


def places(layout: Layout) -> Places:
    """Those of a layout."""
    packed = layout.cu_seqlens is not None
    return (
        *layout.slot_tokens,
        layout.compressed_interval[0] if packed else None,
        layout.positions if packed else None,
    )
