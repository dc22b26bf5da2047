"""Between the public layout [B, S, H, D] and rows that a batched matrix product takes, grouped by kv head."""

from __future__ import annotations

import torch
from torch import Tensor


def compute_dtype(x: Tensor) -> torch.dtype:
    """At least float32."""
    return torch.promote_types(x.dtype, torch.float32)


def query_rows(x: Tensor, num_kv_heads: int) -> Tensor:
    """[B, S, Hq, D] -> [B·Hkv, S·G, D]: the heads of a group side by side, token after token."""
    batch, length, heads, dim = x.shape
    group = heads // num_kv_heads
    x = x.to(compute_dtype(x)).reshape(batch, length, num_kv_heads, group, dim)
    return x.transpose(1, 2).reshape(batch * num_kv_heads, length * group, dim).contiguous()


def from_query_rows(rows: Tensor, shape: torch.Size, num_kv_heads: int) -> Tensor:
    """[B·Hkv, S·G, D] -> [B, S, Hq, D], where `shape` is [B, S, Hq, …]."""
    (batch, length, heads), dim = shape[:3], rows.shape[2]
    grid = rows.view(batch, num_kv_heads, length, heads // num_kv_heads, dim).transpose(1, 2)
    return grid.reshape(batch, length, heads, dim)


def without_views(*outputs: Tensor) -> tuple[Tensor, ...]:
    """The outputs of an autograd function. A graph copies it: torch 2.11 makes 0 of the gradients of one that compiles
    and whose output is a view."""
    return tuple(x.clone() for x in outputs) if torch.compiler.is_compiling() else outputs


def key_rows(x: Tensor) -> Tensor:
    """[B, T, Hkv, D] -> [B·Hkv, T, D]."""
    batch, length, heads, dim = x.shape
    return x.to(compute_dtype(x)).transpose(1, 2).reshape(batch * heads, length, dim).contiguous()


def from_key_rows(rows: Tensor, shape: torch.Size) -> Tensor:
    """[B·Hkv, T, D] -> [B, T, Hkv, D], where `shape` is [B, T, Hkv, …]."""
    batch, length, heads = shape[:3]
    return rows.view(batch, heads, length, rows.shape[2]).transpose(1, 2)
