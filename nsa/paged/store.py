"""The pages of one layer: tensors, and how new keys, values and compressed blocks get into them.

Every index is computed from tensors, so that nothing waits for the device and a CUDA graph can hold it all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nsa.config import NSAConfig
from nsa.geometry import num_compressed_blocks
from nsa.layer import NativeSparseAttention, PerBranch
from nsa.paged.allocator import NULL_PAGE
from nsa.paged.attention import row_places

Tables = Mapping[str, Tensor]
"""int32 [B, width] for each stream of `nsa.paged.allocator.streams`."""


@dataclass(frozen=True)
class Places:
    """Where the tokens of one step stand and lie, the same in every layer; a row is page · page_size + row, int64."""

    positions: Tensor
    """int64 [B, S]: of the new tokens, in their sequences."""
    lengths: Tensor
    """int32 [B]: tokens of each sequence, the new ones included."""
    tokens: Tensor
    """[B, S, sets]: the rows of the new tokens, in each set of keys."""
    completed: tuple[Tensor, Tensor] | None
    """None where no sequence completes a compressed block; else for its next n blocks, full or not,
    [B, (n − 1)·d + l]: the tokens that they are made of, and [B, n]: themselves, in NULL_PAGE where one is not full."""


def places(
    tables: Tables, lengths: Tensor, num_tokens: int, config: NSAConfig, page_size: int, *, completing: bool
) -> Places:
    """For `num_tokens` more tokens in sequences of `lengths`, int32 [B]; whether they may complete a block."""
    positions = lengths[:, None] + torch.arange(num_tokens, device=lengths.device)
    sets = ("source", "selected", "window") if "source" in tables else ("tokens",)
    tokens = torch.stack([row_places(tables[name], positions, page_size) for name in sets], -1)
    if not completing:
        return Places(positions, lengths + num_tokens, tokens, None)
    done = num_compressed_blocks(lengths, config)[:, None]
    at_most = num_tokens // config.d + 1
    source = done * config.d + torch.arange((at_most - 1) * config.d + config.l, device=lengths.device)
    block = done + torch.arange(at_most, device=lengths.device)
    full = block < num_compressed_blocks(lengths + num_tokens, config)[:, None]
    state = row_places(tables["compressed"], block, page_size) if tables["compressed"].shape[1] else block.long()
    into = torch.where(full, state, NULL_PAGE * page_size)
    return Places(positions, lengths + num_tokens, tokens, (row_places(tables[sets[0]], source, page_size), into))


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

    def append(self, k: PerBranch, v: PerBranch, where: Places) -> None:
        """Write new keys [B, S, Hkv, Dk] and values [B, S, Hkv, Dv], and the blocks that they complete."""
        sets = where.tokens.shape[2]
        for pages, branches in ((self.k, k), (self.v, v)):
            pages.flatten(0, 1)[where.tokens] = torch.stack(branches[:sets], 2)
        if where.completed is None:
            return
        source, blocks = where.completed
        for pages, phi in ((self.k, self.layer.compress_k), (self.v, self.layer.compress_v)):
            rows = pages.flatten(0, 1)
            rows[blocks] = phi(rows[source])
