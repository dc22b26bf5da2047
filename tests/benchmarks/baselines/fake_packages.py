"""Stand-ins for packages that exist on GPUs only: their functions and arguments, computed by PyTorch and `nsa`."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

import nsa
from benchmarks.baselines import fla
from benchmarks.cases.inputs import block_means
from nsa import NSAConfig


def causal(q: Tensor, k: Tensor, v: Tensor, causal: bool = False, window_size: tuple[int, int] = (-1, -1)) -> Tensor:
    """FlashAttention's contract: [B, tokens, heads, D], fewer key heads, queries aligned at the end of the keys."""
    assert causal
    assert q.is_contiguous() or q.stride(-1) == 1
    if q.shape[-1] != v.shape[-1]:
        raise RuntimeError("this build supports equal head sizes only")
    window = k.shape[1] if window_size[0] < 0 else window_size[0] + 1
    return nsa.window_attention(q, k, v, NSAConfig(w=window), backend="torch")[0]


def install_flash_2(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """`flash_attn` with `flash_attn_func`."""
    return _install(monkeypatch, "flash_attn", flash_attn_func=causal)


def install_flash_4(monkeypatch: pytest.MonkeyPatch) -> None:
    """`flash_attn.cute`, in a `flash_attn` that is an empty namespace."""
    _install(monkeypatch, "flash_attn")
    _install(monkeypatch, "flash_attn.cute", flash_attn_func=lambda q, k, v, causal: (_causal(q, k, v, causal), None))


def install_fla(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """`fla.ops.nsa.parallel`."""
    for name in ("fla", "fla.ops", "fla.ops.nsa"):
        _install(monkeypatch, name)
    return _install(
        monkeypatch,
        "fla.ops.nsa.parallel",
        mean_pooling=_mean_pooling,
        parallel_nsa_compression=_compression,
        parallel_nsa_topk=_topk,
        parallel_nsa=_parallel_nsa,
    )


def install_lucidrains(monkeypatch: pytest.MonkeyPatch) -> None:
    """`native_sparse_attention_pytorch`, of which nothing is called."""
    _install(monkeypatch, "native_sparse_attention_pytorch")


def _install(monkeypatch: pytest.MonkeyPatch, name: str, **functions: Any) -> ModuleType:
    module = ModuleType(name)
    module.__dict__.update(functions, __path__=[])
    monkeypatch.setitem(sys.modules, name, module)
    return module


def _causal(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
    return causal(q, k, v, causal=is_causal)


def _mean_pooling(x: Tensor, chunk_size: int, cu_seqlens: None) -> Tensor:
    return block_means(x, NSAConfig(l=chunk_size, d=chunk_size, l_sel=chunk_size))


def _compression(q: Tensor, k: Tensor, v: Tensor, TK: int, block_size: int, scale: float) -> tuple[Tensor, Tensor]:
    return nsa.compressed_attention(q, k, v, fla.CONFIG, TK, scale=scale, backend="torch")


def _topk(q: Tensor, k: Tensor, lse: Tensor, TK: int, block_counts: int, block_size: int, scale: float) -> Tensor:
    """In another order than ascending, as the package leaves them, with -1 in between."""
    return nsa.select_blocks(q, k, fla.CONFIG, TK, lse, scale=scale, backend="torch").flip(-1)


def _parallel_nsa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g_cmp: Tensor,
    g_slc: Tensor,
    g_swa: Tensor,
    block_counts: int,
    block_size: int,
    window_size: int,
) -> Tensor:
    assert (block_counts, block_size, window_size) == (fla.CONFIG.n_sel, fla.CONFIG.l_sel, fla.CONFIG.w)
    gates = torch.stack((g_cmp, g_slc, g_swa), -1)
    return nsa.nsa_attention(q, k, v, gates, fla.CONFIG, backend="torch")
