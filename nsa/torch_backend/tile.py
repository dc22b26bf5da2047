"""Softmax attention of one batch of tiles, forward and backward: the arithmetic that every branch shares.

q [N, C·G, Dk] (C tokens of G heads), scaled; k [N, L, Dk]; v [N, L, Dv]; visible bool [N or 1, C, L].

A matrix product multiplies what a row may not see by a probability of 0, and 0 · NaN is NaN. So products take
finite operands (`finite`), and what is not finite travels through the scores, which the mask governs: a query that
is not finite, and a key that is not or whose value is not, are marked with NaN (`mark`). That turns the lse of just
the rows that see one into NaN, and through it their probabilities, again in the backward pass.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

Backward = TypeVar("Backward", bound=Callable[..., tuple[Tensor | None, ...]])


def finite(x: Tensor) -> Tensor:
    """x with 0 in place of every NaN and infinity."""
    return torch.nan_to_num(x, nan=0.0, posinf=0.0, neginf=0.0)


def mark(x: Tensor, *causes: Tensor) -> Tensor:
    """x with NaN in every row in which one of `causes` is not finite."""
    finite_rows = torch.stack([cause.isfinite().all(-1) for cause in causes]).all(0)
    return x.masked_fill(~finite_rows[..., None], torch.nan)


def without_autocast(backward: Backward) -> Backward:
    """A backward pass in the types of its tensors: a compiled one is traced under the autocast of the forward pass."""

    @functools.wraps(backward)
    def in_own_types(ctx: Any, do: Tensor, *others: Tensor) -> tuple[Tensor | None, ...]:
        with torch.autocast(do.device.type, enabled=False):
            return backward(ctx, do, *others)

    return cast(Backward, in_own_types)


def _hide(s: Tensor, visible: Tensor, value: float) -> Tensor:
    """Overwrite, in place, the entries of s [N, C·G, L] that are not visible."""
    grid = s.view(s.shape[0], visible.shape[1], s.shape[1] // visible.shape[1], s.shape[2])
    grid.masked_fill_(~visible[:, :, None], value)
    return s


def attend(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, o: Tensor) -> tuple[Tensor, Tensor]:
    """(m, l), each [N, C·G], and o [N, C·G, Dv] written in place; q and k marked, v finite.

    m is a row's largest score and l the sum of exp(s - m): a row that sees nothing gives 0, -inf and 0.
    """
    s = _hide(q @ k.mT, visible, -torch.inf)
    m = s.amax(-1, keepdim=True)
    p = s.sub_(_at_least_finite(m)).exp_()
    l = p.sum(-1, keepdim=True)
    torch.bmm(p, v, out=o).div_(l.masked_fill(l == 0, 1))
    return m.squeeze(-1), l.squeeze(-1)


def log_sum_exp(m: Tensor, l: Tensor) -> Tensor:
    """lse of a row's scores from `attend`'s m and l."""
    return l.log() + _at_least_finite(m)


def partial_weights(m: Tensor, l: Tensor) -> tuple[Tensor, Tensor]:
    """(what `attend`'s results over parts of a row's keys count in the whole, the lse [...] of the whole), from the
    parts' m and l [..., parts].

    From the lse of the parts the weights would be wrong by eps · |lse|, and with them rowsum(do · o).
    """
    largest = m.amax(-1, keepdim=True)
    share = (m - _at_least_finite(largest)).exp() * l
    total = share.sum(-1, keepdim=True)
    return share / total.masked_fill(total == 0, 1), log_sum_exp(largest, total).squeeze(-1)


def _at_least_finite(m: Tensor) -> Tensor:
    """m with 0 for rows that see nothing, so that no infinities are subtracted."""
    return m.masked_fill(m == -torch.inf, 0)


def attend_backward(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, lse: Tensor, delta: Tensor, visible: Tensor, dq: Tensor
) -> tuple[Tensor, Tensor]:
    """(dk, dv) of `attend`, and dq [N, C·G, Dk] written in place.

    Operands are finite; lse is NaN where anything that a row sees, or its do, was not.
    delta [N, C·G] is rowsum(do · o) minus the gradient of lse.
    """
    p = _hide((q @ k.mT).sub_(_at_least_finite(lse)[..., None]).exp_(), visible, 0)
    dv = p.mT @ do
    ds = _hide((do @ v.mT).sub_(delta[..., None]).mul_(p), visible, 0)
    torch.bmm(ds, k, out=dq)
    return ds.mT @ q, dv
