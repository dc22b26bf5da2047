"""What a cache hands to a decode step, and what the step gives back.

A leaf that imports nothing of ours, so that caches and backends need not know one another.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class KVView:
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

    def of(self, sequences: slice) -> KVView:
        """What these sequences read."""
        if self.table is None:
            return KVView(self.k[sequences], self.v[sequences])
        return KVView(self.k, self.v, self.table[sequences])

    @property
    def strides(self) -> tuple[int, int, int, int, int, int, int]:
        """Of the table a row; of k and of v a sequence or page, a row, and a head."""
        stride = 0 if self.table is None else self.table.stride(0)
        (k_outer, k_row, k_head, _), (v_outer, v_row, v_head, _) = self.k.stride(), self.v.stride()
        return stride, k_outer, k_row, k_head, v_outer, v_row, v_head


@dataclass(frozen=True)
class DecodeOutput:
    """What a step gives."""

    o: Tensor
    """[B, S, Hq, Dv]"""
    block_indices: Tensor
    """int32 [B, S, Hkv, n]"""
    lse: Tensor
    """float32 [3, B, S, Hq], base e: compressed, selected, window."""
    keys_read: tuple[Tensor, Tensor, Tensor]
    """int32 [B, S, Hkv, splits] for each branch, counted where they were read."""
