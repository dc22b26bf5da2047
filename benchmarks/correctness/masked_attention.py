"""NSA and dense attention by PyTorch's own attention, many rows at once, under masks that are spelt out here.

The second implementation beside `oracle`, which goes row by row. In a wider type it is the truth; in the type that is
measured its error gives the budget, as for the oracle's rows. A chunk's scores fit in `_CHUNK_BYTES`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention import sdpa_kernel
from torch.nn.functional import pad, scaled_dot_product_attention

from benchmarks.cases.inputs import Problem, block_means
from benchmarks.correctness import oracle
from nsa import NSAConfig, geometry

_CHUNK_BYTES = {"cuda": 2**29, "cpu": 2**27}
_MOST_ROWS = {"cuda": 512, "cpu": 64}
_GATHER_BEYOND = 4
"""Where a row may see more keys than this many times what it selects, these are gathered instead of masked."""


@dataclass(frozen=True)
class KeyValues:
    """Keys and values of one sequence in one type; NSA's compressed ones too. Leaves of the gradients, if asked."""

    k: Tensor  # [T, Hkv, Dk]
    v: Tensor  # [T, Hkv, Dv]
    k_compressed: Tensor | None  # [blocks, Hkv, Dk]
    v_compressed: Tensor | None

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Those that are there, by name."""
        values = {one.name: getattr(self, one.name) for one in dataclasses.fields(self)}
        return {name: x for name, x in values.items() if x is not None}

    def before(self, tokens: int, config: NSAConfig | None, *, differentiated: bool) -> KeyValues:
        """The first `tokens` keys and the blocks in them, as leaves."""
        blocks = 0 if config is None else geometry.num_compressed_blocks(tokens, config)
        ends = {"k": tokens, "v": tokens, "k_compressed": blocks, "v_compressed": blocks}
        cut = {name: x[: ends[name]].detach() for name, x in self.tensors.items()}
        leaves = {name: x.requires_grad_(differentiated) for name, x in cut.items()}
        return dataclasses.replace(self, **leaves)


@dataclass(frozen=True)
class Chunk:
    """Some rows of one sequence."""

    rows: Tensor  # int64 [R], ascending
    positions: Tensor  # int64 [R]: where they stand among the keys
    end: int
    """Keys that the last of them may see."""


def key_values(problem: Problem, b: int, config: NSAConfig | None, dtype: torch.dtype) -> KeyValues:
    """Those of sequence `b`; None for dense attention, which has no compressed ones."""
    k, v = problem.k[b].to(dtype), problem.v[b].to(dtype)
    if config is None:
        return KeyValues(k, v, None, None)
    if problem.k_compressed is not None:
        assert problem.v_compressed is not None
        return KeyValues(k, v, problem.k_compressed[b].to(dtype), problem.v_compressed[b].to(dtype))
    return KeyValues(k, v, block_means(k[None], config)[0], block_means(v[None], config)[0])


def chunks(q: Tensor, keys: int, rows: Tensor, config: NSAConfig | None, *, backward: bool) -> Iterator[Chunk]:
    """Rows [S, Hq, Dk] in pieces whose scores, 8 bytes each, fit in a chunk's memory."""
    device = q.device.type
    width = scores_per_row(keys, keys, config, backward=backward)
    most = max(1, min(_MOST_ROWS[device], int(_CHUNK_BYTES[device] // (8 * q.shape[1] * width))))
    first = keys - q.shape[0]
    for part in rows.split(most):
        yield Chunk(part, part + first, first + int(part[-1]) + 1)


def scores_per_row(keys: int, seen: float, config: NSAConfig | None, *, backward: bool) -> float:
    """Scores per row and head where a row sees so many of the keys."""
    if config is None or backward or not _gathers(keys, config):
        return seen
    return seen / config.d + config.n_sel * config.l_sel + config.w


def _gathers(keys: int, config: NSAConfig) -> bool:
    return keys > _GATHER_BEYOND * config.n_sel * config.l_sel


def attend(
    q: Tensor,
    gates: Tensor,
    source: KeyValues,
    chunk: Chunk,
    chosen: Tensor | None,
    config: NSAConfig | None,
    *,
    backward: bool,
) -> Tensor:
    """[R, Hq, Dv] of q [R, Hq, Dk]: dense and causal, or NSA's three branches with the blocks [R, Hkv, n]."""
    if config is None:
        key = torch.arange(chunk.end, device=q.device)
        return _masked(q, source.k, source.v, (key <= chunk.positions[:, None])[None])
    assert chosen is not None
    branches = (
        lambda: _compressed(q, source, chunk, config),
        lambda: _selected(q, source, chosen, chunk, config, backward=backward),
        lambda: _window(q, source, chunk, config),
    )
    o = q.new_zeros(*q.shape[:2], source.v.shape[-1])
    for gate, branch in zip(gates.unbind(-1), branches, strict=True):
        if backward or bool(gate.any()):  # of a part of the forward the other branches are not asked for
            o = o + gate[..., None] * branch()
    return o


def _compressed(q: Tensor, source: KeyValues, chunk: Chunk, config: NSAConfig) -> Tensor:
    assert source.k_compressed is not None
    assert source.v_compressed is not None
    visible = geometry.num_visible_compressed(chunk.positions, config)[:, None]
    block = torch.arange(source.k_compressed.shape[0], device=q.device)
    return _masked(q, source.k_compressed, source.v_compressed, (block < visible)[None])


def _selected(
    q: Tensor, source: KeyValues, chosen: Tensor, chunk: Chunk, config: NSAConfig, *, backward: bool
) -> Tensor:
    if not backward and _gathers(chunk.end, config):
        return _gathered(q, source, chosen, chunk, config)
    key = torch.arange(chunk.end, device=q.device)
    inside = members(chosen, geometry.num_selection_blocks(chunk.end, config))  # [R, Hkv, blocks]
    allowed = inside[..., key // config.l_sel] & (key <= chunk.positions[:, None])[:, None]
    return _masked(q, source.k, source.v, allowed.transpose(0, 1))


def _window(q: Tensor, source: KeyValues, chunk: Chunk, config: NSAConfig) -> Tensor:
    begin = max(0, int(chunk.positions[0]) - config.w + 1)
    key, position = torch.arange(begin, chunk.end, device=q.device), chunk.positions[:, None]
    seen = (key <= position) & (key > position - config.w)
    return _masked(q, source.k[begin:], source.v[begin:], seen[None])


def _masked(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    """[R, Hq, Dv] of q [R, Hq, Dk], k and v [T, Hkv, D], seen bool [Hkv or 1, R, T]; 0 for a row that sees nothing."""
    if k.shape[0] == 0:
        return q.new_zeros(*q.shape[:2], v.shape[-1])
    num_kv_heads = k.shape[1]
    group = q.shape[1] // num_kv_heads
    anything = seen.any(-1, keepdim=True)
    seen = torch.cat((seen[..., :1] | ~anything, seen[..., 1:]), -1)
    mask = seen[:, None].expand(-1, group, -1, -1).flatten(1, 2)  # [Hkv or 1, G·R, T]
    rows = q.unflatten(1, (num_kv_heads, group)).permute(1, 2, 0, 3).flatten(1, 2)  # [Hkv, G·R, Dk]
    with sdpa_kernel(oracle.KERNELS):
        o = scaled_dot_product_attention(
            rows[None], k.transpose(0, 1)[None], v.transpose(0, 1)[None], mask.expand(num_kv_heads, -1, -1)[None]
        )[0]
    o = o.unflatten(1, (group, -1)) * anything[:, None]  # [Hkv, G, R, Dv]
    return o.permute(2, 0, 1, 3).flatten(1, 2)


def _gathered(q: Tensor, source: KeyValues, chosen: Tensor, chunk: Chunk, config: NSAConfig) -> Tensor:
    """The selected branch with each row's own keys side by side, [R, Hkv, n·l', D]."""
    num_kv_heads = source.k.shape[1]
    tokens = (chosen[..., None].long() * config.l_sel + torch.arange(config.l_sel, device=q.device)).flatten(-2)
    seen = (chosen >= 0).repeat_interleave(config.l_sel, -1) & (tokens <= chunk.positions[:, None, None])
    head = torch.arange(num_kv_heads, device=q.device)[:, None]
    own = tokens.clamp(0, chunk.end - 1)
    k, v = (x[own, head] for x in (source.k, source.v))
    with sdpa_kernel(oracle.KERNELS):
        o = scaled_dot_product_attention(q.unflatten(1, (num_kv_heads, -1)), k, v, seen[:, :, None])
    return o.flatten(1, 2)


def members(chosen: Tensor, blocks: int) -> Tensor:
    """bool [R, Hkv, blocks]: which blocks the indices [R, Hkv, n] name; those out of range name none."""
    valid = (chosen >= 0) & (chosen < blocks)
    counts = torch.zeros(*chosen.shape[:2], blocks, dtype=torch.int32, device=chosen.device)
    return counts.scatter_add(-1, chosen.clamp(0, blocks - 1).long(), valid.int()) > 0


@torch.no_grad()
def block_scores(q: Tensor, source: KeyValues, chunk: Chunk, config: NSAConfig) -> Tensor:
    """Eq. 8 to 10 of these rows: [R, Hkv, blocks before the chunk's end], 0 where there is nothing to see."""
    assert source.k_compressed is not None
    keys, blocks = source.k_compressed, geometry.num_selection_blocks(chunk.end, config)
    grouped = q.unflatten(1, (keys.shape[1], -1))  # [R, Hkv, G, Dk]
    s = torch.einsum("rhgd,chd->rhgc", grouped, keys) * q.shape[-1] ** -0.5
    visible = geometry.num_visible_compressed(chunk.positions, config)[:, None, None, None]
    unseen = torch.arange(keys.shape[0], device=q.device) >= visible
    wide = torch.promote_types(s.dtype, torch.float32)
    p = s.masked_fill(unseen, -math.inf).softmax(-1, dtype=wide).masked_fill(unseen, 0.0).sum(2)  # [R, Hkv, seen]
    return selection_scores(p, blocks, config)


def selection_scores(p: Tensor, blocks: int, config: NSAConfig) -> Tensor:
    """Eq. 9: the scores [R, Hkv, blocks] of selection blocks from those of compressed ones [R, Hkv, seen]."""
    offsets, step = geometry.overlap_offsets(config), config.l_sel // config.d
    weights = torch.tensor(geometry.overlap_weights(config), dtype=p.dtype, device=p.device)
    before = -offsets.start
    after = max((blocks - 1) * step + len(offsets) - before - p.shape[-1], 0)
    return pad(p, (before, after)).unfold(-1, len(offsets), step)[..., :blocks, :] @ weights
