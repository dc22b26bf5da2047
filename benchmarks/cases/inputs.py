"""The tensors of one attention case, the same for every implementation that is measured on it."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.cases import recorded, replayed
from benchmarks.cases.key import Key
from benchmarks.cases.recorded import Sizes
from nsa import NSAConfig
from nsa.geometry import num_compressed_blocks

KINDS = ("random", *recorded.KINDS)
OFFERED = (*KINDS, replayed.KIND)
"""What can be measured now; earlier records have others, such as "local"."""
"""How q and k are drawn, of any case; a key names it. `replayed.KIND` is of a few cases alone."""


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


def draw(key: Key, device: str, seed: int = 0, step: int = 0) -> Problem:
    """Inputs of the key's kind, every value of mean 0 and variance 1, and uniform gates.

    "random": q, k and v standard normal. "recorded" and its quantiles: what NSA selects from q and k follows recorded
    curves (`recorded`); v is normal. "replayed": a decode step's q and k choose recorded blocks (`replayed`); a part,
    which is given the blocks, has normal ones. The seed follows from the shape and `seed`: they are the same for all.
    `step` is that of decode steps which follow one another: other queries and gates over the same keys. Raises
    ValueError for another kind.
    """
    if key.inputs not in OFFERED:
        raise ValueError(f"key.inputs must be one of {', '.join(OFFERED)}; got {key.inputs!r}")
    generator = _generator(key, device, seed)
    q, k, v = _queries(key, generator), *_keys_and_values(key, generator)
    problem = Problem(q, k, v, _gates(key, generator))
    if step:
        of_step = _generator(key, device, seed, "step", step)
        problem = dataclasses.replace(problem, q=_queries(key, of_step), gates=_gates(key, of_step))
    if key.inputs == replayed.KIND and key.mode == "decode":
        replayed.aim(problem.q, problem.k, key, seed, step)
    if key.inputs in recorded.KINDS:
        sizes = Sizes(key.batch, key.num_queries, key.num_keys, key.num_kv_heads, key.head_dim_k)
        recorded.put_topics(problem.q, problem.k, key.inputs, sizes, _generator(key, device, seed, "topics"), step)
    return problem


def _generator(key: Key, device: str, seed: int, *of: object) -> torch.Generator:
    """Of the case's tensors, or of something beside them by its name: on a CPU the lowest 32 bits of a seed count."""
    shape = (key.batch, key.num_queries, key.num_keys, key.heads, key.num_kv_heads, key.head_dim_k, key.head_dim_v)
    return torch.Generator(device).manual_seed(zlib.crc32(repr((*shape, *of)).encode()) + seed)


def _queries(key: Key, generator: torch.Generator) -> Tensor:
    return _normal(key, generator, key.num_queries, key.heads, key.head_dim_k)


def _keys_and_values(key: Key, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    k = _normal(key, generator, key.num_keys, key.num_kv_heads, key.head_dim_k)
    return k, _normal(key, generator, key.num_keys, key.num_kv_heads, key.head_dim_v)


def _gates(key: Key, generator: torch.Generator) -> Tensor:
    size, dtype = (key.batch, key.num_queries, key.heads, 3), getattr(torch, key.dtype)
    return torch.rand(*size, generator=generator, device=generator.device, dtype=dtype)


def _normal(key: Key, generator: torch.Generator, *size: int) -> Tensor:
    dtype = getattr(torch, key.dtype)
    return torch.randn(key.batch, *size, generator=generator, device=generator.device, dtype=dtype)


def followed(key: Key) -> str | None:
    """Which recorded curves the inputs of a key follow, at which length and by which law, or what they replay; None
    where they are random."""
    if key.inputs == replayed.KIND:
        return replayed.followed(key)
    if key.inputs not in recorded.KINDS:
        return None
    law = recorded.law(key.inputs, key.num_keys)
    return f"at {law.num_keys} tokens: {law.target}; law {law.digest}"


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
