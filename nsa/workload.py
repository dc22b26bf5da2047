"""A shape that kernels are compiled or tuned for: training, a prompt or a decode step, and the calls that need them.

The calls are those of `nsa.NativeSparseAttention`, whose tensors have the strides and types that a model's have; its
residual stream has few channels here, since no kernel depends on them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from nsa.cache import KVCache
from nsa.checks import a_config
from nsa.config import NSAConfig
from nsa.layer import NativeSparseAttention, a_size
from nsa.paged.cache import PagedCache

KINDS = ("train", "prefill", "decode")
_CHANNELS = 16
"""Of the residual stream."""


@dataclass(frozen=True)
class Workload:
    """One shape. Raises ValueError or TypeError naming the field, what came and what is wanted."""

    kind: str
    """"train" (forward and backward), "prefill" (forward alone) or "decode" (one token more)."""
    batch: int
    """Sequences."""
    tokens: int
    """Of each sequence; in decode those that a cache has room for."""
    num_heads: int
    """Hq."""
    num_kv_heads: int
    """Hkv; divides Hq."""
    head_dim_k: int
    """Dk."""
    head_dim_v: int
    """Dv."""
    config: NSAConfig = field(default_factory=NSAConfig)
    dtype: torch.dtype = torch.bfloat16
    shared_kv: bool = False
    """One set of keys and values for the three branches."""
    num_documents: int | None = None
    """Of packed documents: the sequences are documents of one row, and `cu_seqlens` names so many of them, the last
    ones empty. None: rows are not packed."""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind must be one of {', '.join(KINDS)}; got {self.kind!r}")
        for name in ("batch", "tokens", "num_heads", "num_kv_heads", "head_dim_k", "head_dim_v"):
            a_size(name, getattr(self, name))
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_kv_heads must divide num_heads; got {self.num_kv_heads} and {self.num_heads}")
        a_config(self.config)
        if self.num_documents is not None and self.num_documents < self.batch:
            raise ValueError(f"num_documents must be at least batch={self.batch}; got {self.num_documents}")

    def __str__(self) -> str:
        dims = f"{self.head_dim_k}" if self.head_dim_k == self.head_dim_v else f"{self.head_dim_k}:{self.head_dim_v}"
        heads = f"{self.num_heads}/{self.num_kv_heads} heads of {dims}"
        packed = "" if self.num_documents is None else ", packed"
        return f"{self.kind} {self.batch} x {self.tokens}, {heads}, {str(self.dtype).removeprefix('torch.')}{packed}"

    @property
    def group(self) -> int:
        """Query heads for each key/value head."""
        return self.num_heads // self.num_kv_heads

    def call(self) -> None:
        """Every call that such a model makes of attention, once, by the Triton backend on zeros."""
        layer = NativeSparseAttention(
            _CHANNELS, self.num_heads, self.num_kv_heads, self.head_dim_k, self.head_dim_v, self.config,
            shared_kv=self.shared_kv, backend="triton", dtype=self.dtype,
        )  # fmt: skip
        if self.kind == "decode":
            layer.requires_grad_(False)
            with torch.inference_mode():
                self._decode(layer)
            return
        rows, documents = (self.batch, self.tokens), None
        if self.num_documents is not None:
            rows = 1, self.batch * self.tokens
            documents = torch.arange(self.num_documents + 1, dtype=torch.int32).clamp(max=self.batch) * self.tokens
        with torch.set_grad_enabled(self.kind == "train"):
            out = layer(torch.zeros(*rows, _CHANNELS, dtype=self.dtype), cu_seqlens=documents)
        if self.kind == "train":
            out.sum().backward()

    def _decode(self, layer: NativeSparseAttention) -> None:
        """One token behind the others, from a cache of one batch and from pages."""
        new = torch.zeros(self.batch, 1, _CHANNELS, dtype=self.dtype)
        contiguous = KVCache(layer, batch_size=self.batch, max_tokens=self.tokens)
        contiguous.commit(self.tokens - 1)
        layer(new, contiguous)
        pages = self.batch * PagedCache.pages(layer, 1)  # tables are as wide as `tokens` wants; only one is stored
        paged = PagedCache(layer, num_pages=pages, max_tokens=self.tokens)
        layer(new, paged.rows([paged.new() for _ in range(self.batch)]).layers[0])
