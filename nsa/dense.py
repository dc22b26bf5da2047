"""DenseAttention: the causal attention that NSA is compared with, same heads, same RoPE, PyTorch's own kernel."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from nsa import checks
from nsa.config import NSAConfig
from nsa.geometry import Layout
from nsa.rope import rotate_both


class DenseAttention(nn.Module):
    """Grouped-query causal attention: x [B, S, dim] -> [B, S, dim]. Without a cache: it is a baseline for training.

    Raises ValueError or TypeError naming the argument, what came and what is wanted.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim_k: int,
        head_dim_v: int,
        *,
        rope_base: float = 10000.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.dim, self.num_heads, self.num_kv_heads = dim, num_heads, num_kv_heads
        self.head_dim_k, self.head_dim_v, self.rope_base = head_dim_k, head_dim_v, rope_base
        self.q = nn.Linear(dim, num_heads * head_dim_k, bias=False, device=device, dtype=dtype)
        self.k = nn.Linear(dim, num_kv_heads * head_dim_k, bias=False, device=device, dtype=dtype)
        self.v = nn.Linear(dim, num_kv_heads * head_dim_v, bias=False, device=device, dtype=dtype)
        self.o = nn.Linear(num_heads * head_dim_v, dim, bias=False, device=device, dtype=dtype)

    def forward(self, x: Tensor, cache: None = None, cu_seqlens: Tensor | None = None) -> Tensor:
        """x [B, S, dim] -> [B, S, dim]; `cu_seqlens` int32 [N+1] as for NSA, at the price of a mask [S, S]."""
        if cache is not None:
            raise ValueError(f"cache must be None, dense attention has none here; got {type(cache).__name__}")
        x = checks.tensor("x", x, ("B", "S", self.dim))
        layout = checks.layout(x, None, NSAConfig(), cu_seqlens)  # its blocks are not asked for
        q = self.q(x).unflatten(-1, (self.num_heads, self.head_dim_k))
        k = self.k(x).unflatten(-1, (self.num_kv_heads, self.head_dim_k))
        q, k = rotate_both(q, k, None if cu_seqlens is None else layout.positions, self.rope_base)
        v = self.v(x).unflatten(-1, (self.num_kv_heads, self.head_dim_v))
        mask = None if cu_seqlens is None else _own_document(layout)
        o = scaled_dot_product_attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            attn_mask=mask,
            is_causal=mask is None,
            enable_gqa=self.num_heads != self.num_kv_heads,
        )
        out: Tensor = self.o(o.transpose(1, 2).flatten(2))
        return out


def _own_document(layout: Layout) -> Tensor:
    """bool [S, S]: True where query i may attend to token s, those of its own document up to itself."""
    keys = layout.tokens
    return (keys >= layout.starts[:, None]) & (keys <= layout.tokens[:, None])
