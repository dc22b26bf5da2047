"""The curves of generated inputs, from stretches of rows that lie evenly in the later half."""

from __future__ import annotations

import torch
from torch import Tensor

import nsa
from benchmarks.cases.recorded import BLOCK, Law, Sizes, Topics, put_in
from benchmarks.selection import curves
from benchmarks.selection.curves import Curves
from nsa import NSAConfig, geometry

ROWS = 192
"""Of a stretch: a tile of 64 neighbours three times."""


def of_law(law: Law, num_keys: int, num_kv_heads: int, seed: int, stretches: int) -> Curves:
    """What NSA selects on inputs of this law; one query head of 64 channels per key/value head, in float32."""
    generator = torch.Generator().manual_seed(seed)
    sizes = Sizes(1, num_keys, num_keys, num_kv_heads, 64)
    topics = Topics(law, sizes, generator)

    def normal(tokens: int) -> Tensor:
        return torch.randn(1, tokens, num_kv_heads, sizes.head_dim, generator=generator)

    rows = torch.cat([torch.arange(first, first + ROWS) for first in _first_rows(num_keys, stretches)])
    q = put_in(normal(rows.numel()), topics.of_queries(rows))
    return _curves(q, put_in(normal(num_keys), topics.of_key_blocks(), BLOCK), NSAConfig(), stretches)


def of_tensors(q: Tensor, k: Tensor, config: NSAConfig, stretches: int) -> Curves:
    """What NSA selects for q [B, T, Hq, Dk] and k [B, T, Hkv, Dk]."""
    parts = [q[:, first : first + ROWS] for first in _first_rows(k.shape[1], stretches)]
    return _curves(torch.cat(parts, 1), k, config, stretches)


def _first_rows(num_keys: int, stretches: int) -> list[int]:
    half = num_keys // 2
    return [half + i * (half - ROWS) // max(stretches - 1, 1) for i in range(stretches)]


def _curves(q: Tensor, k: Tensor, config: NSAConfig, stretches: int) -> Curves:
    """q [B, stretches · ROWS, Hq, Dk], stretch after stretch."""
    firsts, k_cmp, chosen = _first_rows(k.shape[1], stretches), nsa.compress(k, config), []
    for i, first in enumerate(firsts):
        seen = k_cmp[:, : geometry.num_compressed_blocks(first + ROWS, config)]
        chosen.append(nsa.select_blocks(q[:, i * ROWS : (i + 1) * ROWS], seen, config, num_keys=first + ROWS))
    return curves.measure(chosen, firsts, config)
