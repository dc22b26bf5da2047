"""What every launch needs: strides, and what a backward pass knows of each row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa.triton_backend.launching.relaunch import on_device
from nsa.triton_backend.tile import is_finite, kernel, load_rows, nonfinite
from nsa.triton_backend.tuning import cdiv, padded

LOG2E = 1.4426950408889634
ROWS = 32  # (token, head) pairs per program
KEYS = 64  # keys per program
ELEMENTS = 1024  # of a sum, per program
ENOUGH_PROGRAMS = 1024  # below this, several programs share what one could do, or the GPU would stand idle
MAX_OFFSET = 2**31  # elements that an offset inside a tile, which has 32 bits, can reach
MAX_TILE = tl.constexpr(256)  # tokens


def unit_stride(x: Tensor) -> Tensor:
    """x [B, S, H, D], copied where channels are not side by side or offsets in a tile would not fit in 32 bits."""
    (_, tokens, heads, channels), (_, of_token, of_head, of_channel) = x.shape, x.stride()
    near = min(tokens, MAX_TILE.value) * of_token + heads * of_head < MAX_OFFSET
    return x if near and (of_channel == 1 or channels == 1) else x.contiguous()


def strides(x: Tensor) -> tuple[int, int, int]:
    """Of batch, token and head of [B, S, H, D]; 0, which is always aligned, where there is only one."""
    (batch, tokens, heads, _), (of_batch, of_token, of_head, _) = x.shape, x.stride()
    return 0 if batch == 1 else of_batch, 0 if tokens == 1 else of_token, 0 if heads == 1 else of_head


@triton.jit
def backward_row(do, o, LSE, DLSE, LSE_2, DELTA, row, real):
    """Write what `backward_rows` says of rows do and o [rows, channels] in float32."""
    lse = tl.load(LSE + row, mask=real, other=0.0)
    delta = tl.sum(do * o, axis=1)
    if DLSE is not None:
        delta -= tl.load(DLSE + row, mask=real, other=0.0)
    apart = nonfinite(do) | ~is_finite(delta) | (lse == float("-inf"))
    tl.store(LSE_2 + row, tl.where(apart, float("nan"), lse * 1.4426950408889634), mask=real)  # LOG2E
    tl.store(DELTA + row, delta, mask=real)


@kernel
def _backward_rows(DO, O, LSE, DLSE, LSE_2, DELTA, num_rows, DV: tl.constexpr, DVP: tl.constexpr, BR: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    real = row < num_rows
    do = load_rows(DO, row * DV, real, DV, DVP).to(tl.float32)
    o = load_rows(O, row * DV, real, DV, DVP).to(tl.float32)
    backward_row(do, o, LSE, DLSE, LSE_2, DELTA, row, real)


def backward_rows(do: Tensor, o: Tensor, lse: Tensor, dlse: Tensor | None) -> tuple[Tensor, Tensor]:
    """(lse base 2, delta) of a backward pass, float32 [B, S, Hq]; do, o and lse are contiguous.

    The lse is NaN in rows whose do or delta is not finite, so that it reaches what the row sees and nothing else, and
    in rows that saw no key: neither are loaded where a tile holds keys that they may not see, so that a query there
    that is not finite does not reach these keys as 0 · NaN. delta is rowsum(do · o) minus the gradient of lse.
    """
    lse_2, delta = torch.empty_like(lse), torch.empty_like(lse)
    num_rows, dv = lse.numel(), o.shape[-1]
    if num_rows:
        dlse = None if dlse is None else dlse.contiguous()
        grid = (cdiv(num_rows, ROWS),)
        with on_device(o):
            _backward_rows[grid](do, o, lse, dlse, lse_2, delta, num_rows, dv, padded(dv), ROWS)
    return lse_2, delta


@kernel
def _add(A, B, C, OUT, count, BN: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BN + tl.arange(0, BN)
    real = place < count
    total = tl.load(A + place, mask=real).to(tl.float32) + tl.load(B + place, mask=real).to(tl.float32)
    total += tl.load(C + place, mask=real).to(tl.float32)
    tl.store(OUT + place, total.to(OUT.dtype.element_ty), mask=real)


def add(out: Tensor, a: Tensor, b: Tensor, c: Tensor) -> None:
    """out = a + b + c, contiguous tensors of one shape, rounded once; out may be one of them."""
    if count := out.numel():
        with on_device(out):
            _add[cdiv(count, ELEMENTS),](a, b, c, out, count, ELEMENTS)


@triton.jit
def are_finite(k_base, v_base, k_offsets, v_offsets, inside, DK: tl.constexpr, DV: tl.constexpr, DKP: tl.constexpr,
               DVP: tl.constexpr):  # fmt: skip
    """For each row, whether its key and its value are finite."""
    k = load_rows(k_base, k_offsets, inside, DK, DKP)
    v = load_rows(v_base, v_offsets, inside, DV, DVP)
    return ~(nonfinite(k) | nonfinite(v))


@kernel
def _finite_keys(
    K, V, FINITE, k_b, k_s, k_h, v_b, v_s, v_h, first, T, HKV,
    DK: tl.constexpr, DV: tl.constexpr, DKP: tl.constexpr, DVP: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    h, b = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    key = first + tl.program_id(0).to(tl.int64) * BN + tl.arange(0, BN)
    finite = are_finite(K + b * k_b + h * k_h, V + b * v_b + h * v_h, key * k_s, key * v_s, key < T, DK, DV, DKP, DVP)
    tl.store(FINITE + (b * T + key) * HKV + h, finite, mask=key < T)


def finite_keys(k: Tensor, v: Tensor, first: int = 0) -> Tensor:
    """bool [B, T, Hkv]: whether the key and the value are finite; not written before the key `first`."""
    finite = torch.empty(v.shape[:3], dtype=torch.bool, device=v.device)
    (batch, num_keys, num_kv_heads, dv), dk = v.shape, k.shape[3]
    if v.numel() and num_keys > first:
        with on_device(v):
            _finite_keys[cdiv(num_keys - first, KEYS), num_kv_heads, batch](
                k,
                v,
                finite,
                *strides(k),
                *strides(v),
                first,
                num_keys,
                num_kv_heads,
                dk,
                dv,
                padded(dk),
                padded(dv),
                KEYS,
            )
    return finite
