"""Faults of attention over several ranks, each put into the product: the laws must say what is wrong.

A fault is a context, entered on every rank, in which the product's own code runs with one thing wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from nsa.parallel import branches
from nsa.parallel.exchange import Gather, Halo, Pending

Fault = Callable[[], AbstractContextManager[Any]]


def _window_halo_too_short() -> AbstractContextManager[Any]:
    """One token short of w - 1."""
    whole = branches.window_keys

    def short(halo_rows: Tensor, piece: Any) -> Tensor:
        keys = whole(halo_rows, piece).clone()
        keys[:, piece.window_before] = 0
        return keys

    return mock.patch.object(branches, "window_keys", short)


def _source_halo_too_short() -> AbstractContextManager[Any]:
    """Compression without the tokens behind a piece that its last blocks need."""
    start = Halo.start

    def own_alone(halo: Halo, x: Tensor) -> Pending:
        pending = start(halo, x)
        return Pending(pending.work, lambda: x.new_zeros(x.shape[0], len(halo.arriving), *x.shape[2:]))

    return mock.patch.object(Halo, "start", own_alone)


def _gather_dropped() -> AbstractContextManager[Any]:
    """Rows of the other ranks never arrive."""
    start = Gather.start

    def own_alone(gather: Gather, x: Tensor) -> Pending:
        pending = start(gather, x)
        out = x.new_zeros(x.shape[0], gather.total, *x.shape[2:])
        out[:, gather.rows[gather.rank]] = x
        return Pending(pending.work, lambda: out)

    return mock.patch.object(Gather, "start", own_alone)


def _gradients_never_sent() -> AbstractContextManager[Any]:
    """dk and dv are those of the own queries alone."""
    start = Gather.start_sum

    def own_alone(gather: Gather, partial: Tensor, dtype: torch.dtype) -> Pending:
        pending = start(gather, partial, dtype)
        return Pending(pending.work, lambda: partial[:, gather.rows[gather.rank]].to(dtype))

    return mock.patch.object(Gather, "start_sum", own_alone)


def _gradients_never_written() -> AbstractContextManager[Any]:
    """Of a second kv head, as with one stride of heads for all: what was allocated stays as it was."""
    start = Gather.start_sum

    def poisoned(gather: Gather, partial: Tensor, dtype: torch.dtype) -> Pending:
        pending = start(gather, partial, dtype)

        def second_head_poisoned() -> Tensor:
            total = pending.finish()
            total[:, :, 1:] = torch.nan
            return total

        return Pending(pending.work, second_head_poisoned)

    return mock.patch.object(Gather, "start_sum", poisoned)


def _halo_gradients_dropped() -> AbstractContextManager[Any]:
    """The gradients of a halo's rows do not travel back to their owners."""
    start = Halo.start_sum

    def own_alone(halo: Halo, partial: Tensor, dtype: torch.dtype) -> Pending:
        pending = start(halo, partial, dtype)
        own = torch.isin(halo.needed[halo.rank], halo.held[halo.rank]).to(partial.device)
        return Pending(pending.work, lambda: partial[:, own].to(dtype))

    return mock.patch.object(Halo, "start_sum", own_alone)


def _stale_buffer() -> AbstractContextManager[Any]:
    """What an earlier call gathered is taken for this one's; Dk and Dv differ, so keys are not taken for values."""
    start = Gather.start
    kept: dict[tuple[int, int], Tensor] = {}

    def first_of_all(gather: Gather, x: Tensor) -> Pending:
        pending = start(gather, x)
        return Pending(pending.work, lambda: kept.setdefault((gather.total, x.shape[3]), pending.finish()))

    return mock.patch.object(Gather, "start", first_of_all)


def _read_too_early() -> AbstractContextManager[Any]:
    """A buffer is read before what is on its way has arrived."""
    start = Gather.start

    def early(gather: Gather, x: Tensor) -> Pending:
        pending = start(gather, x)
        return Pending(pending.work, lambda: torch.full_like(pending.finish(), torch.nan))

    return mock.patch.object(Gather, "start", early)


FAULTS: dict[str, tuple[Fault, str]] = {
    "a halo of the window too short": (_window_halo_too_short, "o"),
    "a halo of compression too short": (_source_halo_too_short, "o"),
    "a dropped gather": (_gather_dropped, "o"),
    "a buffer read too early": (_read_too_early, "o"),
    "a stale buffer": (_stale_buffer, "o"),
    "dk and dv never sent": (_gradients_never_sent, "dk1"),
    "dk and dv never written": (_gradients_never_written, "dv1"),
    "gradients of a halo dropped": (_halo_gradients_dropped, "dk2"),
}
"""Each fault, and one of the things that must be found wrong."""
