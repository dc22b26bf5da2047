"""The parts as Triton kernels, and a whole call of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from nsa.config import NSAConfig
from nsa.geometry import Layout
from nsa.kv import DecodeOutput, KVView
from nsa.triton_backend import (
    attention,
    attention_ops,
    autograd,
    cache_write,
    compressed_window,
    compression,
    decode,
    gated_sum,
    ops,
    partial_sums,
    planned,
    rope,
    scores,
    selected,
)
from nsa.triton_backend.compressed_window import ENOUGH_OF_WINDOW
from nsa.triton_backend.launch import ENOUGH_PROGRAMS, add, finite_keys, unit_stride
from nsa.triton_backend.places import located
from nsa.triton_backend.planned import attend_if_planned

__all__ = [
    "add_gradients",
    "attend",
    "attend_if_planned",
    "combine",
    "combine_into",
    "compress",
    "compressed_attention",
    "compressed_attention_backward",
    "decode_attention",
    "gated_rows",
    "rotate",
    "select_blocks",
    "selected_attention",
    "selected_attention_backward",
    "window_attention",
    "window_attention_backward",
    "write_cache",
]


def _positive(q: Tensor, scale: float) -> tuple[Tensor, float]:
    """The same scores with a positive scale, which the kernels' running maximum needs."""
    if abs(scale) < torch.finfo(torch.float32).tiny:  # 0 to the kernels
        return q * 0.0, 1.0
    return (q, scale) if scale > 0 else (-q, -scale)


def _layout(layout: Layout) -> Layout:
    """The layout with what kernels read of it, from one launch; a graph computes that by PyTorch's operations."""
    return layout if torch.compiler.is_compiling() else located(layout)


def attend(
    q: Tensor,
    selected: tuple[Tensor, Tensor],
    window: tuple[Tensor, Tensor],
    compressed: tuple[Tensor, Tensor],
    pools: bool,
    gates: Tensor,
    layout: Layout,
    scale: float,
    observed: bool,
) -> tuple[Tensor, tuple[Tensor, tuple[Tensor, ...], tuple[Tensor, ...]] | None]:
    """A whole call; see `nsa.backends.WholeCall`."""
    q, scale = _positive(q, scale)
    given = attention.flat(attention.Inputs.of(selected, window, compressed, pools))
    if torch.compiler.is_compiling():
        output = attention_ops.attention(q, *given, gates, layout, scale, observed=observed)
    else:
        by_plan = planned.attend(q, given, gates, layout, scale, observed)
        output = autograd.Attention.apply(q, *given, gates, layout, scale) if by_plan is None else by_plan
    return output[0], ((output[4], output[1:4], output[5:8]) if observed else None)


def compress(x: Tensor, layout: Layout) -> Tensor:
    """phi = avg (Eq. 7): x [B, T, H, D] -> [B, slots, H, D]; see `nsa.compress`."""
    pool = ops.compress if torch.compiler.is_compiling() else autograd.Compress.apply
    return pool(x, *compression.places(_layout(layout)), layout.config.l, layout.config.d)


def compressed_attention(
    q: Tensor, k_cmp: Tensor, v_cmp: Tensor, layout: Layout, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The compressed branch; see `nsa.compressed_attention`."""
    layout = _layout(layout)
    places = *layout.compressed_interval, *layout.compressed_queries
    return _compressed_window_attention(q, k_cmp, v_cmp, *places, 0, ENOUGH_PROGRAMS, scale)


def _compressed_window_attention(q: Tensor, *more: Any) -> tuple[Tensor, Tensor, Tensor]:
    in_graph = torch.compiler.is_compiling()
    attend = ops.compressed_window_attention if in_graph else autograd.CompressedWindowAttention.apply
    *others, scale = more
    q, scale = _positive(q, scale)
    o, lse, read, _ = attend(q, *others, scale)
    return o, lse, read


def _turned(dq: Tensor, scale: float) -> Tensor:
    """The gradient of q from that of `_positive`'s."""
    if abs(scale) < torch.finfo(torch.float32).tiny:
        return torch.zeros_like(dq)
    return dq if scale > 0 else -dq


def gated_rows(
    do: Tensor, dlse: Sequence[Tensor], outputs: Sequence[Tensor], lse: Sequence[Tensor], gates: Tensor
) -> tuple[list[tuple[tuple[Tensor, float], ...]], Tensor]:
    """`combine` backward, and what the branches take of each query: do, lse (base 2) and delta, from one launch."""
    of_branches, d_gates = gated_sum.backward_branches(do, outputs, gates, lse, dlse)
    # an lse of infinity makes all probabilities of padding 0
    return [((d_o, 0.0), (lse_2, torch.inf), (delta, 0.0)) for d_o, lse_2, delta in of_branches], d_gates


def _compressed_window_backward(
    rows: Sequence[Tensor], q: Tensor, k: Tensor, v: Tensor, places: tuple[Tensor, Tensor, Tensor, Tensor],
    first_key: int, min_programs: int, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    (turned, positive), finite = _positive(q, scale), finite_keys(unit_stride(k), unit_stride(v), first_key)
    do, lse_2, delta = rows
    given = turned, k, v, finite, do, lse_2, delta, *places
    dq, *parts = compressed_window.gradients(*given, min_programs, positive, wide=True)
    return _turned(dq, scale), *partial_sums.add_parts(parts, torch.float32)


def compressed_attention_backward(
    rows: Sequence[Tensor], q: Tensor, k_cmp: Tensor, v_cmp: Tensor, layout: Layout, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `compressed_attention`, from what it was given and `gated_rows`."""
    layout = _layout(layout)
    places = *layout.compressed_interval, *layout.compressed_queries
    return _compressed_window_backward(rows, q, k_cmp, v_cmp, places, 0, ENOUGH_PROGRAMS, scale)


def select_blocks(q: Tensor, k_cmp: Tensor, layout: Layout, scale: float, lse: Tensor | None = None) -> Tensor:
    """The choice of blocks; see `nsa.select_blocks`."""
    q, scale = _positive(q, scale)
    select = ops.select_blocks if torch.compiler.is_compiling() else scores.select_blocks
    return select(q, k_cmp, _layout(layout), scale, lse)


def selected_attention(
    q: Tensor, k: Tensor, v: Tensor, block_indices: Tensor, layout: Layout, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The selected branch on distinct block indices; see `nsa.selected_attention`."""
    q, scale = _positive(q, scale)
    attend = ops.selected_attention if torch.compiler.is_compiling() else autograd.SelectedAttention.apply
    return attend(q, k, v, block_indices, _layout(layout), scale)


def selected_attention_backward(
    rows: Sequence[Tensor], q: Tensor, k: Tensor, v: Tensor, block_indices: Tensor, layout: Layout, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `selected_attention`, from what it was given and `gated_rows`."""
    (turned, positive), (do, lse_2, delta) = _positive(q, scale), rows
    given = turned, k, v, do, lse_2, delta, block_indices, _layout(layout)
    dq, dk, dv = selected.gradients(*given, positive, wide=True)
    return _turned(dq, scale), dk, dv


def window_attention(q: Tensor, k: Tensor, v: Tensor, layout: Layout, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """The window branch; see `nsa.window_attention`."""
    layout = _layout(layout)
    first_key, _ = layout.window_span(0, layout.num_queries)
    return _compressed_window_attention(
        q, k, v, *layout.window_interval, *layout.window_queries, first_key, ENOUGH_OF_WINDOW, scale
    )


def window_attention_backward(
    rows: Sequence[Tensor], q: Tensor, k: Tensor, v: Tensor, layout: Layout, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `window_attention`, from what it was given and `gated_rows`."""
    layout = _layout(layout)
    first_key, _ = layout.window_span(0, layout.num_queries)
    places = *layout.window_interval, *layout.window_queries
    return _compressed_window_backward(rows, q, k, v, places, first_key, ENOUGH_OF_WINDOW, scale)


def add_gradients(dq: Tensor, dq_cmp: Tensor, dq_sel: Tensor, dq_win: Tensor) -> None:
    """Those of all branches, each rounded, added in float32, into dq; by way of dq_sel and a copy where dq is no
    contiguous one."""
    dq_cmp, dq_sel, dq_win = (x.contiguous() for x in (dq_cmp, dq_sel, dq_win))
    total = dq if dq.is_contiguous() else dq_sel
    add(total, dq_sel, dq_cmp, dq_win)
    if total is not dq:
        dq.copy_(total)


def combine(outputs: tuple[Tensor, Tensor, Tensor], gates: Tensor) -> Tensor:
    """Eq. 5: Σ gate · branch, added in float32; see `nsa.combine`."""
    add_gated = ops.combine if torch.compiler.is_compiling() else autograd.GatedSum.apply
    return add_gated(*outputs, gates)


def combine_into(o: Tensor, outputs: tuple[Tensor, Tensor, Tensor], gates: Tensor) -> None:
    """`combine`, without gradients, into o; by a copy where that is no contiguous one."""
    if not o.is_contiguous():
        o.copy_(gated_sum.forward(*outputs, gates))
        return
    o_cmp, o_sel, o_win, gates = (x.contiguous() for x in (*outputs, gates))
    gated_sum.write(o_cmp, o_sel, o_win, gates, o)


def decode_attention(
    q: Tensor,
    compressed: KVView,
    selected: KVView,
    window: KVView,
    lengths: Tensor | int,
    gates: Tensor,
    config: NSAConfig,
    scale: float,
) -> DecodeOutput:
    """All of it for a few queries; see `nsa.triton_backend.decode`."""
    q, scale = _positive(q, scale)
    return decode.attend(q, compressed, selected, window, lengths, gates, config, scale)


def write_cache(
    k: Sequence[Tensor],
    v: Sequence[Tensor],
    into: Sequence[KVView],
    compressed: KVView | None,
    before: Tensor | int,
    config: NSAConfig,
) -> None:
    """New rows of a cache in one launch; see `nsa.triton_backend.cache_write`."""
    cache_write.write(k, v, into, compressed, before, config)


def rotate(q: Tensor, k: Tensor, positions: Tensor | None, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """RoPE of both in one launch; see `nsa.backends.Rotator`."""
    if torch.compiler.is_compiling():
        return ops.rotate(q, k, positions, frequencies, False)
    return rope.Rotate.apply(q, k, positions, frequencies)
