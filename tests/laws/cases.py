"""The calls that the laws are tried on: sizes are drawn, numbers come from a seed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor

from benchmarks.cases import recorded
from benchmarks.cases.recorded import Sizes
from nsa import NSAConfig

SMALL = NSAConfig(l=4, d=2, l_sel=8, n_sel=3, w=8)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MOST_KEYS = 48
"""Triton's interpreter runs the kernels at some 1e5 products a second, so the drawn calls stay small."""


class Inputs(NamedTuple):
    """Tensors of one call: q [B,S,Hq,Dk], k [B,T,Hkv,Dk], v [B,T,Hkv,Dv], gates [B,S,Hq,3], cu_seqlens [N+1]."""

    q: Tensor
    k: Tensor
    v: Tensor
    gates: Tensor
    cu_seqlens: Tensor | None

    def qkv(self, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v, in another dtype if one is given."""
        dtype = dtype or self.q.dtype
        return self.q.to(dtype), self.k.to(dtype), self.v.to(dtype)

    def floats(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self[:4]

    def with_floats(self, floats: tuple[Tensor, ...]) -> Inputs:
        q, k, v, gates = floats
        return Inputs(q, k, v, gates, self.cu_seqlens)


@dataclass(frozen=True)
class Case:
    """One call, small enough to be printed when a law fails on it."""

    config: NSAConfig = SMALL
    batch: int = 1
    num_kv_heads: int = 2
    group: int = 2
    dk: int = 16
    dv: int = 8
    queries: int = 24
    keys: int = 24
    documents: tuple[int, ...] | None = None
    """Tokens of each packed document; then batch is 1 and queries = keys = their sum."""
    dtype: torch.dtype = torch.float32
    seed: int = 0
    recorded: bool = False
    """Neighbouring queries choose alike, as recorded of a trained model; of one document."""

    @property
    def cut(self) -> int:
        """A token of the call (0 if there is none), the same each time."""
        return self.seed % max(self.keys, 1)

    @property
    def offset(self) -> int:
        """Keys before the first query."""
        return self.keys - self.queries

    @property
    def bounds(self) -> list[int]:
        """First token of each document, and the end."""
        lengths = (self.keys,) if self.documents is None else self.documents
        return [sum(lengths[:i]) for i in range(len(lengths) + 1)]

    def inputs(self, device: torch.device) -> Inputs:
        """Normal tensors; drawn on the CPU in float32, so that each device and dtype gets the same."""
        numbers = torch.Generator().manual_seed(self.seed)

        def draw(tokens: int, heads: int, channels: int) -> Tensor:
            return torch.randn(self.batch, tokens, heads, channels, generator=numbers)

        heads = self.num_kv_heads * self.group
        q, gates = draw(self.queries, heads, self.dk), draw(self.queries, heads, 3)
        k, v = draw(self.keys, self.num_kv_heads, self.dk), draw(self.keys, self.num_kv_heads, self.dv)
        if self.recorded:
            sizes = Sizes(self.batch, self.queries, self.keys, self.num_kv_heads, self.dk)
            recorded.put_topics(q, k, "recorded", sizes, numbers)
        q, gates, k, v = (x.to(device, self.dtype) for x in (q, gates, k, v))
        cu_seqlens = None
        if self.documents is not None:
            cu_seqlens = torch.tensor(self.bounds, dtype=torch.int32, device=device)
        return Inputs(q, k, v, gates, cu_seqlens)

    def noise(self, like: Tensor) -> Tensor:
        """Standard normal numbers in the shape of a tensor, the same each time: an upstream gradient, say."""
        numbers = torch.Generator().manual_seed(self.seed + 1)
        return torch.randn(like.shape, generator=numbers).to(like.device, like.dtype)

    def prefix(self, tokens: int) -> Case:
        return replace(self, queries=tokens - self.offset, keys=tokens)


@st.composite
def configs(draw: st.DrawFn) -> NSAConfig:
    """Any config that is allowed, odd block sizes included."""
    d = draw(st.sampled_from([2, 1, 3, 4]))
    strides = draw(st.integers(1, 4))
    n_sel = draw(st.integers(1, 5))
    init = draw(st.integers(0, min(n_sel, 2)))
    return NSAConfig(
        l=d * strides,
        d=d,
        l_sel=d * draw(st.integers(strides, 5)),
        n_sel=n_sel,
        w=draw(st.integers(1, 17)),
        init_blocks=init,
        local_blocks=draw(st.integers(0, min(n_sel - init, 3))),
    )


def lengths(config: NSAConfig) -> st.SearchStrategy[int]:
    """Numbers of tokens, mostly around where something changes: w, 2w, l, l', n·l'."""
    edges = (config.w, 2 * config.w, config.l, config.l_sel, config.n_sel * config.l_sel)
    near = sorted({edge + step for edge in edges for step in (-1, 0, 1)} | {1, 2})
    return st.sampled_from([n for n in near if 0 <= n <= MOST_KEYS]) | st.integers(0, MOST_KEYS)


@st.composite
def cases(
    draw: st.DrawFn,
    *,
    dtypes: tuple[torch.dtype, ...] = (torch.float32,),
    fewer_queries: bool = True,
    packed: bool = True,
    least_keys: int = 0,
) -> Case:
    """Any call: plain, with fewer queries than keys, or packed."""
    config = draw(configs())
    case = Case(
        config=config,
        num_kv_heads=draw(st.integers(1, 3)),
        group=draw(st.sampled_from([2, 1, 3, 4])),
        dk=draw(st.sampled_from([16, 8, 24])),
        dv=draw(st.sampled_from([8, 16, 12])),
        dtype=draw(st.sampled_from(dtypes)),
        seed=draw(st.integers(0, 2**16)),
    )
    if packed and draw(st.booleans()):
        documents = draw(st.lists(lengths(config), min_size=1, max_size=4))
        while sum(documents) > MOST_KEYS:
            documents[documents.index(max(documents))] //= 2
        documents[-1] += max(least_keys - sum(documents), 0)
        total = sum(documents)
        return replace(case, documents=tuple(documents), queries=total, keys=total)
    keys = max(draw(lengths(config)), least_keys)
    queries = draw(st.integers(0, keys)) if fewer_queries and draw(st.booleans()) else keys
    return replace(case, batch=draw(st.integers(1, 2)), queries=queries, keys=keys)
