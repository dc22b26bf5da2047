"""Attention calls that incidents put to every backend, their branches and their gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

import nsa
from nsa import Aux, NSAConfig, config

SMALL = NSAConfig(l=4, d=2, l_sel=4, n_sel=4, w=8)
"""One config for most incidents: a GPU compiles its kernels once, and the interpreter's tiles stay small."""
BRANCHES = (*config.BRANCHES, "whole")


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

    def gradients(
        self, o: Tensor, upstream: Tensor | None = None, of: Sequence[str] = ("q", "k", "v", "gates")
    ) -> dict[str, Tensor]:
        """By name ("dq", ...), of `upstream · o` or of the sum of o²; the call is of leaves, and o of this call.

        Without `upstream` a tensor that o does not depend on has no entry.
        """
        leaves = [getattr(self, name) for name in of]
        if upstream is None:
            found = torch.autograd.grad(o.square().sum(), leaves, allow_unused=True)
        else:
            found = torch.autograd.grad(o, leaves, upstream)
        return {f"d{name}": x for name, x in zip(of, found, strict=True) if x is not None}

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
