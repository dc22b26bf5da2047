"""What the tests of the layer, its cache and the LM share: small sizes, layers and inputs."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from nsa import NativeSparseAttention, NSAConfig

DIM, HEADS, KV_HEADS, HEAD_DIM_K, HEAD_DIM_V = 12, 4, 2, 6, 5
BACKENDS = ("reference", "torch")
PHIS = ("avg", "linear", "mlp")


def small_config(phi: str = "avg", **changes: int) -> NSAConfig:
    """Blocks so small that 40 tokens fill several of each kind, and selection leaves some out."""
    return NSAConfig(**{"l": 4, "d": 2, "l_sel": 8, "n_sel": 3, "w": 8, "phi": phi, **changes})


def make_layer(
    config: NSAConfig | None = None,
    *,
    shared_kv: bool = False,
    backend: str = "torch",
    dtype: torch.dtype = torch.float64,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> NativeSparseAttention:
    torch.manual_seed(seed)
    return NativeSparseAttention(
        DIM,
        HEADS,
        KV_HEADS,
        HEAD_DIM_K,
        HEAD_DIM_V,
        config or small_config(),
        shared_kv=shared_kv,
        backend=backend,
        dtype=dtype,
        device=device,
    )


def tokens(batch: int, length: int, *, dtype: torch.dtype = torch.float64, seed: int = 1) -> Tensor:
    """x [batch, length, DIM], the same first rows for every length."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(length, batch, DIM, generator=generator, dtype=torch.float64).transpose(0, 1).to(dtype)


def documents(*lengths: int) -> Tensor:
    """cu_seqlens of documents of these lengths."""
    return torch.tensor([0, *lengths]).cumsum(0).int()


def pieces(cu_seqlens: Tensor) -> Iterator[slice]:
    return (slice(a, b) for a, b in pairwise(cu_seqlens.tolist()))


class OpCounter(TorchDispatchMode):
    """Counts the tensor operations of a block of code, and names those that would wait for a GPU."""

    WAITS = ("_local_scalar_dense", "nonzero", "item", "unique")

    def __init__(self) -> None:
        super().__init__()
        self.ops = 0
        self.waits: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.ops += 1
        if any(word in func.__name__ for word in self.WAITS):
            self.waits.append(func.__name__)
        return func(*args, **(kwargs or {}))
