"""What kernels are wanted for: training, a prompt or a decode step of one shape, and the calls that need them.

The calls are those of `nsa.NativeSparseAttention`, whose tensors have the strides and types that a model's have; its
residual stream has few channels here, since no kernel depends on them. `ahead_of_time.recorded` makes them on a CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from nsa.cache import KVCache
from nsa.config import NSAConfig
from nsa.layer import NativeSparseAttention
from nsa.paged.cache import PagedCache
from nsa.train import data
from nsa.triton_backend import dispatch
from nsa.triton_backend.ahead_of_time import Launch, recorded
from nsa.triton_backend.precompile import distinct

KINDS = ("train", "prefill", "decode")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
"""By the names that `runtime.precision` of a profile has."""
_CHANNELS = 16
"""Of the residual stream."""


@dataclass(frozen=True)
class Workload:
    """One shape. Raises ValueError naming the field."""

    kind: str
    """"train" (forward and backward), "prefill" (forward alone) or "decode" (one token more)."""
    batch: int
    """Sequences."""
    tokens: int
    """Of each sequence; in decode those that it has, the new one included."""
    num_heads: int
    num_kv_heads: int
    head_dim_k: int
    head_dim_v: int
    config: NSAConfig
    dtype: torch.dtype = torch.bfloat16
    shared_kv: bool = False
    packed: bool = False
    """Whether documents are packed: the batch is then one row of them."""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind must be one of {', '.join(KINDS)}; got {self.kind!r}")
        for name in ("batch", "tokens", "num_heads", "num_kv_heads", "head_dim_k", "head_dim_v"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1; got {getattr(self, name)}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_kv_heads must divide num_heads; got {self.num_kv_heads} and {self.num_heads}")
        if max(self.head_dim_k, self.head_dim_v) > dispatch.MAX_HEAD_DIM:
            sizes = f"{self.head_dim_k} and {self.head_dim_v}"
            raise ValueError(f"head sizes must be at most {dispatch.MAX_HEAD_DIM}; got {sizes}")

    def __str__(self) -> str:
        dims = f"{self.head_dim_k}" if self.head_dim_k == self.head_dim_v else f"{self.head_dim_k}:{self.head_dim_v}"
        heads = f"{self.num_heads}/{self.num_kv_heads} heads of {dims}"
        packed = ", packed" if self.packed else ""
        return f"{self.kind} {self.batch} x {self.tokens}, {heads}, {str(self.dtype).removeprefix('torch.')}{packed}"

    def call(self) -> None:
        """Every call that such a model makes of attention, once; to be recorded."""
        layer = NativeSparseAttention(
            _CHANNELS, self.num_heads, self.num_kv_heads, self.head_dim_k, self.head_dim_v, self.config,
            shared_kv=self.shared_kv, backend="triton", dtype=self.dtype,
        )  # fmt: skip
        if self.kind == "decode":
            layer.requires_grad_(False)
            with torch.inference_mode():
                self._decode(layer)
            return
        rows = (1, self.batch * self.tokens) if self.packed else (self.batch, self.tokens)
        x = torch.zeros(*rows, _CHANNELS, dtype=self.dtype)
        documents = None
        if self.packed:
            bounds = torch.arange(self.batch + 1, dtype=torch.int32) * self.tokens
            documents = data.with_empty_documents(bounds, -(-self.batch // data.BOUNDS) * data.BOUNDS)
        with torch.set_grad_enabled(self.kind == "train"):
            out = layer(x, cu_seqlens=documents)
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
        rows = paged.rows([paged.new() for _ in range(self.batch)])
        layer(new, rows.layers[0])


def of_profile(name: str) -> Workload:
    """The training of a profile of `nsa.train`, by its name or its .yaml file; its validation needs the same kernels.

    Raises `nsa.train.profile.ProfileError`, and ValueError for a profile of the dense twin.
    """
    from nsa.train.profile import load  # it reads YAML, which nothing else here needs

    settings = load(name)
    model, rows = settings.model, settings.train
    if model.attention != "nsa":
        raise ValueError(f"--profile {name}: model.attention must be nsa; got {model.attention!r}")
    heads, dtype = (model.n_heads, model.num_kv_heads, model.d_k, model.d_v), DTYPES[settings.runtime.precision]
    shape = ("train", rows.batch_size, rows.seq_len, *heads)
    return Workload(*shape, model.nsa, dtype, model.shared_kv, settings.data.packing)


def launches(workloads: Sequence[Workload], architecture: int, sms: int | None = None) -> list[Launch]:
    """The kernels that these need on a GPU of compute capability 80, 86, ..., each once.

    `sms`: its multiprocessors, by `ahead_of_time.SMS` unless given.
    """
    found: list[Launch] = []
    for workload in workloads:
        with recorded(architecture, sms) as own:
            workload.call()
        found += own
    return distinct(found)
