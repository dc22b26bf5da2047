"""RoPE of a layer's queries and keys in one launch, with the bits of `nsa.rope`.

That takes some forty launches of PyTorch: angles in float64, and each product on its own. Here each program computes
the angles of its tokens once for all heads. Backward, the same kernel turns the other way.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa.gradients import without_second_gradient
from nsa.triton_backend.launch import strides, unit_stride
from nsa.triton_backend.launching.relaunch import on_device
from nsa.triton_backend.tile import kernel
from nsa.triton_backend.tuning import cdiv, next_power_of_2

ANGLES, HEADS = 128, 8
"""Of a tile: one angle per thread, since one in float64 takes many registers. A program goes through all heads."""
_LAUNCH: dict[str, Any] = {"num_warps": 4, "enable_fp_fusion": False}  # PyTorch rounds each product, too


@triton.jit
def _turn(
    X, OUT, cos, sin, token, real, x_s, x_h, num_heads,
    D: tl.constexpr, PAIRS: tl.constexpr, PP: tl.constexpr, BH: tl.constexpr,
):  # fmt: skip
    """The heads of `token` int64 [tokens] from X [S, H, D] to OUT, contiguous; cos and sin float32 [tokens, 1, PP]."""
    pair = tl.arange(0, PP)[None, None, :]
    for first in range(0, num_heads, BH):
        head = first + tl.arange(0, BH)
        there = real[:, None] & (head < num_heads)[None, :]
        row = token[:, None] * x_s + head[None, :] * x_h
        out = (token[:, None] * num_heads + head[None, :]) * D
        mask = there[:, :, None] & (pair < PAIRS)
        one = tl.load(X + row[:, :, None] + pair, mask=mask).to(tl.float32)
        two = tl.load(X + row[:, :, None] + (pair + PAIRS), mask=mask).to(tl.float32)
        turned = one * cos - two * sin
        tl.store(OUT + out[:, :, None] + pair, turned.to(OUT.dtype.element_ty), mask=mask)
        turned = two * cos + one * sin
        tl.store(OUT + out[:, :, None] + (pair + PAIRS), turned.to(OUT.dtype.element_ty), mask=mask)
        if D % 2 == 1:
            tl.store(OUT + out + (D - 1), tl.load(X + row + (D - 1), mask=there), mask=there)


@kernel
def _rotate(
    Q, K, Q_OUT, K_OUT, POSITIONS, FREQUENCIES, q_b, q_s, q_h, k_b, k_s, k_h, p_b, S, HQ, HK,
    BACK: tl.constexpr, D: tl.constexpr, PAIRS: tl.constexpr, PP: tl.constexpr, BT: tl.constexpr, BH: tl.constexpr,
):  # fmt: skip
    """POSITIONS int64 [S], or [B, S] with p_b of a row; None where they are 0, 1, ..."""
    b, first = tl.program_id(1).to(tl.int64), tl.program_id(0).to(tl.int64) * BT
    # one angle per thread, in one dimension: of a tile with heads each thread would compute several, all the same
    place = tl.arange(0, BT * PP)
    token, pair = first + place // PP, place % PP
    position = token
    if POSITIONS is not None:
        position = tl.load(POSITIONS + b * p_b + token, mask=token < S, other=0)
    angle = position.to(tl.float64) * tl.load(FREQUENCIES + pair, mask=pair < PAIRS, other=0.0)
    cos = tl.reshape(tl.cos(angle).to(tl.float32), [BT, 1, PP])
    sin = tl.reshape(tl.sin(angle).to(tl.float32), [BT, 1, PP])
    if BACK:
        sin = -sin
    token = first + tl.arange(0, BT)
    real = token < S
    _turn(Q + b * q_b, Q_OUT + b * S * HQ * D, cos, sin, token, real, q_s, q_h, HQ, D, PAIRS, PP, BH)
    _turn(K + b * k_b, K_OUT + b * S * HK * D, cos, sin, token, real, k_s, k_h, HK, D, PAIRS, PP, BH)


def rotate(q: Tensor, k: Tensor, positions: Tensor | None, frequencies: Tensor, back: bool) -> tuple[Tensor, Tensor]:
    """q [B, S, Hq, D] and k [B, S, Hk, D] turned by their positions, integers [S] or [B, S], or None for 0, 1, ...;
    `back`: the other way. `frequencies`: float64 [D // 2]."""
    q, k = unit_stride(q), unit_stride(k)
    (batch, length, heads, channels), of_keys = q.shape, k.shape[2]
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device), torch.empty(k.shape, dtype=k.dtype, device=k.device)
    if q.numel():
        pairs, rows = channels // 2, 0
        padded = next_power_of_2(max(pairs, 1))
        tokens = max(ANGLES // padded, 1)
        if positions is not None:
            positions = positions.long().contiguous()
            rows = length if positions.dim() == 2 else 0
        with on_device(q):
            _rotate[cdiv(length, tokens), batch](
                q, k, *out, positions, frequencies, *strides(q), *strides(k), rows,
                length, heads, of_keys, back, channels, pairs, padded, tokens, HEADS, **_LAUNCH,
            )  # fmt: skip
    return out


class Rotate(torch.autograd.Function):
    """`rotate`, for an eager call; `ops.py` is the same for a graph. Neither has a second gradient."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, positions: Tensor | None, frequencies: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(positions)
        ctx.frequencies = frequencies  # not saved: it may have been made in inference mode
        return rotate(q, k, positions, frequencies, back=False)

    @staticmethod
    @without_second_gradient
    def backward(ctx: Any, dq: Tensor, dk: Tensor) -> tuple[Tensor | None, ...]:
        (positions,) = ctx.saved_tensors
        return *rotate(dq, dk, positions, ctx.frequencies, back=True), None, None
