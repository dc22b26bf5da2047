"""The pages of one layer: tensors, and how new keys, values and compressed blocks get into them.

Every index is computed from tensors, so that nothing waits for the device and a CUDA graph can hold it all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nsa import backends
from nsa.config import NSAConfig
from nsa.geometry import computed_once, num_compressed_blocks
from nsa.kv import KVView
from nsa.layer import NativeSparseAttention, PerBranch
from nsa.paged.allocator import NULL_PAGE
from nsa.paged.attention import row_places

Tables = Mapping[str, Tensor]
"""int32 [B, width] for each stream of `nsa.paged.allocator.streams`."""


@dataclass(frozen=True)
class NewTokens:
    """The tokens that one step adds to each sequence, the same in every layer.

    Where their rows lie is computed when a layer first asks: a row is page · page_size + row, int64.
    """

    positions: Tensor
    """int64 [B, S]: where they stand in their sequences."""
    before: Tensor
    """int32 [B]: tokens of each sequence without them."""
    lengths: Tensor
    """int32 [B]: with them."""
    tables: Tables
    config: NSAConfig
    page_size: int
    completing: bool
    """Whether they may complete a compressed block."""

    @property
    def sets(self) -> tuple[str, ...]:
        """The stream of each set of keys and values."""
        return ("source", "selected", "window") if "source" in self.tables else ("tokens",)

    @computed_once
    def rows(self) -> Tensor:
        """[B, S, sets]: the rows of the new tokens, in each set of keys."""
        return torch.stack([row_places(self.tables[name], self.positions, self.page_size) for name in self.sets], -1)

    @computed_once
    def completed(self) -> tuple[Tensor, Tensor] | None:
        """None where no sequence completes a compressed block; else for its next n blocks, full or not,
        [B, (n − 1)·d + l]: the tokens that they are made of, and [B, n]: themselves, in NULL_PAGE where one is not
        full."""
        if not self.completing:
            return None
        num_tokens = self.positions.shape[1]
        return next_blocks(self.tables, self.sets[0], self.before, num_tokens, self.config, self.page_size)


def next_blocks(
    tables: Tables, source_name: str, lengths: Tensor, num_tokens: int, config: NSAConfig, page_size: int
) -> tuple[Tensor, Tensor]:
    """`NewTokens.completed` for `num_tokens` more tokens in sequences of `lengths`."""
    done = num_compressed_blocks(lengths, config)[:, None]
    at_most = num_tokens // config.d + 1
    source = done * config.d + torch.arange((at_most - 1) * config.d + config.l, device=lengths.device)
    block = done + torch.arange(at_most, device=lengths.device)
    full = block < num_compressed_blocks(lengths + num_tokens, config)[:, None]
    state = row_places(tables["compressed"], block, page_size) if tables["compressed"].shape[1] else block.long()
    return row_places(tables[source_name], source, page_size), torch.where(full, state, NULL_PAGE * page_size)


class PageStore:
    """Pages of keys [pages, page_size, Hkv, Dk] and of values [pages, page_size, Hkv, Dv] of one layer."""

    def __init__(self, layer: NativeSparseAttention, num_pages: int, page_size: int) -> None:
        self.layer = layer
        rows, dtype, device = (num_pages, page_size, layer.num_kv_heads), layer.projected_dtype, layer.q.weight.device
        with torch.inference_mode(False):  # a buffer made in inference mode could be written only there
            self.k = torch.empty(*rows, layer.head_dim_k, dtype=dtype, device=device)
            self.v = torch.empty(*rows, layer.head_dim_v, dtype=dtype, device=device)

    @staticmethod
    def bytes(layer: NativeSparseAttention, num_pages: int, page_size: int) -> int:
        """Bytes that it allocates."""
        row = layer.num_kv_heads * (layer.head_dim_k + layer.head_dim_v) * layer.projected_dtype.itemsize
        return num_pages * page_size * row

    def copy(self, pages: Sequence[tuple[int, int]]) -> None:
        """Copy whole pages, (from, to) each."""
        for old, new in pages:
            self.k[new], self.v[new] = self.k[old], self.v[old]

    def append(self, k: PerBranch, v: PerBranch, new: NewTokens) -> None:
        """Write new keys [B, S, Hkv, Dk] and values [B, S, Hkv, Dv], and the blocks that they complete."""
        sets, config = len(new.sets), self.layer.config
        if write := backends.cache_writer(self.layer.backend, k[0], v[0]):
            into = [KVView(self.k, self.v, new.tables[name]) for name in new.sets]
            compressed = KVView(self.k, self.v, new.tables["compressed"]) if config.phi == "avg" else None
            write(k[:sets], v[:sets], into, compressed, new.before, config)
            if compressed is not None:
                return
        else:
            for pages, branches in ((self.k, k), (self.v, v)):
                pages.flatten(0, 1)[new.rows] = torch.stack(branches[:sets], 2)
        if new.completed is None:
            return
        source, blocks = new.completed
        for pages, phi in ((self.k, self.layer.compress_k), (self.v, self.layer.compress_v)):
            rows = pages.flatten(0, 1)
            rows[blocks] = phi(rows[source])
