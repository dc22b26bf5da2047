"""Rows of long sequences, and every row of dk and dv, beside float64: one key/value head at a time.

The third implementation beside `oracle`, which goes row by row, and `masked_attention`, whose masks hold every key of
every head. Here memory is bounded by a chunk of rows and by one head's keys, so that a million tokens fit, and the
backward pass is spelt out instead of left to autograd. do is 0 outside the compared rows: dk and dv are then known
exactly from these rows. In the measured type the same sums give PyTorch's own error, from which the budget comes.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from benchmarks.cases.inputs import Problem, block_means
from benchmarks.cases.outcome import OracleCheck
from benchmarks.correctness import row_sampling, tolerance
from benchmarks.correctness.all_rows import RowErrors, choice_errors
from benchmarks.correctness.masked_attention import Chunk, members, selection_scores
from benchmarks.correctness.verify import Answer
from nsa import NSAConfig, geometry

MOST_PAIRS = {"cuda": 1e11, "cpu": 2e6}
"""(query, key) pairs, over all heads, that are compared unless asked otherwise."""
LEAST_MASS = 0.999
"""Of the scores that the float64 choice of blocks holds, what the chosen ones must hold in every row."""
FIRST_ROWS = ", first rows"
"""Behind the name of a tensor: of rows that see no more keys than are selected. Some of them see so few that their dq
nearly vanishes, and its error does not; they are held to their own kind, so that they widen no other row's budget."""
_CHUNK_BYTES = {"cuda": 2**29, "cpu": 2**26}
_MOST_ROWS = {"cuda": 256, "cpu": 64}
_ROWS_DRAWN = 16384

Document = tuple[int, int]
"""Tokens first <= t < last."""


@dataclass(frozen=True)
class LongComparison:
    """How far an answer is from float64, and how far PyTorch is in the measured type: the worst row of each tensor."""

    rows: int
    """Query rows compared."""
    found: Mapping[str, float]
    """By tensor, its first rows apart (`FIRST_ROWS`); of "block_indices" by how much a block left out beats one taken,
    infinite for what is no legal choice."""
    own: Mapping[str, float]
    """What PyTorch makes in the measured type."""
    mass: float
    """The least share of the best choice's scores that a row's chosen blocks hold; 1 where none has a choice."""

    def checks(self) -> tuple[OracleCheck, ...]:
        """Each with its budget; "mass missed" is what the chosen blocks lack of the best choice."""
        checks = [tolerance.check("mass missed", 1 - self.mass, 1 - LEAST_MASS)]
        for name, error in self.found.items():
            if name == "block_indices":  # a swap takes two scores, each off by what one may be
                budget = 2 * tolerance.FORWARD_FACTOR * max(self.own[name], tolerance.LEAST_ERROR)
            else:
                factor = tolerance.FORWARD_FACTOR if name in ("o", f"o{FIRST_ROWS}") else tolerance.BACKWARD_FACTOR
                budget = factor * max(self.own[name], tolerance.LEAST_ERROR)
            checks.append(tolerance.check(name, error, budget))
        return tuple(checks)


def worst_of(parts: Iterable[LongComparison]) -> LongComparison:
    """Comparisons of other heads, or by other ranks, of the same rows, as one."""
    found, own, mass, rows = dict[str, float](), dict[str, float](), 1.0, 0
    for part in parts:
        for name in part.found:
            found[name] = tolerance.worst((found.get(name, 0.0), part.found[name]))
            own[name] = max(own.get(name, 0.0), part.own[name])
        mass, rows = min(mass, part.mass), max(rows, part.rows)
    return LongComparison(rows, found, own, mass)


def rows_to_compare(
    documents: Sequence[Document], heads: int, config: NSAConfig, seed: int, most_pairs: float, device: torch.device
) -> Tensor:
    """int64 [R], ascending: of each tile of the documents as many rows as the pairs allow, their first and last."""
    pairs = heads * sum(
        (last - first) * ((last - first) / 2 / config.d + config.n_sel * config.l_sel + config.w)
        for first, last in documents
    )
    per_tile = row_sampling.rows_per_tile(pairs, most_pairs)
    rows: set[int] = set()
    for first, last in documents:
        rows.update(first + row for row in row_sampling.by_tiles(last - first, per_tile, seed + first))
        rows.update((first, last - 1))
    return torch.tensor(sorted(rows), dtype=torch.int64, device=device)


def output_gradient(o: Tensor, rows: Tensor, seed: int) -> Tensor:
    """A do like o [1, S, Hq, Dv]: normal in the rows, 0 outside them."""
    generator = torch.Generator(o.device).manual_seed(seed)
    d_o = torch.zeros_like(o)
    for some in rows.split(_ROWS_DRAWN):  # float32 numbers for all of them may not fit
        d_o[:, some] = torch.randn(1, some.numel(), *o.shape[2:], generator=generator, device=o.device).to(o.dtype)
    return d_o


def compare(
    problem: Problem,
    config: NSAConfig,
    answer: Answer,
    blocks: Tensor,
    rows: Tensor,
    *,
    documents: Sequence[Document] | None = None,
    kv_heads: Sequence[int] | None = None,
    progress: Callable[[int], object] | None = None,
) -> LongComparison:
    """Output, blocks and, where the answer has some, gradients. B is 1.

    Args:
        problem: its q may be on the host, and so may blocks and of the answer what it has of each query.
        blocks: int32 [1, S, Hkv, n], counted in each document.
        rows: int64 [R], ascending, as `rows_to_compare` gives them; the answer's do is 0 outside them.
        documents: those that are compared, all rows of which lie in one; None for the whole sequence.
        kv_heads: those that are compared; None for all.
        progress: called with each key/value head that is done.
    """
    documents = [(0, problem.k.shape[1])] if documents is None else documents
    bounds = rows.tolist()
    parts = []
    for head in range(problem.k.shape[2]) if kv_heads is None else kv_heads:
        for first, last in documents:
            own = rows[bisect_left(bounds, first) : bisect_left(bounds, last)] - first
            if own.numel():
                parts.append(_Head(problem, config, answer, blocks, (first, last), head).compare(own))
        if progress:
            progress(head)
    found = worst_of(parts)
    return LongComparison(rows.numel(), found.found, found.own, found.mass)


@dataclass
class _Sums:
    """Keys and values of one head in one type, and the sums of their gradients."""

    k: Tensor  # [T, D]
    v: Tensor
    k_compressed: Tensor  # [blocks, D]
    v_compressed: Tensor
    narrow: torch.dtype | None
    """What the factors of a product are rounded to; None for none."""
    gradients: dict[str, Tensor] = field(default_factory=dict)

    def rounded(self, x: Tensor) -> Tensor:
        return x if self.narrow is None else x.to(self.narrow).to(x.dtype)

    def zero(self) -> None:
        for name in ("k", "v", "k_compressed", "v_compressed"):
            self.gradients[name] = torch.zeros_like(getattr(self, name))

    def through_compression(self, config: NSAConfig) -> dict[str, Tensor]:
        """dk and dv [T, D]: what came to the keys, and to the means that they are in."""
        for name in ("k", "v"):
            d_means, total = self.rounded(self.gradients[f"{name}_compressed"]), self.gradients[name]
            span = (d_means.shape[0] - 1) * config.d + 1
            for offset in range(config.l if d_means.shape[0] else 0):
                total[offset : offset + span : config.d] += d_means / config.l
        return {"dk": self.gradients["k"], "dv": self.gradients["v"]}


@dataclass(frozen=True)
class _Rows:
    """What a chunk of rows gives in one type."""

    o: Tensor  # [R, G, Dv]
    scores: Tensor  # [R, blocks]
    gradients: Mapping[str, Tensor]
    """dq [R, G, Dk] and dgates [R, G, 3]; empty of a forward pass."""


@dataclass(frozen=True)
class _Head:
    """One key/value head of one document."""

    problem: Problem
    config: NSAConfig
    answer: Answer
    blocks: Tensor
    document: Document
    head: int

    def compare(self, rows: Tensor) -> LongComparison:
        """Rows counted in the document."""
        dtype = self.problem.q.dtype
        half = dtype in (torch.bfloat16, torch.float16)
        truth = self._sums(torch.float64, None)
        eager = self._sums(torch.float32 if half else dtype, dtype if half else None)
        found, own = defaultdict[str, RowErrors](RowErrors), defaultdict[str, RowErrors](RowErrors)
        choices: list[tuple[float, float]] = []
        mass = 1.0
        for chunk in self._chunks(rows):
            chosen = self._of(self.blocks, chunk.rows)  # [R, 1, n]
            true, rounded = (self._rows(sums, chunk, chosen[:, 0]) for sums in (truth, eager))
            answers = {"o": (self.answer.o, true.o, rounded.o)}
            for name, x in true.gradients.items():
                answers[name] = self.answer.gradients[name], x, rounded.gradients[name]
            for tensor, (x, wanted, eager_x) in answers.items():
                name = tensor + FIRST_ROWS * (chunk.end <= self._first_rows)
                found[name].add(self._of(x, chunk.rows), wanted)
                own[name].add(eager_x.to(dtype), wanted)
            choices.append(choice_errors(true.scores[:, None], rounded.scores[:, None], chosen, chunk, self.config))
            mass = min(mass, _mass(true.scores, chosen, chunk, self.config))
        if truth.gradients:
            true_keys, eager_keys = (sums.through_compression(self.config) for sums in (truth, eager))
            for name, x in true_keys.items():
                answer = self.answer.gradients[name][0, slice(*self.document), self.head]
                found[name].add(answer[:, None], x[:, None])
                own[name].add(eager_keys[name].to(dtype)[:, None], x[:, None])
        errors, own_errors = (
            {name: one.worst(by_row=name.startswith("o")) for name, one in table.items()} for table in (found, own)
        )
        errors["block_indices"], own_errors["block_indices"] = map(tolerance.worst, zip(*choices, strict=True))
        return LongComparison(rows.numel(), errors, own_errors, mass)

    def _sums(self, wide: torch.dtype, narrow: torch.dtype | None) -> _Sums:
        k, v = (x[0, slice(*self.document), self.head].to(wide) for x in (self.problem.k, self.problem.v))
        k_means, v_means = (block_means(x[None, :, None], self.config)[0, :, 0] for x in (k, v))
        sums = _Sums(k, v, k_means, v_means, narrow)
        sums.k_compressed, sums.v_compressed = map(sums.rounded, (sums.k_compressed, sums.v_compressed))
        if self.answer.gradients:
            sums.zero()
        return sums

    def _of(self, x: Tensor, rows: Tensor) -> Tensor:
        """The rows of this head, or of its group of query heads, where the keys are: [R, 1 or G, ...].

        x may be on the host, rows and keys not.
        """
        per_head = x.shape[2] // self.problem.k.shape[2]
        row = (self.document[0] + rows).to(x.device)
        return x[0, row, self.head * per_head : (self.head + 1) * per_head].to(self.problem.k.device)

    def _chunks(self, rows: Tensor) -> Iterable[Chunk]:
        """Pieces of the rows whose scores and gathered keys fit in a chunk's memory."""
        device, config = rows.device.type, self.config
        group = self.problem.q.shape[2] // self.problem.k.shape[2]
        begin, ends = 0, rows.tolist()
        selected, early = config.n_sel * config.l_sel, sum(row < self._first_rows for row in ends)
        dims = self.problem.k.shape[3] + self.problem.v.shape[3]
        while begin < len(ends):
            width = group * max(ends[begin] // config.d, selected + config.w) + selected * dims
            count = max(1, min(_MOST_ROWS[device], int(_CHUNK_BYTES[device] // (8 * width))))
            end = min(begin + count, early) if begin < early else begin + count
            part = rows[begin:end]
            yield Chunk(part, part, int(part[-1]) + 1)
            begin = end

    @property
    def _first_rows(self) -> int:
        """How many rows of a document see no more keys than are selected."""
        return self.config.n_sel * self.config.l_sel

    def _rows(self, sums: _Sums, chunk: Chunk, chosen: Tensor) -> _Rows:
        """The three branches of these rows with the blocks [R, n]; what comes to keys and values goes to the sums."""
        config, position = self.config, chunk.positions[:, None]
        q, gates = (self._of(x, chunk.rows).to(sums.k.dtype) for x in (self.problem.q, self.problem.gates))
        d_o = None if self.answer.d_o is None else self._of(self.answer.d_o, chunk.rows).to(q.dtype)
        count = geometry.num_compressed_blocks(chunk.end, config)
        block = torch.arange(count, device=q.device)
        token = (chosen[..., None].long() * config.l_sel + torch.arange(config.l_sel, device=q.device)).flatten(1)
        inside = (chosen >= 0).repeat_interleave(config.l_sel, 1) & (token <= position)
        token = token.clamp(0, chunk.end - 1)
        begin = max(0, int(chunk.positions[0]) - config.w + 1)
        near = torch.arange(begin, chunk.end, device=q.device)
        places: Sequence[tuple[str, Tensor | slice, Tensor]] = (
            ("_compressed", slice(count), block < geometry.num_visible_compressed(position, config)),
            ("", token, inside),
            ("", slice(begin, chunk.end), (near <= position) & (near > position - config.w)),
        )
        o, dq, dgates = torch.zeros_like(q[..., :1]), torch.zeros_like(q), []
        scores = q.new_zeros(q.shape[0], 0)
        for i, (suffix, place, seen) in enumerate(places):
            k, v = getattr(sums, f"k{suffix}")[place], getattr(sums, f"v{suffix}")[place]
            branch = _Branch(q, k, v, seen, sums.rounded)
            o = o + gates[..., i, None] * branch.o
            if i == 0:
                scores = selection_scores(
                    branch.p.sum(1)[:, None], geometry.num_selection_blocks(chunk.end, config), config
                )[:, 0]
            if d_o is not None:
                d_q, d_k, d_v = branch.backward(sums.rounded(gates[..., i, None] * d_o))
                dq = dq + d_q
                dgates.append((d_o * branch.o).sum(-1))
                for name, x in ((f"k{suffix}", d_k), (f"v{suffix}", d_v)):
                    if isinstance(place, slice):
                        sums.gradients[name][place] += x
                    else:
                        sums.gradients[name].index_add_(0, place.flatten(), x.flatten(0, 1))
        gradients = {} if d_o is None else {"dq": dq, "dgates": torch.stack(dgates, -1)}
        return _Rows(o, scores, gradients)


class _Branch:
    """Attention of q [R, G, Dk] over keys [n, D] or [R, n, D] where `seen` [R, n] says so; 0 for a row without any."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, seen: Tensor, rounded: Callable[[Tensor], Tensor]) -> None:
        self._q, self._k, self._v, self._rounded = q, k, v, rounded
        self._scale = q.shape[-1] ** -0.5
        unseen = ~seen[:, None]
        s = (q @ k.mT * self._scale).masked_fill_(unseen, -math.inf)
        self.p = s.softmax(-1).masked_fill_(unseen, 0.0)  # [R, G, n]
        self.o = rounded(rounded(self.p) @ v)

    def backward(self, d_o: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """dq [R, G, Dk], and dk and dv of the keys as they were given, of Σ o·do."""
        d_p = d_o @ self._v.mT
        delta = (d_o * self.o).sum(-1, keepdim=True)  # of the output as it was stored, as FlashAttention has it
        d_s = self._rounded(self.p * (d_p - delta)) * self._scale
        p = self._rounded(self.p)
        dq = d_s @ self._k
        if self._k.dim() == 2:  # the same keys for all rows: one product
            d_s, p, q, d_o = (x.flatten(0, 1) for x in (d_s, p, self._q, d_o))
            return dq, d_s.mT @ q, p.mT @ d_o
        return dq, d_s.mT @ self._q, p.mT @ d_o


def _mass(scores: Tensor, chosen: Tensor, chunk: Chunk, config: NSAConfig) -> float:
    """Over the rows the least share that chosen blocks [R, 1, n] hold of the scores [R, blocks] of the best choice."""
    current = (chunk.positions // config.l_sel)[:, None]
    block = torch.arange(scores.shape[1], device=scores.device)
    order = scores.masked_fill(geometry.is_forced(block, current, config), math.inf)
    order = order.masked_fill(block > current, -math.inf)
    best = order.topk(min(config.n_sel, scores.shape[1]), dim=-1).indices
    most = scores.masked_fill(block > current, 0.0).gather(1, best).sum(-1)
    held = (scores * members(chosen, scores.shape[1])[:, 0]).sum(-1)
    return torch.where(most > 0, held / most, torch.ones_like(most)).amin().item()
