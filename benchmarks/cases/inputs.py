"""The tensors of one attention case, the same for every implementation that is measured on it."""

from __future__ import annotations

import dataclasses
import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.cases.key import Key
from nsa import NSAConfig
from nsa.geometry import num_compressed_blocks

KINDS = ("random", "local")
"""How q and k are drawn; a key names it."""

_LOCAL_TOKENS = 256
"""Over how many tokens a local walk forgets where it was: four selection blocks."""
_LOCAL_NOISE = 0.05
"""Share of a local tensor's variance that is each token's own."""


@dataclass(frozen=True)
class Problem:
    """Queries that stand at the end of the keys, gates, and for decode what the cache holds compressed already."""

    q: Tensor  # [B, S, Hq, Dk]
    k: Tensor  # [B, T, Hkv, Dk]
    v: Tensor  # [B, T, Hkv, Dv]
    gates: Tensor  # [B, S, Hq, 3]
    k_compressed: Tensor | None = None  # [B, blocks, Hkv, Dk]
    v_compressed: Tensor | None = None  # [B, blocks, Hkv, Dv]

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Those that are there, by name."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: x for name, x in values.items() if x is not None}

    def map(self, change: Callable[[Tensor], Tensor]) -> Problem:
        """The same problem with `change` applied to each tensor that is there."""
        return dataclasses.replace(self, **{name: change(x) for name, x in self.tensors.items()})


def draw(key: Key, device: str, seed: int = 0) -> Problem:
    """Inputs of the key's kind, every value of mean 0 and variance 1, and uniform gates.

    "random": q, k and v standard normal. "local": q and k each walk smoothly over the tokens, so that neighbours look
    for the same blocks, as in trained models. The seed follows from the shape and `seed`: they are the same for all.
    Raises ValueError for another kind.
    """
    if key.inputs not in KINDS:
        raise ValueError(f"key.inputs must be one of {', '.join(KINDS)}; got {key.inputs!r}")
    shape = (key.batch, key.num_queries, key.num_keys, key.heads, key.num_kv_heads, key.head_dim_k, key.head_dim_v)
    generator = torch.Generator(device).manual_seed(zlib.crc32(repr(shape).encode()) + seed)
    dtype = getattr(torch, key.dtype)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, device=device, dtype=dtype)

    vary = normal if key.inputs == "random" else lambda *size: _walk(normal, *size)
    q = vary(key.batch, key.num_queries, key.heads, key.head_dim_k)
    k = vary(key.batch, key.num_keys, key.num_kv_heads, key.head_dim_k)
    v = normal(key.batch, key.num_keys, key.num_kv_heads, key.head_dim_v)
    gates = torch.rand(key.batch, key.num_queries, key.heads, 3, generator=generator, device=device, dtype=dtype)
    return Problem(q, k, v, gates)


def _walk(normal: Callable[..., Tensor], batch: int, tokens: int, heads: int, channels: int) -> Tensor:
    """[batch, tokens, heads, channels]: every `_LOCAL_TOKENS` a new normal point, on arcs between them, and noise.

    On an arc a·cos + b·sin from one independent point to the next the variance stays 1.
    """
    points = normal(batch, -(-tokens // _LOCAL_TOKENS) + 1, heads, channels)
    noise = normal(batch, tokens, heads, channels)
    position = torch.arange(tokens, device=points.device)
    before = position // _LOCAL_TOKENS
    angle = (position % _LOCAL_TOKENS)[:, None, None] * (math.pi / 2 / _LOCAL_TOKENS)
    walk = points[:, before] * angle.cos().to(points.dtype)
    walk += points[:, before + 1] * angle.sin().to(points.dtype)
    return walk.mul_(math.sqrt(1 - _LOCAL_NOISE)).add_(noise, alpha=math.sqrt(_LOCAL_NOISE))


def with_compressed(problem: Problem, config: NSAConfig) -> Problem:
    """What a cache would hold: the keys and values compressed block by block, rounded to their dtype."""
    return dataclasses.replace(
        problem, k_compressed=block_means(problem.k, config), v_compressed=block_means(problem.v, config)
    )


def block_means(x: Tensor, config: NSAConfig) -> Tensor:
    """phi = avg (Eq. 7) in one expression: [B, T, H, D] -> [B, blocks, H, D], in at least float32, then rounded."""
    if num_compressed_blocks(x.shape[1], config) == 0:
        return x[:, :0]
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return wide.unfold(1, config.l, config.d).mean(-1).to(x.dtype)
