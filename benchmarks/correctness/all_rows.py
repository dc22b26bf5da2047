"""Every row of an output, and every gradient, beside a second implementation: masked attention over chunks of rows.

`oracle` asks nsa.reference about a few rows, because it goes row by row. Here PyTorch's own attention
computes many rows at once, under masks that are spelt out in this file, so that no row of what was timed goes unseen.
In a wider type it is the truth, in the type that is measured its error gives the budget, as for the oracle's rows. A
chunk's scores fit in `_CHUNK_BYTES`. Where all rows would take too long, some of each tile are drawn.
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.attention import sdpa_kernel
from torch.nn.functional import pad, scaled_dot_product_attention

from benchmarks.correctness import oracle, row_sampling, tolerance
from benchmarks.correctness.verify import Answer
from benchmarks.history.records import Check
from benchmarks.workloads.inputs import Problem, block_means
from nsa import NSAConfig, geometry

_MOST_PAIRS = {"cuda": 2e10, "cpu": 1e7}
"""(query, key) pairs, over all heads, that a forward pass is compared on. On an H200 5e10 took about ten seconds, and
the quick profile ten minutes; on two cores 1e7 take about one."""
_BACKWARD_COST = 4
_CHUNK_BYTES = {"cuda": 2**29, "cpu": 2**27}
_MOST_ROWS = {"cuda": 512, "cpu": 64}
_GATHER_BEYOND = 4
"""Where a row may see more keys than this many times what it selects, these are gathered instead of masked."""


@dataclass(frozen=True)
class RowComparison:
    """What a comparison with the second implementation says."""

    rows: int
    """Query rows compared, over all sequences."""
    checks: tuple[Check, ...]


@dataclass(frozen=True)
class _Sources:
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

    def before(self, tokens: int, config: NSAConfig | None, *, differentiated: bool) -> _Sources:
        """The first `tokens` keys and the blocks in them, as leaves."""
        blocks = 0 if config is None else geometry.num_compressed_blocks(tokens, config)
        ends = {"k": tokens, "v": tokens, "k_compressed": blocks, "v_compressed": blocks}
        cut = {name: x[: ends[name]].detach() for name, x in self.tensors.items()}
        leaves = {name: x.requires_grad_(differentiated) for name, x in cut.items()}
        return dataclasses.replace(self, **leaves)


@dataclass(frozen=True)
class _Chunk:
    """Some rows of one sequence."""

    rows: Tensor  # int64 [R], ascending
    positions: Tensor  # int64 [R]: where they stand among the keys
    end: int
    """Keys that the last of them may see."""


@dataclass
class _Errors:
    """Per row, how far an implementation is from the truth, and the truth's size, of one tensor."""

    off: list[Tensor] = field(default_factory=list)
    size: list[Tensor] = field(default_factory=list)

    def add(self, x: Tensor, truth: Tensor) -> None:
        """Rows [R, H, D] of both."""
        wide = torch.promote_types(truth.dtype, torch.float32)
        self.off.append(torch.linalg.vector_norm(x.detach().to(wide) - truth.detach().to(wide), dim=-1))
        self.size.append(torch.linalg.vector_norm(truth.detach().to(wide), dim=-1))

    def worst(self, *, by_row: bool) -> float:
        """Of every row's heads the largest error, relative to the head's own size, but at least to the typical size of
        the row's heads (`by_row`) or of all: what is nearly 0 has no relative error."""
        off, size = torch.cat(self.off), torch.cat(self.size)
        typical = size.square().mean(-1, keepdim=True).sqrt() if by_row else size.square().mean().sqrt()
        tiny = torch.finfo(size.dtype).tiny
        return (off / torch.maximum(size, typical).clamp(min=tiny)).amax().item()


def rows_to_compare(problem: Problem, config: NSAConfig | None, seed: int, *, backward: bool) -> Tensor:
    """int64 [R], on the problem's device: the query rows of each sequence, all of them where that is affordable."""
    batch, queries, heads = problem.q.shape[:3]
    device = problem.q.device
    per_tile = rows_per_tile(queries, problem.k.shape[1], batch * heads, config, device.type, backward=backward)
    return torch.tensor(row_sampling.by_tiles(queries, per_tile, seed), device=device)


def rows_per_tile(queries: int, keys: int, heads: int, config: NSAConfig | None, device: str, *, backward: bool) -> int:
    """How many rows of each tile are compared; `heads` counts those of all sequences."""
    seen = keys - (queries - 1) / 2  # by a row, on average
    width = _width(keys, seen, config, backward=backward)
    pairs = heads * queries * width * (_BACKWARD_COST if backward else 1)
    return row_sampling.rows_per_tile(pairs, _MOST_PAIRS[device])


def output_gradient(o: Tensor, rows: Tensor, seed: int) -> Tensor:
    """A do like o, 0 outside the rows, in each of them as large as makes them count alike."""
    generator = torch.Generator(o.device).manual_seed(seed)
    d_o = torch.zeros_like(o)
    picked = o[:, rows].detach().float()
    noise = torch.randn(picked.shape, generator=generator, device=o.device)
    size = picked.square().mean((-2, -1), keepdim=True).sqrt().clamp(min=torch.finfo(torch.float32).tiny)
    d_o[:, rows] = (noise / size).to(o.dtype)
    return d_o


def compare_nsa(problem: Problem, config: NSAConfig, answer: Answer, blocks: Tensor, rows: Tensor) -> RowComparison:
    """Blocks [B, S, Hkv, n], output, and gradients where the answer has some, on these rows of every sequence."""
    return _compared(problem, config, answer, blocks, rows)


def compare_dense(problem: Problem, answer: Answer, rows: Tensor) -> RowComparison:
    """The same for causal dense attention."""
    return _compared(problem, None, answer, None, rows)


def _compared(
    problem: Problem, config: NSAConfig | None, answer: Answer, blocks: Tensor | None, rows: Tensor
) -> RowComparison:
    problem = problem.map(Tensor.detach)
    found, own = defaultdict[str, _Errors](_Errors), defaultdict[str, _Errors](_Errors)
    choices: list[tuple[float, float]] = []
    for b in range(problem.q.shape[0]):
        _sequence(problem, b, config, answer, blocks, rows, found, own, choices)
    queries = problem.q.shape[1]
    which = "all rows" if len(rows) == queries else f"{len(rows)} of {queries} rows"
    checks = []
    if choices:
        error, budget = max(one for one, _ in choices), max(one for _, one in choices)
        checks.append(tolerance.check(f"block_indices, {which}", error, 2 * tolerance.FORWARD_FACTOR * budget))
    for name in found:
        error, budget = (one[name].worst(by_row=name == "o") for one in (found, own))
        factor = tolerance.FORWARD_FACTOR if name == "o" else tolerance.BACKWARD_FACTOR
        checks.append(tolerance.check(f"{name}, {which}", error, factor * max(budget, tolerance.LEAST_ERROR)))
    return RowComparison(problem.q.shape[0] * len(rows), tuple(checks))


def _sequence(
    problem: Problem,
    b: int,
    config: NSAConfig | None,
    answer: Answer,
    blocks: Tensor | None,
    rows: Tensor,
    found: Mapping[str, _Errors],
    own: Mapping[str, _Errors],
    choices: list[tuple[float, float]],
) -> None:
    """Add what one sequence says to the tables."""
    q, gates, backward = problem.q[b], problem.gates[b], bool(answer.gradients)
    wide = torch.float64 if q.dtype in (torch.float32, torch.float64) else torch.float32
    both = [_sources(problem, b, config, dtype) for dtype in (wide, q.dtype)]
    totals = [{name: torch.zeros_like(x, dtype=wide) for name, x in source.tensors.items()} for source in both]
    for chunk in _chunks(q, problem.k.shape[1], rows, config, backward=backward):
        outputs, gradients, scores = [], [], []
        chosen = None if blocks is None else blocks[b, chunk.rows]
        for source, total in zip(both, totals, strict=True):
            dtype = source.k.dtype
            leaves = source.before(chunk.end, config, differentiated=backward)
            own_q, own_gates = (x[chunk.rows].to(dtype).requires_grad_(backward) for x in (q, gates))
            with torch.set_grad_enabled(backward):
                o = _attend(own_q, own_gates, leaves, chunk, chosen, config, backward=backward)
            outputs.append(o)
            if config is not None and chosen is not None:
                scores.append(_block_scores(own_q, leaves, chunk, config))
            if backward:
                assert answer.d_o is not None
                gradients.append(_gradients(o, answer.d_o[b, chunk.rows], own_q, own_gates, leaves, total))
        found["o"].add(answer.o[b, chunk.rows], outputs[0])
        own["o"].add(outputs[1], outputs[0])
        for name in ("dq", "dgates") if backward else ():
            if name in answer.gradients:
                found[name].add(answer.gradients[name][b, chunk.rows], gradients[0][name])
                own[name].add(gradients[1][name], gradients[0][name])
        if config is not None and chosen is not None:
            choices.append(_choice_errors(scores[0], scores[1], chosen, chunk, config))
    if backward:
        truth, eager = (_of_keys(problem, b, config, total) for total in totals)
        for name in ("dk", "dv"):
            found[name].add(answer.gradients[name][b], truth[name])
            own[name].add(eager[name].to(q.dtype), truth[name])


def _sources(problem: Problem, b: int, config: NSAConfig | None, dtype: torch.dtype) -> _Sources:
    k, v = problem.k[b].to(dtype), problem.v[b].to(dtype)
    if config is None:
        return _Sources(k, v, None, None)
    if problem.k_compressed is not None:
        assert problem.v_compressed is not None
        return _Sources(k, v, problem.k_compressed[b].to(dtype), problem.v_compressed[b].to(dtype))
    return _Sources(k, v, block_means(k[None], config)[0], block_means(v[None], config)[0])


def _chunks(q: Tensor, keys: int, rows: Tensor, config: NSAConfig | None, *, backward: bool) -> Iterator[_Chunk]:
    """Rows [S, Hq, Dk] in pieces whose scores, 8 bytes each, fit in a chunk's memory."""
    device = q.device.type
    width = _width(keys, keys, config, backward=backward)
    most = max(1, min(_MOST_ROWS[device], int(_CHUNK_BYTES[device] // (8 * q.shape[1] * width))))
    first = keys - q.shape[0]
    for part in rows.split(most):
        yield _Chunk(part, part + first, first + int(part[-1]) + 1)


def _attend(
    q: Tensor,
    gates: Tensor,
    source: _Sources,
    chunk: _Chunk,
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


def _compressed(q: Tensor, source: _Sources, chunk: _Chunk, config: NSAConfig) -> Tensor:
    assert source.k_compressed is not None
    assert source.v_compressed is not None
    visible = geometry.num_visible_compressed(chunk.positions, config)[:, None]
    block = torch.arange(source.k_compressed.shape[0], device=q.device)
    return _masked(q, source.k_compressed, source.v_compressed, (block < visible)[None])


def _selected(
    q: Tensor, source: _Sources, chosen: Tensor, chunk: _Chunk, config: NSAConfig, *, backward: bool
) -> Tensor:
    if not backward and _gathers(chunk.end, config):
        return _gathered(q, source, chosen, chunk, config)
    key = torch.arange(chunk.end, device=q.device)
    inside = _members(chosen, geometry.num_selection_blocks(chunk.end, config))  # [R, Hkv, blocks]
    allowed = inside[..., key // config.l_sel] & (key <= chunk.positions[:, None])[:, None]
    return _masked(q, source.k, source.v, allowed.transpose(0, 1))


def _window(q: Tensor, source: _Sources, chunk: _Chunk, config: NSAConfig) -> Tensor:
    begin = max(0, int(chunk.positions[0]) - config.w + 1)
    key, position = torch.arange(begin, chunk.end, device=q.device), chunk.positions[:, None]
    seen = (key <= position) & (key > position - config.w)
    return _masked(q, source.k[begin:], source.v[begin:], seen[None])


def _width(keys: int, seen: float, config: NSAConfig | None, *, backward: bool) -> float:
    """Scores per row and head where a row sees so many of the keys."""
    if config is None or backward or not _gathers(keys, config):
        return seen
    return seen / config.d + config.n_sel * config.l_sel + config.w


def _gathers(keys: int, config: NSAConfig) -> bool:
    return keys > _GATHER_BEYOND * config.n_sel * config.l_sel


def _masked(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    """[R, Hq, Dv] of q [R, Hq, Dk], k and v [T, Hkv, D], seen bool [Hkv or 1, R, T]; 0 for a row that sees nothing."""
    if k.shape[0] == 0:
        return q.new_zeros(*q.shape[:2], v.shape[-1])
    kv_heads = k.shape[1]
    group = q.shape[1] // kv_heads
    anything = seen.any(-1, keepdim=True)
    seen = torch.cat((seen[..., :1] | ~anything, seen[..., 1:]), -1)
    mask = seen[:, None].expand(-1, group, -1, -1).flatten(1, 2)  # [Hkv or 1, G·R, T]
    rows = q.unflatten(1, (kv_heads, group)).permute(1, 2, 0, 3).flatten(1, 2)  # [Hkv, G·R, Dk]
    with sdpa_kernel(oracle.KERNELS):
        o = scaled_dot_product_attention(
            rows[None], k.transpose(0, 1)[None], v.transpose(0, 1)[None], mask.expand(kv_heads, -1, -1)[None]
        )[0]
    o = o.unflatten(1, (group, -1)) * anything[:, None]  # [Hkv, G, R, Dv]
    return o.permute(2, 0, 1, 3).flatten(1, 2)


def _gathered(q: Tensor, source: _Sources, chosen: Tensor, chunk: _Chunk, config: NSAConfig) -> Tensor:
    """The selected branch with each row's own keys side by side, [R, Hkv, n·l', D]."""
    kv_heads = source.k.shape[1]
    tokens = (chosen[..., None].long() * config.l_sel + torch.arange(config.l_sel, device=q.device)).flatten(-2)
    seen = (chosen >= 0).repeat_interleave(config.l_sel, -1) & (tokens <= chunk.positions[:, None, None])
    head = torch.arange(kv_heads, device=q.device)[:, None]
    own = tokens.clamp(0, chunk.end - 1)
    k, v = (x[own, head] for x in (source.k, source.v))
    with sdpa_kernel(oracle.KERNELS):
        o = scaled_dot_product_attention(q.unflatten(1, (kv_heads, -1)), k, v, seen[:, :, None])
    return o.flatten(1, 2)


def _members(chosen: Tensor, blocks: int) -> Tensor:
    """bool [R, Hkv, blocks]: which blocks the indices [R, Hkv, n] name; those out of range name none."""
    valid = (chosen >= 0) & (chosen < blocks)
    counts = torch.zeros(*chosen.shape[:2], blocks, dtype=torch.int32, device=chosen.device)
    return counts.scatter_add(-1, chosen.clamp(0, blocks - 1).long(), valid.int()) > 0


@torch.no_grad()
def _block_scores(q: Tensor, source: _Sources, chunk: _Chunk, config: NSAConfig) -> Tensor:
    """Eq. 8 to 10 of these rows: [R, Hkv, blocks before the chunk's end], 0 where there is nothing to see."""
    assert source.k_compressed is not None
    keys, blocks = source.k_compressed, geometry.num_selection_blocks(chunk.end, config)
    grouped = q.unflatten(1, (keys.shape[1], -1))  # [R, Hkv, G, Dk]
    s = torch.einsum("rhgd,chd->rhgc", grouped, keys) * q.shape[-1] ** -0.5
    visible = geometry.num_visible_compressed(chunk.positions, config)[:, None, None, None]
    unseen = torch.arange(keys.shape[0], device=q.device) >= visible
    wide = torch.promote_types(s.dtype, torch.float32)
    p = s.masked_fill(unseen, -math.inf).softmax(-1, dtype=wide).masked_fill(unseen, 0.0).sum(2)  # [R, Hkv, seen]
    offsets, step = geometry.overlap_offsets(config), config.l_sel // config.d
    weights = torch.tensor(geometry.overlap_weights(config), dtype=p.dtype, device=p.device)
    before = -offsets.start
    after = max((blocks - 1) * step + len(offsets) - before - p.shape[-1], 0)
    return pad(p, (before, after)).unfold(-1, len(offsets), step)[..., :blocks, :] @ weights


def _choice_errors(
    scores: Tensor, own: Tensor, chosen: Tensor, chunk: _Chunk, config: NSAConfig
) -> tuple[float, float]:
    """(by how much a row's best block left out beats its worst one taken, infinite for what is no legal choice; the
    largest error of a score in the measured type), both relative to the row's largest score."""
    current = (chunk.positions // config.l_sel)[:, None]  # [R, 1]
    block = torch.arange(scores.shape[-1], device=scores.device)
    forced = geometry.is_forced(block, current, config)  # [R, blocks]
    slot = torch.arange(chosen.shape[-1], device=chosen.device)
    taken = (slot < (current + 1).clamp(max=config.n_sel))[:, None]  # [R, 1, n]
    inside = _members(chosen, scores.shape[-1])
    in_range = torch.where(taken, (chosen >= 0) & (chosen <= current[..., None]), chosen == -1)
    ascending = (chosen.diff(dim=-1) > 0) | ~taken[..., 1:]
    legal = in_range.all(-1) & ascending.all(-1) & (inside | ~forced[:, None]).all(-1)  # [R, Hkv]
    free = ((block <= current) & ~forced)[:, None]
    best_out = scores.masked_fill(~(free & ~inside), -math.inf).amax(-1)
    worst_in = scores.masked_fill(~(free & inside), math.inf).amin(-1)
    deficit = torch.where(legal, (best_out - worst_in).clamp(min=0.0), math.inf)
    largest = scores.amax((-2, -1)).clamp(min=torch.finfo(scores.dtype).tiny)[:, None]
    off = (own.to(scores.dtype) - scores).abs().amax(-1)
    return (deficit / largest).amax().item(), (off / largest).amax().item()


def _gradients(
    o: Tensor, d_o: Tensor, q: Tensor, gates: Tensor, leaves: _Sources, total: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Of Σ o·do: those of the chunk's own rows; those of keys and values are added to the total."""
    wanted = {"dq": q, "dgates": gates, **leaves.tensors}
    gradients = torch.autograd.grad(o, list(wanted.values()), d_o.to(o.dtype), materialize_grads=True)
    by_name = dict(zip(wanted, gradients, strict=True))
    for name, x in leaves.tensors.items():
        total[name][: x.shape[0]] += by_name[name]
    return by_name


def _of_keys(problem: Problem, b: int, config: NSAConfig | None, total: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """dk and dv [T, Hkv, D], through the compression too."""
    found = {}
    for name in ("k", "v"):
        gradient = total[name]
        if config is not None:
            leaf = getattr(problem, name)[b][None].to(gradient.dtype).requires_grad_()
            means = block_means(leaf, config)
            if means.numel():
                through = total[f"{name}_compressed"][None]
                gradient = gradient + torch.autograd.grad(means, leaf, through)[0][0]
        found[f"d{name}"] = gradient
    return found
