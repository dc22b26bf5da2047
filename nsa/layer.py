"""NativeSparseAttention: projections, RoPE, phi and gates around `nsa_attention`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn import functional

from nsa import backends, checks
from nsa.attention import Aux, nsa_attention
from nsa.compression import compressor
from nsa.config import NSAConfig
from nsa.rope import rotate_both

PerBranch = tuple[Tensor, Tensor, Tensor]
"""One tensor per branch: compressed (its source), selected, window."""

Observer = Callable[[Tensor, Aux, "Tensor | None"], None]
"""Takes the gates [B, S, Hq, 3], what attention did, and `cu_seqlens`."""


@runtime_checkable
class Cache(Protocol):
    """What the layer asks of a cache: refuse what cannot be served, attend, and only then grow."""

    def admit(self, layer: NativeSparseAttention, x: Tensor) -> None:
        """Raise ValueError or TypeError, with nothing written, unless the tokens x [B, S, dim] can be appended."""

    def positions(self, num_tokens: int) -> Tensor:
        """int64 [S], or [B, S] where rows differ in length: where the next tokens stand."""

    def attend(self, q: Tensor, k: PerBranch, v: PerBranch, gates: Tensor) -> Tensor:
        """Store the new keys and values beyond the end; attention of q [B, S, Hq, Dk] over all: o [B, S, Hq, Dv]."""

    def commit(self, num_tokens: int) -> None:
        """Make the stored tokens part of the cache."""


class Context(Protocol):
    """What the layer asks where several ranks share a sequence (`nsa.parallel`)."""

    def forward(
        self, layer: NativeSparseAttention, x: Tensor, cu_seqlens: Tensor | None, return_aux: bool
    ) -> tuple[Tensor, Tensor, Aux | None]:
        """x [B, S, dim], the rank's own tokens -> (o [B, S, Hq, Dv], gates [B, S, Hq, 3], what attention did)."""


class Gates(nn.Module):
    """The gates of Eq. 5: x [B, S, dim] -> [B, S, Hq, 3] in the order compressed, selected, window.

    A sigmoid lets the branches add up to anything between 0 and 3; a softmax would make them compete.
    """

    def __init__(
        self, dim: int, num_heads: int, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.linear = nn.Linear(dim, num_heads * 3, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.from_logits(self.linear(x))

    def from_logits(self, logits: Tensor) -> Tensor:
        """Logits [B, S, Hq * 3], what `linear` gives -> [B, S, Hq, 3]."""
        return logits.sigmoid().unflatten(-1, (-1, 3))


class NativeSparseAttention(nn.Module):
    """Causal self-attention with NSA (arXiv 2502.11089): x [B, S, dim] -> [B, S, dim].

    Args:
        dim: channels of the input and output.
        num_heads: Hq, query heads.
        num_kv_heads: Hkv, key/value heads; divides Hq.
        head_dim_k: Dk, head size of queries and keys.
        head_dim_v: Dv, head size of values.
        config: NSAConfig.
        shared_kv: one set of keys and values for the three branches, in place of one each (section 3.3.3).
        backend: "reference", "torch", "triton" or "auto".
        rope_base: of the rotary embedding of queries and keys.
        device: of the parameters.
        dtype: of the parameters.

    Raises ValueError or TypeError naming the argument, what came and what is wanted.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim_k: int,
        head_dim_v: int,
        config: NSAConfig,
        *,
        shared_kv: bool = False,
        backend: str = "auto",
        rope_base: float = 10000.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        sizes = {
            "dim": dim,
            "num_heads": num_heads,
            "num_kv_heads": num_kv_heads,
            "head_dim_k": head_dim_k,
            "head_dim_v": head_dim_v,
        }
        for name, size in sizes.items():
            a_size(name, size)
        if num_heads % num_kv_heads:
            raise ValueError(f"num_kv_heads must divide num_heads; got {num_kv_heads} and {num_heads}")
        if backend not in backends.NAMES:
            raise ValueError(f"backend must be one of {', '.join(backends.NAMES)}; got {backend!r}")
        if not rope_base > 0:
            raise ValueError(f"rope_base must be positive; got {rope_base}")
        self.config = checks.a_config(config)
        self.dim, self.num_heads, self.num_kv_heads = dim, num_heads, num_kv_heads
        self.head_dim_k, self.head_dim_v = head_dim_k, head_dim_v
        self.num_kv_sets = 1 if shared_kv else 3
        self.backend, self.rope_base = backend, rope_base
        self.observer: Observer | None = None
        """Called in each forward pass while it is set: how training reads gates and selection."""
        self.context: Context | None = None
        """The ranks that share the sequence; set by `nsa.parallel.context_parallel`."""

        num_kv_heads = self.num_kv_sets * num_kv_heads
        self.q = nn.Linear(dim, num_heads * head_dim_k, bias=False, device=device, dtype=dtype)
        self.k = nn.Linear(dim, num_kv_heads * head_dim_k, bias=False, device=device, dtype=dtype)
        self.v = nn.Linear(dim, num_kv_heads * head_dim_v, bias=False, device=device, dtype=dtype)
        self.o = nn.Linear(num_heads * head_dim_v, dim, bias=False, device=device, dtype=dtype)
        self.compress_k = compressor(config, head_dim_k, backend=backend, device=device, dtype=dtype)
        self.compress_v = compressor(config, head_dim_v, backend=backend, device=device, dtype=dtype)
        self.gates = Gates(dim, num_heads, device=device, dtype=dtype)

    def forward(self, x: Tensor, cache: Cache | None = None, cu_seqlens: Tensor | None = None) -> Tensor:
        """x [B, S, dim] -> [B, S, dim].

        With `cache` the tokens follow those it holds, and are added to it (inference only). With
        `cu_seqlens`, int32 [N+1], x is N packed documents (B = 1) that do not see one another.
        """
        self._check(x, cache, cu_seqlens)
        if cache is None:
            o, gates, aux = self._attend(x, cu_seqlens)
            if self.observer is not None and aux is not None:
                self.observer(gates.detach(), aux.detached(), cu_seqlens)
            return self._output(o)
        o = cache.attend(*self.project(x, cache.positions(x.shape[1])))
        out = self._output(o)
        cache.commit(x.shape[1])
        return out

    @property
    def projected_dtype(self) -> torch.dtype:
        """The dtype of queries, keys and values made now: the parameters', or autocast's where that is on."""
        weight, device = self.q.weight, self.q.weight.device.type
        if torch.is_autocast_enabled(device) and weight.dtype != torch.float64:
            return torch.get_autocast_dtype(device)
        return weight.dtype

    def _attend(self, x: Tensor, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor, Aux | None]:
        """(o [B, S, Hq, Dv], gates [B, S, Hq, 3], what attention did if that is observed)."""
        if self.context is not None:
            return self.context.forward(self, x, cu_seqlens, self.observer is not None)
        own = None if cu_seqlens is None else checks.layout(x, None, self.config, cu_seqlens).positions
        q, k, v, gates = self.project(x, own)
        more: dict[str, Any] = {"cu_seqlens": cu_seqlens, "backend": self.backend}
        if self.config.phi == "avg":  # which the call computes with what else it does to keys and values
            attend = functools.partial(nsa_attention, q, k, v, gates, self.config, **more)
        else:
            more["k_compressed"] = self.compress_k(k[0], cu_seqlens)
            more["v_compressed"] = self.compress_v(v[0], cu_seqlens)
            attend = functools.partial(nsa_attention, q, (None, *k[1:]), (None, *v[1:]), gates, self.config, **more)
        if self.observer is None:
            return attend(), gates, None
        o, aux = attend(return_aux=True)
        return o, gates, aux

    def project(self, x: Tensor, positions: Tensor | None) -> tuple[Tensor, PerBranch, PerBranch, Tensor]:
        """q [B, S, Hq, Dk], keys [B, S, Hkv, Dk] and values [B, S, Hkv, Dv] for each branch, gates [B, S, Hq, 3].

        q and k are rotated (RoPE).

        `positions` int64 [S] or [B, S]; None where the tokens are the first of their sequences.
        """
        q = self.q(x).unflatten(-1, (self.num_heads, self.head_dim_k))
        k = self.k(x).unflatten(-1, (self.num_kv_sets * self.num_kv_heads, self.head_dim_k))
        q, k = rotate_both(q, k, positions, self.rope_base, self.backend)
        v, gates = self._values_and_gates(x)
        return q, per_branch(k.chunk(self.num_kv_sets, dim=2)), per_branch(v), gates

    def _values_and_gates(self, x: Tensor) -> tuple[Sequence[Tensor], Tensor]:
        """The values of each set [B, S, Hkv, Dv], and the gates [B, S, Hq, 3].

        In a graph of training they are one product. The gates have few outputs: a product of their own takes as long
        as it takes to read x, and the backward pass to write one more gradient of x and to add it.
        """
        sets, heads = self.num_kv_sets, (self.num_kv_heads, self.head_dim_v)
        # in inference the weights, which are joined in each call, may be larger than x
        if torch.compiler.is_compiling() and torch.is_grad_enabled() and self._can_share_a_product():
            linear, of_set = self.gates.linear, self.v.out_features // sets
            weights, channels = (self.v.weight, linear.weight), (*sets * (of_set,), linear.out_features)
            *values, logits = joint_product(x, weights, channels)
            gates = self.gates.from_logits(logits + linear.bias.to(logits.dtype))
            return [v.unflatten(-1, heads) for v in values], gates
        v = self.v(x).unflatten(-1, (sets * self.num_kv_heads, self.head_dim_v))
        return v.chunk(sets, dim=2), self.gates(x)

    def _can_share_a_product(self) -> bool:
        """Whether the weights of values and gates can be used without the calls of their modules."""
        v, gates = self.v, self.gates
        if not (is_plain(v, nn.Linear) and is_plain(gates, Gates) and is_plain(gates.linear, nn.Linear)):
            return False
        weights = v.weight, gates.linear.weight
        if v.bias is not None or gates.linear.bias is None or weights[0].requires_grad != weights[1].requires_grad:
            return False
        return all(type(weight) in (Tensor, nn.Parameter) for weight in weights)  # not quantised, not distributed

    def _output(self, o: Tensor) -> Tensor:
        """o [B, S, Hq, Dv] -> [B, S, dim]."""
        out: Tensor = self.o(o.flatten(2))
        return out

    def _check(self, x: object, cache: object, cu_seqlens: object) -> None:
        x = checks.tensor("x", x, ("B", "S", self.dim))
        weight = self.q.weight
        if x.device != weight.device:
            raise ValueError(f"x must be on the layer's device, {weight.device}; got {x.device}")
        casts = torch.is_autocast_enabled(x.device.type) and torch.float64 not in (x.dtype, weight.dtype)
        if x.dtype != weight.dtype and not casts:
            raise TypeError(f"x must have the layer's dtype, {weight.dtype}; got {x.dtype}")
        if cache is None:
            return
        if self.context is not None:
            raise ValueError("cache must be None where several ranks share a sequence; decode on one")
        if not isinstance(cache, Cache):
            raise TypeError(f"cache must be a KVCache, rows of a PagedCache, or None; got {type(cache).__name__}")
        if cu_seqlens is not None:
            raise ValueError("cache and cu_seqlens exclude each other; a cache holds one document per batch row")
        cache.admit(self, x)


def is_plain(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether a module is of this very class, not an adapter, and its call nothing else: no hook, no other forward."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return type(module) is kind and not any(hooks) and "forward" not in module.__dict__


def joint_product(x: Tensor, weights: tuple[Tensor, ...], channels: Sequence[int]) -> list[Tensor]:
    """x [..., dim] times all weights [outputs, dim] as one product, in pieces of so many channels.

    The pieces are slices of one tensor. Its rows are padded to multiples of 64 channels, in 16 bits 128 bytes, which
    is what a GPU reads at once: the slices are read by head.
    """
    padding = -sum(channels) % 64
    weight = functional.pad(torch.cat(weights), (0, 0, 0, padding))
    *pieces, _ = functional.linear(x, weight).split([*channels, padding], dim=-1)
    return pieces


def a_size(name: str, size: object) -> int:
    """A positive int, or TypeError or ValueError that names it."""
    if isinstance(size, bool) or not isinstance(size, int):
        raise TypeError(f"{name} must be an int; got {size!r} ({type(size).__name__})")
    if size < 1:
        raise ValueError(f"{name} must be at least 1; got {size}")
    return size


def per_branch(sets: Sequence[Tensor]) -> PerBranch:
    """Three branches from three sets of keys (values), or from the one that all of them share."""
    return (sets[0], sets[1], sets[2]) if len(sets) == 3 else (sets[0], sets[0], sets[0])
