"""Attention calls that incidents put to every backend, and how a fault takes the place of one of its parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

import nsa
from nsa import Aux, NSAConfig, backends
from regression.injection import Fault, injected

SMALL = NSAConfig(l=4, d=2, l_sel=4, n_sel=4, w=8)
"""One config for most incidents: a GPU compiles its kernels once, and the interpreter's tiles stay small."""
BRANCHES = ("compressed", "selected", "window", "whole")
COMPILING_S = 180.0
"""Silence that is no stall where kernels may have to be compiled: on a GPU all of a call come in one step."""


@dataclass(frozen=True)
class Call:
    """One call: S queries, the last of T keys, standard normal, gates uniform."""

    q: Tensor
    """[B, S, Hq, D]."""
    k: Tensor
    """[B, T, Hkv, D]."""
    v: Tensor
    """[B, T, Hkv, D]."""
    gates: Tensor
    """[B, S, Hq, 3]."""
    config: NSAConfig = SMALL

    def rows(self, first: int, last: int) -> Call:
        """The queries first <= t < last of a call with S = T, over the keys before `last`: decode, or a chunk."""
        queries = slice(first, last)
        return replace(self, q=self.q[:, queries], k=self.k[:, :last], v=self.v[:, :last], gates=self.gates[:, queries])

    def leaves(self) -> Call:
        """The same numbers, each tensor a leaf that takes a gradient."""
        q, k, v, gates = (x.detach().requires_grad_() for x in (self.q, self.k, self.v, self.gates))
        return replace(self, q=q, k=k, v=v, gates=gates)

    def compressed_keys(self, backend: str) -> Tensor:
        """[B, blocks, Hkv, D]."""
        return nsa.compress(self.k, self.config, backend=backend)

    def select(self, backend: str) -> Tensor:
        """Block indices int32 [B, S, Hkv, n]."""
        return nsa.select_blocks(self.q, self.compressed_keys(backend), self.config, self.k.shape[1], backend=backend)

    def whole(self, backend: str) -> tuple[Tensor, Aux]:
        """`nsa_attention` with what it recorded."""
        return nsa.nsa_attention(self.q, self.k, self.v, self.gates, self.config, backend=backend, return_aux=True)

    def attend(self, branch: str, backend: str) -> Tensor:
        """Output of one branch, or of all gated: o [B, S, Hq, D]."""
        if branch == "whole":
            return self.whole(backend)[0]
        if branch == "window":
            return nsa.window_attention(self.q, self.k, self.v, self.config, backend=backend)[0]
        if branch == "selected":
            return nsa.selected_attention(self.q, self.k, self.v, self.select(backend), self.config, backend=backend)[0]
        v_compressed = nsa.compress(self.v, self.config, backend=backend)
        return nsa.compressed_attention(
            self.q, self.compressed_keys(backend), v_compressed, self.config, self.k.shape[1], backend=backend
        )[0]


def draw(
    tokens: int,
    device: str,
    *,
    config: NSAConfig = SMALL,
    batch: int = 1,
    kv_heads: int = 1,
    group: int = 2,
    head_dim: int = 16,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Call:
    """A call with S = T = `tokens`; the same numbers on every device."""
    generator = torch.Generator().manual_seed(seed)
    heads = kv_heads * group
    q, k, v = (
        torch.randn(batch, tokens, count, head_dim, generator=generator).to(device, dtype)
        for count in (heads, kv_heads, kv_heads)
    )
    gates = torch.rand(batch, tokens, heads, 3, generator=generator).to(device, dtype)
    return Call(q, k, v, gates, config)


def interpreted(backend: str, device: str) -> bool:
    """Whether the kernels run in Triton's interpreter, where a call takes 0.1 to 1 s."""
    return backend == "triton" and device == "cpu"


@contextmanager
def in_every_backend(part: str, fault: Callable[..., Any]) -> Iterator[None]:
    """Put `fault` in the place of one part of `nsa.backends.Backend`, in each backend that can be imported."""
    with injected(*replacing(part, fault)):
        yield


def replacing(part: str, fault: Callable[..., Any]) -> list[Fault]:
    """The fault for each backend that can be imported."""
    found = []
    for name in backends.NAMES[1:]:
        try:
            found.append(Fault(backends.load(name), part, fault))
        except ImportError:  # no Triton on this machine
            continue
    return found
