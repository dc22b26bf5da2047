"""From documents to rows of one length, and from rows to batches with their targets.

A row is filled without padding: a document that is longer than what is left goes on in the next row, as a document
of its own. A packed batch is one row of all its tokens with `cu_seqlens`, in which no document sees another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from nsa import loss
from nsa.loss import IGNORED

BOUNDS = 64
"""`cu_seqlens` has a multiple of so many documents, the last ones empty, so that few shapes reach the compiler."""


@dataclass(frozen=True)
class Row:
    """One sequence."""

    tokens: Tensor
    """int64 [seq_len]."""
    lengths: tuple[int, ...]
    """Of its documents; they add up to seq_len."""


@dataclass(frozen=True)
class Batch:
    """What one forward pass takes."""

    tokens: Tensor
    """int64 [B, S]; packed: [1, B·S]."""
    targets: Tensor
    """int64, as `tokens`: the token that follows in the same document, or IGNORED."""
    num_targets: int
    """Those that are not ignored."""
    cu_seqlens: Tensor | None = None
    """int32 [N+1], the bounds of the packed documents."""
    position: dict[str, Any] = field(default_factory=dict)
    """Where its source goes on after it."""

    def to(self, device: torch.device) -> Batch:
        """On a device; from pinned memory without waiting."""
        return self._each(lambda x: x.to(device, non_blocking=True))

    def pinned(self) -> Batch:
        """In memory from which a GPU copies by itself."""
        return self._each(Tensor.pin_memory)

    def _each(self, move: Callable[[Tensor], Tensor]) -> Batch:
        bounds = None if self.cu_seqlens is None else move(self.cu_seqlens)
        return replace(self, tokens=move(self.tokens), targets=move(self.targets), cu_seqlens=bounds)


class Packer:
    """Cuts a stream of token documents into rows. `rest` is what the next row begins with."""

    def __init__(self, documents: Iterator[Tensor], seq_len: int, rest: Tensor | None = None) -> None:
        self._documents, self._seq_len = documents, seq_len
        self.rest = torch.empty(0, dtype=torch.int64) if rest is None else rest

    def row(self) -> Row:
        parts: list[Tensor] = []
        missing = self._seq_len
        while missing:
            document = self.rest if self.rest.numel() else next(self._documents)
            parts.append(document[:missing])
            self.rest = document[missing:]
            missing -= parts[-1].numel()
        return Row(torch.cat(parts), tuple(part.numel() for part in parts if part.numel()))


def with_empty_documents(cu_seqlens: Tensor, num_documents: int) -> Tensor:
    """The bounds of so many documents: those given, int32 [N+1], and empty ones behind them; no host sync."""
    missing = num_documents + 1 - cu_seqlens.numel()
    return torch.cat([cu_seqlens, cu_seqlens[-1:].expand(missing)])


def batch(rows: Sequence[Row], *, packing: bool, position: dict[str, Any]) -> Batch:
    """Rows as one batch, with the targets that the loss asks for."""
    tokens = torch.stack([row.tokens for row in rows])
    cu_seqlens = None
    if packing:
        tokens = tokens.flatten()[None]
        cu_seqlens = _bounds([length for row in rows for length in row.lengths])
    targets = loss.next_tokens(tokens, cu_seqlens)
    return Batch(tokens, targets, int((targets != IGNORED).sum()), cu_seqlens, position)


def _bounds(lengths: Sequence[int]) -> Tensor:
    """int32 [N+1] of documents of these lengths, and of empty ones behind them up to a multiple of BOUNDS."""
    ends = torch.tensor(lengths, dtype=torch.int32).cumsum(0, dtype=torch.int32)
    num_documents = -(-(len(ends) + 1) // BOUNDS) * BOUNDS
    return with_empty_documents(torch.cat([ends.new_zeros(1), ends]), num_documents)
