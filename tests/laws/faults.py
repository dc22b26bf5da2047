"""Faults that others made, as small as they get: each takes the place of one function of the reference.

The attention of a fault is dense and covers plain calls only, which is all that its law needs to catch it.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import torch
from torch import Tensor

from nsa import reference
from nsa.config import NSAConfig
from nsa.geometry import Layout

ORIGINAL = SimpleNamespace(**vars(reference))
Branch = tuple[Tensor, Tensor, Tensor]


def dense_scores(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """[B, Hq, S, T]."""
    return torch.einsum("bshd,bthd->bhst", q, k.repeat_interleave(q.shape[2] // k.shape[2], 2)) * scale


def _outputs(p: Tensor, v: Tensor) -> Tensor:
    return torch.einsum("bhst,bthd->bshd", p, v.repeat_interleave(p.shape[1] // v.shape[2], 2))


def dense(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Branch:
    """Masked attention; mask [S, T] or [B, Hkv, S, T]."""
    mask = mask.expand(q.shape[0], k.shape[2], *mask.shape[-2:])
    shown = mask.repeat_interleave(q.shape[2] // k.shape[2], 1)
    s = dense_scores(q, k, scale).masked_fill(~shown, -torch.inf)
    return _outputs(s.softmax(-1), v), s.logsumexp(-1).transpose(1, 2), mask.sum(-1, dtype=torch.int32).transpose(1, 2)


def band(layout: Layout, shift: int = 0) -> Tensor:
    """bool [S, T]: the window, `shift` tokens late."""
    keys, t = torch.arange(layout.num_keys, device=layout.device), layout.tokens[:, None] + shift
    return (keys <= t) & (keys > t - layout.config.w)


def single_query_is_causal(q: Tensor, k: Tensor, v: Tensor, layout: Layout, scale: float) -> Branch:
    """is_causal=True with one query: PyTorch aligns it with key 0."""
    if layout.num_queries != 1:
        return ORIGINAL.window_attention(q, k, v, layout, scale)
    first = torch.arange(layout.num_keys, device=q.device)[None] < 1
    return dense(q, k, v, first, scale)


def inverted_mask(q: Tensor, k: Tensor, v: Tensor, layout: Layout, scale: float) -> Branch:
    """Boolean masks say what to attend to; taken for what to leave out, they show the future."""
    return dense(q, k, v, ~band(layout), scale)


def window_by_absolute_position(q: Tensor, k: Tensor, v: Tensor, layout: Layout, scale: float) -> Branch:
    """A cache of w tokens that is indexed as if it began at token 0: from w tokens on, a row sees the next token."""
    late = layout.tokens[:, None] >= layout.config.w
    return dense(q, k, v, torch.where(late, band(layout, 1), band(layout)), scale)


def softmax_over_the_batch(q: Tensor, k: Tensor, v: Tensor, layout: Layout, scale: float) -> Branch:
    """The wrong axis."""
    o, lse, read = ORIGINAL.window_attention(q, k, v, layout, scale)
    p = dense_scores(q, k, scale).softmax(0).masked_fill(~band(layout), 0)
    return _outputs(p, v) + 0 * o, lse, read


def scale_of_the_values(q: Tensor, k: Tensor, v: Tensor, layout: Layout, scale: float) -> Branch:
    """1/sqrt(Dv) is right only as long as Dk = Dv."""
    return ORIGINAL.window_attention(q, k, v, layout, v.shape[-1] ** -0.5)


def hidden_nan(q: Tensor, k: Tensor, v: Tensor, layout: Layout, scale: float) -> Branch:
    """A NaN that is swept away shows up nowhere."""
    return ORIGINAL.window_attention(q, k, v.nan_to_num(), layout, scale)


def scaled_in_place(q: Tensor, k: Tensor, v: Tensor, layout: Layout, scale: float) -> Branch:
    """The caller's q is the function's scratch."""
    q.data.mul_(scale)
    return ORIGINAL.window_attention(q, k, v, layout, 1.0)


def strides_ignored(q: Tensor, k: Tensor, v: Tensor, layout: Layout, scale: float) -> Branch:
    """Offsets computed as if every tensor were contiguous."""
    flat = v.as_strided(v.shape, torch.empty(v.shape, device="meta").stride(), v.storage_offset())
    return ORIGINAL.window_attention(q, k, flat, layout, scale)


class MasksByLength:
    """State shared by all calls: the first config of a length decides for every later one."""

    def __init__(self) -> None:
        self.first: dict[int, NSAConfig] = {}

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, layout: Layout, scale: float) -> Branch:
        config = self.first.setdefault(layout.num_keys, layout.config)
        return ORIGINAL.window_attention(q, k, v, replace(layout, config=config), scale)


class Workspace:
    """An output buffer kept for the next call of the same shape."""

    def __init__(self) -> None:
        self.kept: dict[torch.Size, Tensor] = {}

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, layout: Layout, scale: float) -> Branch:
        o, lse, read = ORIGINAL.window_attention(q, k, v, layout, scale)
        buffer = self.kept.setdefault(o.shape, torch.zeros_like(o)).detach_()
        return buffer.copy_(o), lse, read


def rows_never_written(q: Tensor, k_cmp: Tensor, v_cmp: Tensor, layout: Layout, scale: float) -> Branch:
    """Rows that see no block are skipped, and keep what was in memory."""
    o, lse, read = ORIGINAL.compressed_attention(q, k_cmp, v_cmp, layout, scale)
    seen = (lse > -torch.inf)[..., None]
    return torch.where(seen, o, torch.empty_like(o)), lse, read


def masked_after_softmax(
    q: Tensor, k: Tensor, v: Tensor, block_indices: Tensor, layout: Layout, scale: float
) -> Branch:
    """The NaN of an all-masked row is replaced in the forward, and lives on in the backward."""
    mask = _chosen_tokens(block_indices, layout) > 0
    s = dense_scores(q, k, scale)
    shown = mask.repeat_interleave(q.shape[2] // k.shape[2], 1)
    p = (s + torch.where(shown, 0.0, -torch.inf)).softmax(-1)
    _, lse, read = ORIGINAL.selected_attention(q, k, v, block_indices, layout, scale)
    return _outputs(torch.where(shown.any(-1, keepdim=True), p, 0), v), lse, read


def duplicates_counted_twice(
    q: Tensor, k: Tensor, v: Tensor, block_indices: Tensor, layout: Layout, scale: float
) -> Branch:
    """A block that is listed twice is gathered twice."""
    times = _chosen_tokens(block_indices, layout).repeat_interleave(q.shape[2] // k.shape[2], 1)
    s = dense_scores(q, k, scale) + times.log()
    p = s.softmax(-1).nan_to_num(0.0)
    return _outputs(p, v), s.logsumexp(-1).transpose(1, 2), block_indices[..., 0]


def _chosen_tokens(block_indices: Tensor, layout: Layout) -> Tensor:
    """[B, Hkv, S, T]: how often each token at or before t stands in a listed block."""
    keys = torch.arange(layout.num_keys, device=layout.device)
    listed = block_indices.transpose(1, 2)[..., None] == keys // layout.config.l_sel
    return listed.sum(-2) * (keys <= layout.tokens[:, None])


def keys_read_from_the_formula(
    q: Tensor, k: Tensor, v: Tensor, block_indices: Tensor, layout: Layout, scale: float
) -> Branch:
    """n · l' is what one expects to read."""
    o, lse, read = ORIGINAL.selected_attention(q, k, v, block_indices, layout, scale)
    return o, lse, torch.full_like(read, layout.config.n_sel * layout.config.l_sel)


def indices_as_given(block_indices: Tensor, layout: Layout) -> Tensor:
    """No cleaning of the caller's indices."""
    return block_indices.clamp(-1, layout.num_keys).int()


def gates_in_reverse(outputs: tuple[Tensor, Tensor, Tensor], gates: Tensor) -> Tensor:
    """Window, selected, compressed."""
    return ORIGINAL.combine(outputs, gates.flip(-1))


def grid_over_all_documents(x: Tensor, layout: Layout) -> Tensor:
    """Blocks that start every d tokens of the packed row, across the bounds of documents."""
    blocks = ORIGINAL.compress(x, replace(layout, cu_seqlens=None))
    return torch.nn.functional.pad(blocks, (0, 0, 0, 0, 0, layout.num_slots - blocks.shape[1]))


def blocks_begun(num_tokens: int, config: NSAConfig) -> int:
    """Compression blocks, the last one kept although it is not full."""
    return max(-(-(num_tokens - config.l) // config.d) + 1, 0)


def mean_of_what_there_is(x: Tensor, layout: Layout) -> Tensor:
    """The mean of each block, full or not."""
    starts = [c * layout.config.d for c in range(layout.num_slots)]
    return torch.stack([x[:, first : first + layout.config.l].mean(1) for first in starts], 1)
