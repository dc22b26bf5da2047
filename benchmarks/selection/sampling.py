"""The curves of generated inputs: of all rows of the later half, as an atlas has them, or of stretches of these."""

from __future__ import annotations

import torch
from torch import Tensor

import nsa
from benchmarks.cases.recorded import BLOCK, Law, Sizes, Topics, put_in
from benchmarks.selection import curves
from benchmarks.selection.curves import Curves
from nsa import NSAConfig, geometry

ROWS = 128
"""Of a stretch: two tiles of 64 neighbours, and pairs at the longest lag from every place in a block."""
STRETCHES = 64
"""At most, evenly in the later half. Neighbours choose alike, so that a stretch counts little more than once for
popularity: of 8 stretches it comes out 40 % too high at 32k."""


def of_law(law: Law, num_keys: int, num_kv_heads: int, seed: int, stretches: int = STRETCHES) -> Curves:
    """What NSA selects on inputs of this law; one query head of 64 channels per key/value head, in float32.

    `stretches`: of rows that are measured, at most; no row is in two.
    """
    generator = torch.Generator().manual_seed(seed)
    sizes, config = Sizes(1, num_keys, num_keys, num_kv_heads, 64), NSAConfig()
    topics = Topics(law, sizes, generator)

    def normal(tokens: int) -> Tensor:
        return torch.randn(1, tokens, num_kv_heads, sizes.head_dim, generator=generator)

    k_cmp = nsa.compress(put_in(normal(num_keys), topics.of_key_blocks(), BLOCK), config)
    firsts, chosen = _first_rows(num_keys, min(stretches, num_keys // 2 // ROWS)), []
    for first in firsts:
        q = put_in(normal(ROWS), topics.of_queries(torch.arange(first, first + ROWS)))
        seen = k_cmp[:, : geometry.num_compressed_blocks(first + ROWS, config)]
        chosen.append(nsa.select_blocks(q, seen, config, num_keys=first + ROWS))
    return curves.measure(chosen, firsts, config)


def of_tensors(q: Tensor, k: Tensor, config: NSAConfig) -> Curves:
    """What NSA selects for q [B, T, Hq, Dk] and k [B, T, Hkv, Dk], in every row of the later half."""
    first = k.shape[1] // 2
    chosen = nsa.select_blocks(q[:, first:], nsa.compress(k, config), config, num_keys=k.shape[1])
    return curves.measure([chosen], [first], config)


def _first_rows(num_keys: int, stretches: int) -> list[int]:
    half = num_keys // 2
    return [half + i * (half - ROWS) // max(stretches - 1, 1) for i in range(stretches)]
