"""The parts as Triton kernels; pooling (phi = avg) is a fraction of a percent of the time and stays PyTorch's."""

from __future__ import annotations

from torch import Tensor

from nsa.geometry import Layout
from nsa.torch_backend import compress
from nsa.triton_backend import scores
from nsa.triton_backend.gated_sum import Combine
from nsa.triton_backend.interval import IntervalAttention
from nsa.triton_backend.selected import SelectedAttention

__all__ = ["combine", "compress", "compressed_attention", "select_blocks", "selected_attention", "window_attention"]

# A compressed block is seen by all later queries: several programs share them, or the GPU would stand idle.
TOKENS_PER_SPLIT = 2048
MAX_SPLITS = 16


def _positive(q: Tensor, scale: float) -> tuple[Tensor, float]:
    """The same scores with a positive scale, which the kernels' running maximum needs."""
    return (q, scale) if scale > 0 else (q * (-1.0 if scale < 0 else 0.0), -scale if scale < 0 else 1.0)


def compressed_attention(
    q: Tensor, k_cmp: Tensor, v_cmp: Tensor, layout: Layout, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The compressed branch; see `nsa.compressed_attention`."""
    splits = max(min(-(-layout.num_queries // TOKENS_PER_SPLIT), MAX_SPLITS), 1)
    q, scale = _positive(q, scale)
    return IntervalAttention.apply(q, k_cmp, v_cmp, *layout.compressed_interval, splits, scale)


def select_blocks(q: Tensor, k_cmp: Tensor, layout: Layout, scale: float, lse: Tensor | None = None) -> Tensor:
    """The choice of blocks; see `nsa.select_blocks`."""
    q, scale = _positive(q, scale)
    return scores.select_blocks(q, k_cmp, layout, scale, lse)


def selected_attention(
    q: Tensor, k: Tensor, v: Tensor, block_indices: Tensor, layout: Layout, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The selected branch on distinct block indices; see `nsa.selected_attention`."""
    q, scale = _positive(q, scale)
    return SelectedAttention.apply(q, k, v, block_indices, layout, scale)


def window_attention(q: Tensor, k: Tensor, v: Tensor, layout: Layout, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """The window branch; see `nsa.window_attention`."""
    q, scale = _positive(q, scale)
    return IntervalAttention.apply(q, k, v, *layout.window_interval, 1, scale)


def combine(outputs: tuple[Tensor, Tensor, Tensor], gates: Tensor) -> Tensor:
    """Eq. 5: Σ gate · branch, added in float32; see `nsa.combine`."""
    return Combine.apply(*outputs, gates)
