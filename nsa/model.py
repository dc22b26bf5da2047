"""A decoder LM around NSA, and its dense twin: tokens -> embedding -> (attention, SwiGLU) × n_layers -> logits."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from nsa.cache import KVCache
from nsa.config import NSAConfig
from nsa.dense import DenseAttention
from nsa.layer import Cache, NativeSparseAttention, a_size
from nsa.loss import in_vocabulary
from nsa.loss import next_token_loss as next_token_loss
from nsa.paged.cache import PagedRows

__all__ = ["BASE_125M", "SHOWCASE", "DecoderLM", "ModelConfig"]

ATTENTIONS = ("nsa", "dense")
OLD_NAMES = {"n_kv_groups": "num_kv_heads"}
"""Fields of ModelConfig under the names that profiles of the field and older checkpoints have."""


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of the LM. The names are those of the `model:` part of a profile.

    Raises ValueError or TypeError naming the field, what came and what is wanted.
    """

    dim: int
    """Channels of the residual stream."""
    n_layers: int
    n_heads: int
    """Query heads (Hq)."""
    num_kv_heads: int
    """Key/value heads (Hkv); divides n_heads."""
    d_k: int
    """Head size of queries and keys."""
    d_v: int
    """Head size of values."""
    nsa: NSAConfig = field(default_factory=NSAConfig)
    attention: str = "nsa"
    """"nsa", or "dense" for the twin that benches compare with."""
    shared_kv: bool = False
    """One set of keys and values for NSA's three branches, in place of one each."""
    vocab_size: int = 256
    """Tokens; 256 are the bytes."""
    mlp_dim: int | None = None
    """Hidden channels of the MLP; None for 8/3 · dim, rounded up to a multiple of 64."""
    tied_head: bool = True
    """Whether the head is the embedding's transpose."""
    rope_base: float = 10000.0
    backend: str = "auto"
    """NSA's backend."""
    norm_eps: float | None = None
    """Added to the mean square in every RMSNorm; None for the machine epsilon of what is normalised."""

    def __post_init__(self) -> None:
        for name in ("dim", "n_layers", "n_heads", "num_kv_heads", "d_k", "d_v", "vocab_size"):
            a_size(name, getattr(self, name))
        if self.mlp_dim is not None:
            a_size("mlp_dim", self.mlp_dim)
        if self.n_heads % self.num_kv_heads:
            raise ValueError(f"num_kv_heads must divide n_heads; got {self.num_kv_heads} and {self.n_heads}")
        if self.attention not in ATTENTIONS:
            raise ValueError(f"attention must be one of {', '.join(ATTENTIONS)}; got {self.attention!r}")
        if self.norm_eps is not None and not self.norm_eps > 0:
            raise ValueError(f"norm_eps must be positive or None; got {self.norm_eps}")
        if not isinstance(self.nsa, NSAConfig):
            raise TypeError(f"nsa must be an NSAConfig; got {type(self.nsa).__name__}")

    @property
    def hidden_dim(self) -> int:
        """Hidden channels of the MLP."""
        return self.mlp_dim if self.mlp_dim is not None else -(-8 * self.dim // (3 * 64)) * 64

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> ModelConfig:
        """Build from a mapping such as a checkpoint holds, `nsa` a mapping too; old names are accepted."""
        values = {OLD_NAMES.get(name, name): value for name, value in mapping.items()}
        return cls(**{**values, "nsa": NSAConfig.from_mapping(values.get("nsa", {}))})

    @property
    def n_kv_groups(self) -> int:
        """Deprecated name of `num_kv_heads`."""
        warnings.warn("ModelConfig.n_kv_groups is now ModelConfig.num_kv_heads", DeprecationWarning, stacklevel=2)
        return self.num_kv_heads

    def dense_twin(self) -> ModelConfig:
        """The same model with dense attention."""
        return dataclasses.replace(self, attention="dense")


SHOWCASE = ModelConfig(
    dim=128, n_layers=1, n_heads=8, num_kv_heads=2, d_k=16, d_v=16, nsa=NSAConfig(l=16, d=8, l_sel=32, n_sel=8, w=64)
)
"""The small model of the field reports."""

BASE_125M = ModelConfig(dim=768, n_layers=12, n_heads=12, num_kv_heads=2, d_k=64, d_v=64)
"""The field reports' "125M"; `DecoderLM.num_parameters` counts what it has with a vocabulary of bytes."""


class SwiGLU(nn.Module):
    """x [B, S, dim] -> [B, S, dim]."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.dim, config.hidden_dim, bias=False)
        self.up = nn.Linear(config.dim, config.hidden_dim, bias=False)
        self.down = nn.Linear(config.hidden_dim, config.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(silu(self.gate(x)) * self.up(x))
        return out


class Block(nn.Module):
    """Attention, then MLP, each on the normalised residual stream."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        sizes = (config.dim, config.n_heads, config.num_kv_heads, config.d_k, config.d_v)
        self.attention: NativeSparseAttention | DenseAttention
        if config.attention == "dense":
            self.attention = DenseAttention(*sizes, rope_base=config.rope_base)
        else:
            self.attention = NativeSparseAttention(
                *sizes,
                config.nsa,
                shared_kv=config.shared_kv,
                backend=config.backend,
                rope_base=config.rope_base,
            )
        self.attention_norm, self.mlp_norm = (nn.RMSNorm(config.dim, eps=config.norm_eps) for _ in range(2))
        self.mlp = SwiGLU(config)

    def forward(self, x: Tensor, cache: Cache | None, cu_seqlens: Tensor | None) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cache, cu_seqlens)
        out: Tensor = x + self.mlp(self.mlp_norm(x))
        return out


class ModelCache:
    """One KVCache per layer, all of one length."""

    def __init__(self, layers: list[KVCache]) -> None:
        self.layers = layers

    def __len__(self) -> int:
        """Tokens held by every layer."""
        return min(len(layer) for layer in self.layers)

    def rollback(self) -> None:
        """Be as before a call that some layers have taken and others have not."""
        self.truncate(len(self))

    def reset(self) -> None:
        """Forget every token."""
        self.truncate(0)

    def truncate(self, length: int) -> None:
        """Forget the tokens from position `length` on; ValueError if it does not hold that many."""
        for layer in self.layers:
            layer.truncate(length)


class DecoderLM(nn.Module):
    """tokens [B, S] -> logits [B, S, vocab_size], in float32 whatever the parameters' (float64 for float64)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.dim)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layers))
        self.norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.head = nn.Linear(config.dim, config.vocab_size, bias=False)
        nn.init.normal_(self.embedding.weight, std=0.02)  # small, so that a tied head begins near ln(vocab_size)
        if config.tied_head:
            self.head.weight = self.embedding.weight

    def forward(
        self, tokens: Tensor, cache: ModelCache | PagedRows | None = None, cu_seqlens: Tensor | None = None
    ) -> Tensor:
        """Logits for the token after each of `tokens`, which follow those in `cache` or are packed by `cu_seqlens`.

        If a layer raises, the cache is as it was. A token that is out of range raises on a CPU and gives NaN
        on a GPU, which cannot be asked without a host sync.
        """
        logits: Tensor = self.head(self.hidden(tokens, cache, cu_seqlens))
        return logits.to(torch.promote_types(logits.dtype, torch.float32))

    def hidden(
        self, tokens: Tensor, cache: ModelCache | PagedRows | None = None, cu_seqlens: Tensor | None = None
    ) -> Tensor:
        """What the head reads, [B, S, dim]: for a loss that makes its logits piece by piece. As `forward` otherwise."""
        x = self._embed(tokens)
        known = isinstance(cache, (ModelCache, PagedRows)) and len(cache.layers) == len(self.blocks)
        if cache is not None and not known:
            raise TypeError(
                "cache must come from this model's new_cache or be rows of a PagedCache of its attentions(); "
                f"got {type(cache).__name__}"
            )
        try:
            for i, block in enumerate(self.blocks):
                x = block(x, None if cache is None else cache.layers[i], cu_seqlens)
        except BaseException:
            if cache is not None:
                cache.rollback()
            raise
        out: Tensor = self.norm(x)
        return out

    def new_cache(self, batch_size: int, max_tokens: int) -> ModelCache:
        """An empty cache for all layers; ValueError for the dense twin, which has none."""
        return ModelCache([KVCache(layer, batch_size=batch_size, max_tokens=max_tokens) for layer in self.attentions()])

    def attentions(self) -> list[NativeSparseAttention]:
        """The layers that a cache serves, in their order; ValueError for the dense twin, which has none."""
        if self.config.attention == "dense":
            raise ValueError("attention must be 'nsa' for a cache; got 'dense'")
        return [cast(NativeSparseAttention, block.attention) for block in self.blocks]

    def num_parameters(self) -> int:
        """Trained numbers; a tied head counts once."""
        return sum(parameter.numel() for parameter in self.parameters())

    def _embed(self, tokens: Tensor) -> Tensor:
        """tokens int64 or int32 [B, S] -> [B, S, dim]."""
        if not isinstance(tokens, Tensor) or tokens.dtype not in (torch.int64, torch.int32) or tokens.dim() != 2:
            came = f"{tokens.dtype} {list(tokens.shape)}" if isinstance(tokens, Tensor) else type(tokens).__name__
            raise TypeError(f"tokens must be int64 or int32 of shape [B, S]; got {came}")
        vocab_size = self.config.vocab_size
        known = in_vocabulary(tokens, vocab_size)
        x: Tensor = self.embedding(tokens.clamp(0, vocab_size - 1))
        return x.masked_fill(~known[..., None], torch.nan)
