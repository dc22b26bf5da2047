"""What every launch needs: strides, the device, and what a backward pass knows of each row."""

from __future__ import annotations

import contextlib

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa.triton_backend.tile import is_finite, load_rows
from nsa.triton_backend.tuning import padded

LOG2E = 1.4426950408889634
ROWS = 32  # (token, head) pairs per program


def unit_stride(x: Tensor) -> Tensor:
    """x with its channels side by side, copied only where they are not."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def strides(x: Tensor) -> tuple[int, int, int]:
    """Of batch, token and head of [B, S, H, D]."""
    return x.stride(0), x.stride(1), x.stride(2)


def on_device(x: Tensor) -> contextlib.AbstractContextManager[object]:
    """Launch on the device of x, whichever is current."""
    return torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext()


@triton.jit
def _backward_rows(DO, O, LSE, DLSE, LSE_2, DELTA, num_rows, DV: tl.constexpr, DVP: tl.constexpr, BR: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    real = row < num_rows
    do = load_rows(DO, row * DV, real, DV, DVP).to(tl.float32)
    o = load_rows(O, row * DV, real, DV, DVP).to(tl.float32)
    bad = tl.max((~is_finite(do)).to(tl.int32), axis=1) > 0
    lse = tl.load(LSE + row, mask=real, other=0.0)
    lse = tl.where(lse == float("-inf"), 0.0, lse * 1.4426950408889634)
    tl.store(LSE_2 + row, tl.where(bad, float("nan"), lse), mask=real)
    delta = tl.sum(do * o, axis=1)
    if DLSE is not None:
        delta -= tl.load(DLSE + row, mask=real, other=0.0)
    tl.store(DELTA + row, delta, mask=real)


def backward_rows(do: Tensor, o: Tensor, lse: Tensor, dlse: Tensor | None) -> tuple[Tensor, Tensor]:
    """(lse base 2, delta) of a backward pass, float32 [B, S, Hq]; do and o contiguous.

    The lse is NaN in rows whose do is not finite, so that it reaches what the row sees and nothing else, and 0 in
    rows that saw nothing. delta is rowsum(do · o) minus the gradient of lse.
    """
    lse_2, delta = torch.empty_like(lse), torch.empty_like(lse)
    num_rows, dv = lse.numel(), o.shape[-1]
    if num_rows:
        dlse = None if dlse is None else dlse.contiguous()
        grid = (triton.cdiv(num_rows, ROWS),)
        with on_device(o):
            _backward_rows[grid](do, o, lse, dlse, lse_2, delta, num_rows, dv, padded(dv), ROWS)
    return lse_2, delta
