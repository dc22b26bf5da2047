"""The parts of NSA's forward, one case each, through the public parts of `nsa`: where the time goes.

Each part meets the whole oracle: its output is NSA's own with the gates of the other branches at 0, and the blocks are
compared too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

import nsa
from benchmarks.cases import inputs, replayed
from benchmarks.cases.inputs import Problem
from benchmarks.cases.key import Key
from benchmarks.cases.outcome import Correctness
from benchmarks.cases.work import Call, Work
from benchmarks.correctness import all_rows, anti_cheat, oracle, verify
from benchmarks.correctness.verify import Answer
from benchmarks.workloads import roofline
from benchmarks.workloads.attention import FRESH_ROWS, NSA_ROWS
from nsa import Aux, NSAConfig, backends

Tensors = tuple[Tensor, ...]
Timed = Callable[..., Tensor]
"""What is timed, given what it reads."""


@dataclass(frozen=True)
class PartSettings:
    """What all parts of one case share."""

    config: NSAConfig
    backend: str
    given: Tensor | None = None
    """block_indices [B, S, Hkv, n] that are replayed; None where NSA chooses by its own scores."""


def _compressed(p: Problem, use: PartSettings) -> tuple[Tensors, Timed]:
    def timed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return nsa.compressed_attention(q, k, v, use.config, backend=use.backend)[0]

    return (p.q, *_compressed_pair(p)), timed


def _scores(p: Problem, use: PartSettings) -> tuple[Tensors, Timed]:
    k, v = _compressed_pair(p)
    _, lse = nsa.compressed_attention(p.q, k, v, use.config, backend=use.backend)

    def timed(q: Tensor, k: Tensor, lse: Tensor) -> Tensor:
        return nsa.select_blocks(q, k, use.config, lse=lse, backend=use.backend)

    return (p.q, k, lse), timed


def _selected(p: Problem, use: PartSettings) -> tuple[Tensors, Timed]:
    def timed(q: Tensor, k: Tensor, v: Tensor, blocks: Tensor) -> Tensor:
        return nsa.selected_attention(q, k, v, blocks, use.config, backend=use.backend)[0]

    return (p.q, p.k, p.v, _blocks(p, use)), timed


def _window(p: Problem, use: PartSettings) -> tuple[Tensors, Timed]:
    def timed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return nsa.window_attention(q, k, v, use.config, backend=use.backend)[0]

    return (p.q, p.k, p.v), timed


def _gated_sum(p: Problem, use: PartSettings) -> tuple[Tensors, Timed]:
    branches = (part(p, use) for part in (_compressed, _selected, _window))

    def timed(compressed: Tensor, selected: Tensor, window: Tensor, gates: Tensor) -> Tensor:
        return nsa.combine((compressed, selected, window), gates, backend=use.backend)

    return (*(branch(*reads) for reads, branch in branches), p.gates), timed


def _blocks(p: Problem, use: PartSettings) -> Tensor:
    if use.given is not None:
        return use.given
    return nsa.select_blocks(p.q, _compressed_pair(p)[0], use.config, backend=use.backend)


def _compressed_pair(p: Problem) -> tuple[Tensor, Tensor]:
    assert p.k_compressed is not None
    assert p.v_compressed is not None
    return p.k_compressed, p.v_compressed


@dataclass(frozen=True)
class Part:
    """One part, and the branch that its output belongs to."""

    make: Callable[[Problem, PartSettings], tuple[Tensors, Timed]]
    """(what the timed call reads, computed beforehand; the call)."""
    branch: int | None
    """0 compressed, 1 selected, 2 window; None for the sum of all three."""


PARTS = {
    "part-compressed": Part(_compressed, 0),
    "part-scores": Part(_scores, 1),
    "part-selected": Part(_selected, 1),
    "part-window": Part(_window, 2),
    "part-gated-sum": Part(_gated_sum, None),
}
SELECTING = ("part-scores", "part-selected")
"""What takes other times for other choices; the others read the same whatever is chosen."""


def prepare(key: Key, device: str) -> Work:
    """The work of a key whose mode is one of PARTS."""
    assert key.config is not None
    assert key.backend_asked is not None
    use = PartSettings(NSAConfig.from_mapping(key.config), key.backend_asked)
    with torch.no_grad():
        problem, use = _draw(key, use, device)
        reads, timed = PARTS[key.mode].make(problem, use)
        return _work(key, use, problem, reads, timed)


def _draw(key: Key, use: PartSettings, device: str, seed: int = 0) -> tuple[Problem, PartSettings]:
    """Inputs with their compressed keys, and the settings with the blocks that are replayed; the gates of the branches
    that the part does not compute are 0."""
    if key.inputs == replayed.KIND:
        use = dataclasses.replace(use, given=replayed.block_indices(key, device, seed))
    problem = inputs.with_compressed(inputs.draw(key, device, seed), use.config)
    branch = PARTS[key.mode].branch
    if branch is None:
        return problem, use
    one = torch.zeros_like(problem.gates)
    one[..., branch] = 1
    return dataclasses.replace(problem, gates=one), use


def _work(key: Key, use: PartSettings, problem: Problem, reads: Tensors, timed: Timed) -> Work:
    def call() -> Tensors:
        with torch.no_grad():
            return (timed(*reads),)

    def check(seed: int) -> Correctness:
        picked = oracle.sample_rows(problem, use.config, NSA_ROWS, seed)
        answer, aux = _answer(use, problem, call()[0])
        return verify.compare_nsa(problem, use.config, answer, aux, picked, given=use.given is not None)

    @torch.no_grad()
    def redraw(seed: int) -> tuple[Problem, PartSettings]:
        fresh, other = _draw(key, use, problem.q.device.type, seed)
        for old, new in zip(reads, PARTS[key.mode].make(fresh, other)[0], strict=True):
            old.copy_(new)
        return fresh, other

    def recheck(call: Call, seed: int, rows_share: float = 1.0) -> Correctness:
        anti_cheat.poison(call())
        fresh, other = redraw(seed)
        (out,) = anti_cheat.as_read_by_this_stream(call())
        answer, aux = _answer(other, fresh, out)
        picked, given = oracle.random_rows(fresh, FRESH_ROWS, seed), other.given is not None
        correctness = verify.compare_nsa(fresh, use.config, answer, aux, picked, given=given)
        rows = all_rows.rows_to_compare(fresh, use.config, seed, backward=False, share=rows_share)
        compared = all_rows.compare_nsa(fresh, use.config, answer, aux.block_indices, rows, given=given)
        return verify.with_comparison(correctness, seed, compared.rows, compared.checks)

    minimum = roofline.of(key)
    return Work(
        check,
        call,
        key.batch * key.num_queries,
        minimum.flops,
        minimum.bytes_moved,
        inputs={f"input {i}": x for i, x in enumerate(reads)},
        recheck=recheck,
        redraw=redraw,
        copy=lambda: _work(key, use, problem, tuple(x.clone() for x in reads), timed),
    )


@torch.no_grad()
def _answer(use: PartSettings, problem: Problem, out: Tensor) -> tuple[Answer, Aux]:
    """A part's output as NSA's; of block indices, the blocks and what attention over them gives."""
    are_blocks = not out.is_floating_point()
    blocks = out if are_blocks else _blocks(problem, use)
    o = out
    if are_blocks:
        o, _ = nsa.selected_attention(problem.q, problem.k, problem.v, out, use.config, backend=use.backend)
    ran, _ = backends.choose(use.backend, problem.q, problem.v)
    return Answer(o), Aux(blocks, {}, {}, ran)
