"""Every row of an output, and every gradient, beside the second implementation (`masked_attention`).

The oracle sees a few rows only; here no row of what was timed goes unseen. Where all rows would take too long, some of
each tile are drawn.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from benchmarks.cases.inputs import Problem, block_means
from benchmarks.cases.outcome import OracleCheck
from benchmarks.correctness import masked_attention, row_sampling, tolerance
from benchmarks.correctness.masked_attention import Chunk, KeyValues
from benchmarks.correctness.verify import Answer
from nsa import NSAConfig, geometry

_MOST_PAIRS = {"cuda": 2e10, "cpu": 1e7}
"""(query, key) pairs, over all heads, that a forward pass is compared on. On an H200 5e10 took about ten seconds, and
the quick profile ten minutes; on two cores 1e7 take about one."""
_BACKWARD_COST = 4


@dataclass(frozen=True)
class RowComparison:
    """What a comparison with the second implementation says."""

    rows: int
    """Query rows compared, over all sequences."""
    checks: tuple[OracleCheck, ...]


@dataclass
class RowErrors:
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


def rows_to_compare(
    problem: Problem, config: NSAConfig | None, seed: int, *, backward: bool, share: float = 1.0
) -> Tensor:
    """int64 [R], on the problem's device: the query rows of each sequence, all of them where that is affordable.

    `share`: of what is affordable, this much is spent.
    """
    batch, queries, heads = problem.q.shape[:3]
    device = problem.q.device
    per_tile = rows_per_tile(
        queries, problem.k.shape[1], batch * heads, config, device.type, backward=backward, share=share
    )
    return torch.tensor(row_sampling.by_tiles(queries, per_tile, seed), device=device)


def rows_per_tile(
    queries: int, keys: int, heads: int, config: NSAConfig | None, device: str, *, backward: bool, share: float = 1.0
) -> int:
    """How many rows of each tile are compared; `heads` counts those of all sequences."""
    seen = keys - (queries - 1) / 2  # by a row, on average
    width = masked_attention.scores_per_row(keys, seen, config, backward=backward)
    pairs = heads * queries * width * (_BACKWARD_COST if backward else 1)
    return row_sampling.rows_per_tile(pairs, share * _MOST_PAIRS[device])


def output_gradient(o: Tensor, rows: Tensor, seed: int) -> Tensor:
    """A do like o, 0 outside the rows, in each of them as large as makes them count alike."""
    generator = torch.Generator(o.device).manual_seed(seed)
    d_o = torch.zeros_like(o)
    picked = o[:, rows].detach().float()
    noise = torch.randn(picked.shape, generator=generator, device=o.device)
    size = picked.square().mean((-2, -1), keepdim=True).sqrt().clamp(min=torch.finfo(torch.float32).tiny)
    d_o[:, rows] = (noise / size).to(o.dtype)
    return d_o


def compare_nsa(
    problem: Problem, config: NSAConfig, answer: Answer, blocks: Tensor, rows: Tensor, *, given: bool = False
) -> RowComparison:
    """Blocks [B, S, Hkv, n], output, and gradients where the answer has some, on these rows of every sequence. Blocks
    that were `given` must be a legal choice, and need not be the best."""
    return _Comparison(problem.map(Tensor.detach), config, answer, blocks, rows, given).result()


def compare_dense(problem: Problem, answer: Answer, rows: Tensor) -> RowComparison:
    """The same for causal dense attention."""
    return _Comparison(problem.map(Tensor.detach), None, answer, None, rows).result()


@dataclass(frozen=True)
class _ChunkResult:
    """What the second implementation says of one chunk, in one type."""

    o: Tensor  # [R, Hq, Dv]
    gradients: Mapping[str, Tensor]
    """Of the chunk's own rows: "dq", "dgates"; none of a forward pass."""
    scores: Tensor | None
    """Of the blocks; None for dense attention."""


@dataclass(frozen=True)
class _Comparison:
    """One answer, and how far it (`found`) and PyTorch in the measured type (`eager`) are from the truth, by tensor."""

    problem: Problem
    config: NSAConfig | None
    """None for dense attention."""
    answer: Answer
    blocks: Tensor | None
    rows: Tensor
    given: bool = False
    """Whether the blocks were given to it, and not chosen by score."""
    found: defaultdict[str, RowErrors] = field(default_factory=lambda: defaultdict(RowErrors))
    eager: defaultdict[str, RowErrors] = field(default_factory=lambda: defaultdict(RowErrors))
    choices: list[tuple[float, float]] = field(default_factory=list)
    """`choice_errors` of each chunk."""

    @property
    def backward(self) -> bool:
        """Whether gradients are compared too."""
        return bool(self.answer.gradients)

    def result(self) -> RowComparison:
        """Compare sequence by sequence."""
        batch, queries = self.problem.q.shape[:2]
        for b in range(batch):
            self._sequence(b)
        which = "all rows" if len(self.rows) == queries else f"{len(self.rows)} of {queries} rows"
        return RowComparison(batch * len(self.rows), tuple(self._checks(which)))

    def _checks(self, which: str) -> list[OracleCheck]:
        checks = []
        if self.choices:
            error, budget = map(tolerance.worst, zip(*self.choices, strict=True))
            name = f"block_indices, {which}"
            checks.append(tolerance.check(name, error, 2 * tolerance.FORWARD_FACTOR * budget))
        for name in self.found:
            error, budget = (one[name].worst(by_row=name == "o") for one in (self.found, self.eager))
            factor = tolerance.FORWARD_FACTOR if name == "o" else tolerance.BACKWARD_FACTOR
            checks.append(tolerance.check(f"{name}, {which}", error, factor * max(budget, tolerance.LEAST_ERROR)))
        return checks

    def _sequence(self, b: int) -> None:
        """Add what one sequence says to the tables."""
        q = self.problem.q[b]
        wide = torch.float64 if q.dtype in (torch.float32, torch.float64) else torch.float32
        both = [masked_attention.key_values(self.problem, b, self.config, dtype) for dtype in (wide, q.dtype)]
        totals = [{name: torch.zeros_like(x, dtype=wide) for name, x in source.tensors.items()} for source in both]
        keys = self.problem.k.shape[1]
        for chunk in masked_attention.chunks(q, keys, self.rows, self.config, backward=self.backward):
            truth, eager = (self._compute(b, chunk, *pair) for pair in zip(both, totals, strict=True))
            self._add(b, chunk, truth, eager)
        if self.backward:
            true_keys, eager_keys = (_of_keys(self.problem, b, self.config, total) for total in totals)
            for name in ("dk", "dv"):
                self.found[name].add(self.answer.gradients[name][b], true_keys[name])
                self.eager[name].add(eager_keys[name].to(q.dtype), true_keys[name])

    def _compute(self, b: int, chunk: Chunk, source: KeyValues, total: Mapping[str, Tensor]) -> _ChunkResult:
        """One chunk in the type of the source; the gradients of keys and values are added to the total."""
        config, backward = self.config, self.backward
        chosen = self._chosen(b, chunk)
        leaves = source.before(chunk.end, config, differentiated=backward)
        q, gates = (x[b, chunk.rows].to(source.k.dtype) for x in (self.problem.q, self.problem.gates))
        q, gates = q.requires_grad_(backward), gates.requires_grad_(backward)
        with torch.set_grad_enabled(backward):
            o = masked_attention.attend(q, gates, leaves, chunk, chosen, config, backward=backward)
        scores = None if config is None else masked_attention.block_scores(q, leaves, chunk, config)
        if not backward:
            return _ChunkResult(o, {}, scores)
        assert self.answer.d_o is not None
        return _ChunkResult(o, _gradients(o, self.answer.d_o[b, chunk.rows], q, gates, leaves, total), scores)

    def _add(self, b: int, chunk: Chunk, truth: _ChunkResult, eager: _ChunkResult) -> None:
        """Add the rows of one chunk to the tables."""
        self.found["o"].add(self.answer.o[b, chunk.rows], truth.o)
        self.eager["o"].add(eager.o, truth.o)
        for name in ("dq", "dgates") if self.backward else ():
            if name in self.answer.gradients:
                self.found[name].add(self.answer.gradients[name][b, chunk.rows], truth.gradients[name])
                self.eager[name].add(eager.gradients[name], truth.gradients[name])
        chosen = self._chosen(b, chunk)
        if self.config is not None and chosen is not None and truth.scores is not None and eager.scores is not None:
            deficit, off = choice_errors(truth.scores, eager.scores, chosen, chunk, self.config)
            self.choices.append((0.0 if self.given and math.isfinite(deficit) else deficit, off))

    def _chosen(self, b: int, chunk: Chunk) -> Tensor | None:
        return None if self.blocks is None else self.blocks[b, chunk.rows]


def choice_errors(scores: Tensor, own: Tensor, chosen: Tensor, chunk: Chunk, config: NSAConfig) -> tuple[float, float]:
    """(by how much a row's best block left out beats its worst one taken, infinite for what is no legal choice; the
    largest error of a score in the measured type), both relative to the row's largest score."""
    current = (chunk.positions // config.l_sel)[:, None]  # [R, 1]
    block = torch.arange(scores.shape[-1], device=scores.device)
    forced = geometry.is_forced(block, current, config)  # [R, blocks]
    slot = torch.arange(chosen.shape[-1], device=chosen.device)
    taken = (slot < (current + 1).clamp(max=config.n_sel))[:, None]  # [R, 1, n]
    inside = masked_attention.members(chosen, scores.shape[-1])
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
    o: Tensor, d_o: Tensor, q: Tensor, gates: Tensor, leaves: KeyValues, total: Mapping[str, Tensor]
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
