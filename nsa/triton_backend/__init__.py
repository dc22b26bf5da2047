"""The parts as Triton kernels; pooling (phi = avg) is a fraction of a percent of the time and stays PyTorch's."""

from __future__ import annotations

import torch
from torch import Tensor

from nsa.config import NSAConfig
from nsa.geometry import Layout
from nsa.kv import DecodeOutput, KVView
from nsa.torch_backend import compress
from nsa.triton_backend import autograd, compressed_window, decode, ops, scores, selected
from nsa.triton_backend.launch import finite_keys

__all__ = [
    "combine",
    "compress",
    "compressed_attention",
    "compressed_attention_backward",
    "decode_attention",
    "select_blocks",
    "selected_attention",
    "selected_attention_backward",
    "window_attention",
    "window_attention_backward",
]

# A compressed block is seen by all later queries, which several programs share in the backward pass. Each of these has
# partial sums of its own for all compressed keys, which must not grow with S².
MAX_SPLITS = 16


def _positive(q: Tensor, scale: float) -> tuple[Tensor, float]:
    """The same scores with a positive scale, which the kernels' running maximum needs."""
    if abs(scale) < torch.finfo(torch.float32).tiny:  # 0 to the kernels
        return q * 0.0, 1.0
    return (q, scale) if scale > 0 else (-q, -scale)


def _compressed_window_attention(
    q: Tensor, k: Tensor, v: Tensor, bounds: tuple[Tensor, Tensor], first_key: int, max_splits: int, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    in_graph = torch.compiler.is_compiling()
    attend = ops.compressed_window_attention if in_graph else autograd.CompressedWindowAttention.apply
    o, lse, read, _ = attend(q, k, v, *bounds, first_key, max_splits, scale)
    return o, lse, read


def compressed_attention(
    q: Tensor, k_cmp: Tensor, v_cmp: Tensor, layout: Layout, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The compressed branch; see `nsa.compressed_attention`."""
    q, scale = _positive(q, scale)
    return _compressed_window_attention(q, k_cmp, v_cmp, layout.compressed_interval, 0, MAX_SPLITS, scale)


def _turned(dq: Tensor, scale: float) -> Tensor:
    """The gradient of q from that of `_positive`'s."""
    if abs(scale) < torch.finfo(torch.float32).tiny:
        return torch.zeros_like(dq)
    return dq if scale > 0 else -dq


def _compressed_window_backward(
    do: Tensor, dlse: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor,
    bounds: tuple[Tensor, Tensor], first_key: int, max_splits: int, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    (turned, positive), finite = _positive(q, scale), finite_keys(k, v, first_key)
    given = do, dlse, turned, k, v, finite, o, lse, *bounds
    dq, dk, dv = compressed_window.backward(*given, max_splits, positive, wide=True)
    return _turned(dq, scale), dk, dv


def compressed_attention_backward(
    do: Tensor, dlse: Tensor, q: Tensor, k_cmp: Tensor, v_cmp: Tensor, o: Tensor, lse: Tensor, layout: Layout,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of `compressed_attention`, from what it was given and gave."""
    given = do, dlse, q, k_cmp, v_cmp, o, lse, layout.compressed_interval
    return _compressed_window_backward(*given, 0, MAX_SPLITS, scale)


def select_blocks(q: Tensor, k_cmp: Tensor, layout: Layout, scale: float, lse: Tensor | None = None) -> Tensor:
    """The choice of blocks; see `nsa.select_blocks`."""
    q, scale = _positive(q, scale)
    select = ops.select_blocks if torch.compiler.is_compiling() else scores.select_blocks
    return select(q, k_cmp, layout, scale, lse)


def selected_attention(
    q: Tensor, k: Tensor, v: Tensor, block_indices: Tensor, layout: Layout, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The selected branch on distinct block indices; see `nsa.selected_attention`."""
    q, scale = _positive(q, scale)
    attend = ops.selected_attention if torch.compiler.is_compiling() else autograd.SelectedAttention.apply
    return attend(q, k, v, block_indices, layout, scale)


def selected_attention_backward(
    do: Tensor, dlse: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, block_indices: Tensor,
    layout: Layout, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of `selected_attention`, from what it was given and gave."""
    turned, positive = _positive(q, scale)
    dq, dk, dv = selected.backward(do, dlse, turned, k, v, o, lse, block_indices, layout, positive, wide=True)
    return _turned(dq, scale), dk, dv


def window_attention(q: Tensor, k: Tensor, v: Tensor, layout: Layout, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """The window branch; see `nsa.window_attention`."""
    q, scale = _positive(q, scale)
    first_key, _ = layout.window_span(0, layout.num_queries)
    return _compressed_window_attention(q, k, v, layout.window_interval, first_key, 1, scale)


def window_attention_backward(
    do: Tensor, dlse: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, layout: Layout, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `window_attention`, from what it was given and gave."""
    first_key, _ = layout.window_span(0, layout.num_queries)
    return _compressed_window_backward(do, dlse, q, k, v, o, lse, layout.window_interval, first_key, 1, scale)


def combine(outputs: tuple[Tensor, Tensor, Tensor], gates: Tensor) -> Tensor:
    """Eq. 5: Σ gate · branch, added in float32; see `nsa.combine`."""
    add = ops.combine if torch.compiler.is_compiling() else autograd.GatedSum.apply
    return add(*outputs, gates)


def decode_attention(
    q: Tensor,
    compressed: KVView,
    selected: KVView,
    window: KVView,
    lengths: Tensor,
    gates: Tensor,
    config: NSAConfig,
    scale: float,
) -> DecodeOutput:
    """All of it for a few queries; see `nsa.triton_backend.decode`."""
    q, scale = _positive(q, scale)
    return decode.attend(q, compressed, selected, window, lengths, gates, config, scale)
