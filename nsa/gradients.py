"""Makes a second gradient, which no backward pass of a kernel here has, an error."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


class _NoSecondGradient(torch.autograd.Function):
    """Gives back gradients; who differentiates these again gets an error."""

    @staticmethod
    def forward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        del ctx
        # copies: a view could not be changed in place, as hooks do
        return tuple(x if x is None else x.clone() for x in gradients)

    @staticmethod
    def backward(ctx: Any, *_: Tensor | None) -> tuple[Tensor | None, ...]:
        raise RuntimeError("NSA has no second gradient (double backward), except with backend='reference'")


def without_second_gradient(
    backward: Callable[..., Sequence[Tensor | None]],
) -> Callable[..., Sequence[Tensor | None]]:
    """A backward pass that is not differentiated itself.

    PyTorch's `once_differentiable` says so only where an upstream gradient requires a gradient; elsewhere the second
    gradient of what the pass was given (q, k, v) would be missing without a word.
    """

    @functools.wraps(backward)
    def once(ctx: Any, *upstream: Tensor | None) -> Sequence[Tensor | None]:
        with torch.no_grad():
            found = backward(ctx, *upstream)
        if not torch.is_grad_enabled():  # only create_graph=True leaves it on
            return found
        found = (found,) if isinstance(found, Tensor) else found
        wanting = (x if x is None or not x.is_floating_point() else x.detach().requires_grad_() for x in found)
        given: tuple[Tensor | None, ...] = _NoSecondGradient.apply(*wanting)
        return given

    return once
