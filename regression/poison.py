"""Memory that nobody has written, and memory beside a tensor, made visible: NaN, or the greatest integer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor


def _poisoned(allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def allocate_garbage(*args: Any, **kwargs: Any) -> Tensor:
        x = allocate(*args, **kwargs)
        if x.dtype == torch.bool:
            return x.fill_(True)
        return x.fill_(torch.nan if x.dtype.is_floating_point else torch.iinfo(x.dtype).max)

    return allocate_garbage


@contextmanager
def allocations() -> Iterator[None]:
    """What Python allocates and does not write holds NaN, or the greatest integer."""
    with (
        mock.patch.object(torch, "empty", _poisoned(torch.empty)),
        mock.patch.object(torch, "empty_like", _poisoned(torch.empty_like)),
        mock.patch.object(torch, "empty_strided", _poisoned(torch.empty_strided)),
        mock.patch.object(torch.Tensor, "new_empty", _poisoned(torch.Tensor.new_empty)),
    ):
        yield


def surrounded(x: Tensor, *, tokens: int = 2, heads: int = 20) -> tuple[Tensor, Tensor]:
    """(x [B, S, H, D] inside a larger tensor of NaN, that tensor): so many more tokens and heads on every side."""
    batch, length, num_heads, channels = x.shape
    around = x.new_full((batch + 2, length + 2 * tokens, num_heads + 2 * heads, channels), torch.nan)
    inside = around[1:-1, tokens : tokens + length, heads : heads + num_heads]
    inside.copy_(x)
    return inside, around
