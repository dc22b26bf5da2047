"""A step of decoding as one call: what a backend that fuses the branches takes and gives, and when it is asked."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Protocol, cast

import torch
from torch import Tensor

from nsa.config import NSAConfig

MAX_QUERIES = 8
"""Queries of a sequence, all new: a speculative step."""


@dataclass(frozen=True)
class Rows:
    """Keys and values that one branch reads, side by side or in pages."""

    k: Tensor
    """[B, T, Hkv, Dk], or [pages, page_size, Hkv, Dk]."""
    v: Tensor
    """The same with Dv."""
    table: Tensor | None = None
    """int32 [B, width]: the page of each `page_size` rows; None where rows lie side by side."""

    @property
    def page_size(self) -> int:
        """Rows in a page, 0 if there are no pages."""
        return 0 if self.table is None else self.k.shape[1]

    @property
    def capacity(self) -> int:
        """The most rows that a sequence can have."""
        return self.k.shape[1] if self.table is None else self.k.shape[1] * self.table.shape[1]

    def of(self, sequences: slice) -> Rows:
        """What these sequences read."""
        if self.table is None:
            return Rows(self.k[sequences], self.v[sequences])
        return Rows(self.k, self.v, self.table[sequences])

    @property
    def strides(self) -> tuple[int, int, int, int, int, int, int]:
        """Of the table a row; of k and of v a sequence or page, a row, and a head."""
        stride = 0 if self.table is None else self.table.stride(0)
        (k_outer, k_row, k_head, _), (v_outer, v_row, v_head, _) = self.k.stride(), self.v.stride()
        return stride, k_outer, k_row, k_head, v_outer, v_row, v_head


@dataclass(frozen=True)
class Decoded:
    """What a step gives."""

    o: Tensor
    """[B, S, Hq, Dv]"""
    block_indices: Tensor
    """int32 [B, S, Hkv, n]"""
    lse: Tensor
    """float32 [3, B, S, Hq], base e: compressed, selected, window."""
    keys_read: tuple[Tensor, Tensor, Tensor]
    """int32 [B, S, Hkv, shares] for each branch, counted where they were read."""


class Decoder(Protocol):
    """Attention of q [B, S, Hq, Dk], the last of `lengths` int32 [B] tokens, over three branches at once."""

    def __call__(
        self,
        q: Tensor,
        compressed: Rows,
        selected: Rows,
        window: Rows,
        lengths: Tensor,
        gates: Tensor,
        config: NSAConfig,
        scale: float,
    ) -> Decoded: ...


def decoder(backend: str, q: Tensor, *others: Tensor) -> Decoder | None:
    """The fused decode of the backend that was chosen for a call; None where it has none, or has none for this call.

    It knows no gradients, and torch.compile cannot look into it: there the parts serve.
    """
    if backend != "triton" or q.shape[1] > MAX_QUERIES or torch.compiler.is_compiling():
        return None
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q, *others)):
        return None
    return cast(Decoder, importlib.import_module("nsa.triton_backend").decode_attention)
