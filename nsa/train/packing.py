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

from nsa.model import IGNORED

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
    """Rows as one batch. This is where labels are shifted: the target at t is the token at t + 1."""
    tokens = torch.stack([row.tokens for row in rows])
    if not packing:
        targets = torch.full_like(tokens, IGNORED)
        targets[:, :-1] = tokens[:, 1:]
        return Batch(tokens, targets, targets[:, 1:].numel(), None, position)
    tokens = tokens.flatten()[None]
    lengths = torch.tensor([length for row in rows for length in row.lengths], dtype=torch.int32)
    ends = lengths.cumsum(0, dtype=torch.int32)
    targets = torch.full_like(tokens, IGNORED)
    targets[:, :-1] = tokens[:, 1:]
    targets[:, ends.long() - 1] = IGNORED
    room = -(-(len(ends) + 1) // BOUNDS) * BOUNDS + 1
    cu_seqlens = torch.full((room,), tokens.numel(), dtype=torch.int32)
    cu_seqlens[0], cu_seqlens[1 : len(ends) + 1] = 0, ends
    return Batch(tokens, targets, tokens.numel() - len(ends), cu_seqlens, position)
