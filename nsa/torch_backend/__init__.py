"""The parts in plain PyTorch: any device, forward and backward, memory linear in S, no host sync."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nsa.geometry import Layout
from nsa.torch_backend import compressed_window, selected
from nsa.torch_backend.compressed_window import CompressedWindowAttention
from nsa.torch_backend.rows import compute_dtype
from nsa.torch_backend.scores import select_blocks
from nsa.torch_backend.selected import SelectedAttention

__all__ = [
    "add_gradients",
    "combine",
    "combine_into",
    "compress",
    "compressed_attention",
    "compressed_attention_backward",
    "gated_rows",
    "select_blocks",
    "selected_attention",
    "selected_attention_backward",
    "window_attention",
    "window_attention_backward",
]

Gradients = tuple[Tensor, Tensor, Tensor]
"""(dq, dk, dv)."""

COMPRESSED_CHUNK = 512
WINDOW_CHUNK = 256


def compress(x: Tensor, layout: Layout) -> Tensor:
    """phi = avg (Eq. 7): x [B, T, H, D] -> [B, slots, H, D]."""
    l, d, wide = layout.config.l, layout.config.d, x.to(compute_dtype(x))
    if layout.cu_seqlens is not None:
        first, used = layout.slot_tokens
        tokens = (first[:, None] + torch.arange(l, device=x.device)).clamp(max=max(layout.num_keys - 1, 0))
        return wide[:, tokens].mean(2).masked_fill(~used[:, None, None], 0).to(x.dtype)
    if layout.num_slots == 0:
        return x[:, :0]
    strides = layout.num_slots + l // d - 1
    sums = wide[:, : strides * d].reshape(x.shape[0], strides, d, *x.shape[2:]).sum(2)
    blocks = sums.unfold(1, l // d, 1).sum(-1)
    return (blocks / l).to(x.dtype)


def compressed_attention(
    q: Tensor, k_cmp: Tensor, v_cmp: Tensor, layout: Layout, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The compressed branch; see `nsa.compressed_attention`."""
    lo, hi = layout.compressed_interval
    return CompressedWindowAttention.apply(q, k_cmp, v_cmp, lo, hi, layout.compressed_span, COMPRESSED_CHUNK, scale)


def gated_rows(
    do: Tensor, dlse: Sequence[Tensor], outputs: Sequence[Tensor], lse: Sequence[Tensor], gates: Tensor
) -> tuple[list[tuple[tuple[Tensor, float], ...]], Tensor]:
    """`combine` backward, and what the branches take of each query: do, dlse, o and lse."""
    with torch.enable_grad():
        *leaves, gate = (x.detach().requires_grad_() for x in (*outputs, gates))
        o_cmp, o_sel, o_win = leaves
        *d_o, d_gates = torch.autograd.grad(combine((o_cmp, o_sel, o_win), gate), [*leaves, gate], do)
    of_branches = zip(d_o, dlse, outputs, lse, strict=True)
    # an lse of infinity makes all probabilities of padding 0
    return [((a, 0.0), (b, 0.0), (o, 0.0), (one, torch.inf)) for a, b, o, one in of_branches], d_gates


def compressed_attention_backward(
    rows: Sequence[Tensor], q: Tensor, k_cmp: Tensor, v_cmp: Tensor, layout: Layout, scale: float
) -> Gradients:
    """Gradients of `compressed_attention`, from what it was given and `gated_rows`."""
    do, dlse, o, lse = rows
    given = do, dlse, q, k_cmp, v_cmp, o, lse, *layout.compressed_interval
    return compressed_window.backward(*given, layout.compressed_span, COMPRESSED_CHUNK, scale)


def selected_attention(
    q: Tensor, k: Tensor, v: Tensor, block_indices: Tensor, layout: Layout, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The selected branch on distinct block indices; see `nsa.selected_attention`."""
    return SelectedAttention.apply(q, k, v, block_indices, layout, scale)


def selected_attention_backward(
    rows: Sequence[Tensor], q: Tensor, k: Tensor, v: Tensor, block_indices: Tensor, layout: Layout, scale: float
) -> Gradients:
    """Gradients of `selected_attention`, from what it was given and `gated_rows`."""
    do, dlse, o, lse = rows
    return selected.backward(do, dlse, q, k, v, o, lse, block_indices, layout, scale)


def window_attention(q: Tensor, k: Tensor, v: Tensor, layout: Layout, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """The window branch; see `nsa.window_attention`."""
    lo, hi = layout.window_interval
    return CompressedWindowAttention.apply(q, k, v, lo, hi, layout.window_span, WINDOW_CHUNK, scale)


def window_attention_backward(
    rows: Sequence[Tensor], q: Tensor, k: Tensor, v: Tensor, layout: Layout, scale: float
) -> Gradients:
    """Gradients of `window_attention`, from what it was given and `gated_rows`."""
    do, dlse, o, lse = rows
    given = do, dlse, q, k, v, o, lse, *layout.window_interval
    return compressed_window.backward(*given, layout.window_span, WINDOW_CHUNK, scale)


def add_gradients(dq: Tensor, dq_cmp: Tensor, dq_sel: Tensor, dq_win: Tensor) -> None:
    """Those of all branches into dq, in the order in which autograd adds them."""
    torch.add(dq_win + dq_sel, dq_cmp, out=dq)


def combine(outputs: tuple[Tensor, Tensor, Tensor], gates: Tensor) -> Tensor:
    """Eq. 5: Σ gate · branch, added in at least float32."""
    wide = compute_dtype(outputs[0])
    total = torch.zeros_like(outputs[0], dtype=wide)
    for gate, o in zip(gates.unbind(-1), outputs, strict=True):
        total = total + gate.to(wide)[..., None] * o.to(wide)
    return total.to(outputs[0].dtype)


def combine_into(o: Tensor, outputs: tuple[Tensor, Tensor, Tensor], gates: Tensor) -> None:
    """`combine` into o."""
    o.copy_(combine(outputs, gates))
