"""What every launch needs: strides, the device, and the rows of a backward pass."""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor

LOG2E = 1.4426950408889634


def unit_stride(x: Tensor) -> Tensor:
    """x with its channels side by side, copied only where they are not."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def strides(x: Tensor) -> tuple[int, int, int]:
    """Of batch, token and head of [B, S, H, D]."""
    return x.stride(0), x.stride(1), x.stride(2)


def on_device(x: Tensor) -> contextlib.AbstractContextManager[object]:
    """Launch on the device of x, whichever is current."""
    return torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext()


def backward_rows(do: Tensor, o: Tensor, lse: Tensor, dlse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(do finite and contiguous, lse base 2, delta) of a backward pass, the last two float32 [B, S, Hq].

    The lse is NaN in rows whose do is not finite, so that it reaches what the row sees and nothing else, and 0 in
    rows that saw nothing. delta is rowsum(do · o) minus the gradient of lse.
    """
    bad = ~do.isfinite().all(-1)
    do = torch.nan_to_num(do, nan=0.0, posinf=0.0, neginf=0.0).contiguous()
    delta = (do.float() * o.float()).sum(-1) - dlse
    lse = torch.where(lse == -torch.inf, 0.0, lse * LOG2E).masked_fill(bad, torch.nan)
    return do, lse.contiguous(), delta.contiguous()
