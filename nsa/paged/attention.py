"""Attention over keys that lie in pages, of sequences that differ in length: decode and chunked prefill.

The S queries of each sequence are the last of its tokens, as everywhere else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from nsa import backends, checks
from nsa.attention import Aux
from nsa.backends import Backend
from nsa.config import BRANCHES, NSAConfig
from nsa.geometry import Layout, num_compressed_blocks
from nsa.kv import KVView


@dataclass(frozen=True)
class PagedKV:
    """Keys and values of B sequences."""

    k: Tensor
    """[pages, page_size, Hkv, Dk]"""
    v: Tensor
    """[pages, page_size, Hkv, Dv]"""
    tables: Mapping[str, Tensor]
    """For each branch int32 [B, width]: the page of each `page_size` tokens, or compressed blocks, of a sequence."""
    lengths: Tensor
    """int32 [B]: tokens of each sequence, the queries included."""
    host_lengths: tuple[int, ...]
    """The same, known without asking the device. A replayed CUDA graph reads `lengths` alone."""

    def view(self, branch: str) -> KVView:
        """What a branch reads."""
        return KVView(self.k, self.v, self.tables[branch])


def row_places(table: Tensor, numbers: Tensor, page_size: int) -> Tensor:
    """int64 [B, R]: page · page_size + row of the rows `numbers` ([R] or [B, R]) by the table int32 [B, width].

    What is beyond the table is taken for its last page: such rows are not used, and need no host sync to leave out.
    """
    numbers = numbers.expand(table.shape[0], -1)
    pages = table.gather(1, (numbers // page_size).clamp(max=table.shape[1] - 1))
    return pages.long() * page_size + numbers % page_size


def paged_attention(
    q: Tensor, keys: PagedKV, gates: Tensor, config: NSAConfig, *, backend: str, return_aux: bool
) -> tuple[Tensor, Aux | None]:
    """o [B, S, Hq, Dv] of q [B, S, Hq, Dk] and gates [B, S, Hq, 3], and what was read if asked for; no gradients.

    A few queries are one step of a backend that reads pages. Else sequences of one length are one call of a backend,
    on keys gathered from their pages.
    """
    name, run = backends.choose(backend, q, keys.v)
    scale = checks.a_scale(None, q.shape[-1])
    with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
        if step := backends.decoder(name, q):
            compressed, selected, window = map(keys.view, BRANCHES)
            decoded = step(q, compressed, selected, window, keys.lengths, gates, config, scale)
            return decoded.o, (Aux.of(decoded, name) if return_aux else None)
        o, aux = _gathered(q, keys, gates, config, scale, name, run)
        return o, (aux if return_aux else None)


def _gathered(
    q: Tensor, keys: PagedKV, gates: Tensor, config: NSAConfig, scale: float, name: str, run: Backend
) -> tuple[Tensor, Aux]:
    """The same by the parts of any backend."""
    found: list[tuple[Tensor, ...]] = [()] * len(keys.host_lengths)
    for length, rows in _by_length(keys.host_lengths).items():
        own = slice(None) if len(rows) == len(found) else rows
        together = _attend(_take(q, own), keys, own, length, _take(gates, own), config, scale, run)
        for i, row in enumerate(rows):
            found[row] = tuple(x[i] for x in together)
    o, block_indices, *of_branch = (torch.stack(column) for column in zip(*found, strict=True))
    lse = dict(zip(BRANCHES, (x.float() for x in of_branch[:3]), strict=True))
    read = {branch: x.sum(dtype=torch.int64) for branch, x in zip(BRANCHES, of_branch[3:], strict=True)}
    return o, Aux(block_indices, lse, read, name)


def _attend(
    q: Tensor,
    keys: PagedKV,
    own: slice | list[int],
    length: int,
    gates: Tensor,
    config: NSAConfig,
    scale: float,
    run: Backend,
) -> tuple[Tensor, ...]:
    """(o, block indices, 3 × lse, 3 × keys read) of the sequences `own`, all `length` tokens long."""

    def gathered(branch: str, first: int, last: int) -> tuple[Tensor, Tensor]:
        table = _take(keys.tables[branch], own)
        places = row_places(table, torch.arange(first, last, device=q.device), keys.k.shape[1])
        return keys.k.flatten(0, 1)[places], keys.v.flatten(0, 1)[places]

    num_queries = q.shape[1]
    layout = Layout(num_queries, length, config, q.device)
    near = min(length, config.w + num_queries - 1)  # the window reads no older tokens, which may be released
    k_cmp, v_cmp = gathered("compressed", 0, num_compressed_blocks(length, config))
    o_cmp, lse_cmp, read_cmp = run.compressed_attention(q, k_cmp, v_cmp, layout, scale)
    block_indices = run.select_blocks(q, k_cmp, layout, scale, lse_cmp)
    o_sel, lse_sel, read_sel = run.selected_attention(q, *gathered("selected", 0, length), block_indices, layout, scale)
    window = Layout(num_queries, near, config, q.device)
    o_win, lse_win, read_win = run.window_attention(q, *gathered("window", length - near, length), window, scale)
    o = run.combine((o_cmp, o_sel, o_win), gates)
    return o, block_indices, lse_cmp, lse_sel, lse_win, read_cmp, read_sel, read_win


def _by_length(lengths: tuple[int, ...]) -> dict[int, list[int]]:
    """The sequences of each length."""
    rows: dict[int, list[int]] = {}
    for row, length in enumerate(lengths):
        rows.setdefault(length, []).append(row)
    return rows


def _take(x: Tensor, rows: slice | list[int]) -> Tensor:
    """Some rows of x; a list would become a tensor on the device, which is a host sync."""
    return x[rows] if isinstance(rows, slice) else torch.stack([x[row] for row in rows])
