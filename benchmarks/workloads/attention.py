"""Prefill (forward, forward + backward) and decode, for NSA and for what it is compared with."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.baselines import BASELINES, Baseline, UnsupportedError, find, require_kernel
from benchmarks.cases import inputs
from benchmarks.cases.inputs import Problem
from benchmarks.cases.key import HOST, NSA, Key
from benchmarks.cases.outcome import Correctness, OracleCheck
from benchmarks.cases.recorded import DECODE_STEPS
from benchmarks.cases.work import Call, Work
from benchmarks.correctness import all_rows, anti_cheat, laws, oracle, verify
from benchmarks.correctness.all_rows import RowComparison
from benchmarks.correctness.oracle import QueryRow
from benchmarks.correctness.verify import Answer
from benchmarks.workloads import roofline
from nsa import Aux, NSAConfig, nsa_attention

NSA_ROWS = 24
"""Query rows of NSA that meet the oracle; fewer for a baseline, which has no selection to go wrong."""
DENSE_ROWS = 8
FRESH_ROWS = 8
"""Query rows that meet it again on other inputs, after the last sample."""


@dataclass(frozen=True)
class Implementation:
    """One implementation: how it is called, and how its answers are compared."""

    forward: Callable[[Problem], Tensor]
    differentiated: tuple[str, ...]
    """The inputs that it has gradients of."""
    config: NSAConfig | None
    """None for dense attention."""
    check: Callable[[Problem, bool, int], Correctness]
    """Runs it, on the inputs that are timed, with the backward pass or without, on rows that the seed draws."""
    chosen: Callable[[Problem], Aux | None]
    """The blocks that it selects, which the timed call does not return; None for dense attention."""
    compare: Callable[[Problem, Answer, Aux | None, Sequence[QueryRow]], Correctness]
    """Compares these rows of what the timed call returned with the oracle."""
    compare_all: Callable[[Problem, Answer, Aux | None, Tensor], RowComparison]
    """Compares these rows [R], all or some of each tile, with the second implementation."""
    refusals: Callable[[], AbstractContextManager[None]] = nullcontext


def prepare(key: Key, device: str) -> Work:
    """The work of a key whose mode is prefill-*, decode, or memory (which is a prefill forward + backward)."""
    implementation, problem = _implementation(key, device), _problem(key, device)
    work = _work(key, implementation, problem)
    if key.mode != "decode" or key.inputs == "random":
        return work
    return dataclasses.replace(work, following=lambda: _following(key, implementation, problem))


def _following(key: Key, implementation: Implementation, problem: Problem) -> list[Work]:
    """The decode steps after the first, on its keys: what a warm measurement goes through, over and over."""
    works = []
    for step in range(1, DECODE_STEPS):
        other = inputs.draw(key, problem.q.device.type, step=step)
        of_step = dataclasses.replace(problem, q=other.q, gates=other.gates)
        works.append(_work(key, implementation, of_step, step))
    return works


def _implementation(key: Key, device: str) -> Implementation:
    if key.implementation == NSA:
        return _nsa(key)
    baseline = find(key.implementation)
    implementation = _dense(baseline) if baseline.config is None else _other_nsa(baseline, baseline.config)
    return implementation if baseline.name in BASELINES else _after_laws(implementation, baseline, key, device)


def _after_laws(implementation: Implementation, contender: Baseline, key: Key, device: str) -> Implementation:
    """A contender, once it has obeyed the laws; its comparison with the oracle then holds theirs too."""
    passed: tuple[OracleCheck, ...] = ()
    with suppress(UnsupportedError), implementation.refusals():  # what it refuses at that size it may still serve here
        passed = laws.check(contender.attend, key, device, serves=lambda one: contender.not_served(one) is None)

    def check(p: Problem, backward: bool, seed: int) -> Correctness:
        found = implementation.check(p, backward, seed)
        return dataclasses.replace(found, checks=(*passed, *found.checks))

    return dataclasses.replace(implementation, check=check)


def _problem(key: Key, device: str, seed: int = 0, step: int = 0) -> Problem:
    problem = inputs.draw(key, device, seed, step)
    if key.config is not None and key.mode == "decode":  # the cache holds the compressed keys and values already
        return inputs.with_compressed(problem, _config(key))
    return problem


def _config(key: Key) -> NSAConfig:
    assert key.config is not None
    return NSAConfig.from_mapping(key.config)


def _nsa(key: Key) -> Implementation:
    config, backend = _config(key), key.backend_asked
    assert backend is not None

    def forward(p: Problem) -> Tensor:
        return nsa_attention(
            p.q, p.k, p.v, p.gates, config, k_compressed=p.k_compressed, v_compressed=p.v_compressed, backend=backend
        )

    def with_aux(p: Problem) -> tuple[Tensor, Aux]:
        return nsa_attention(
            p.q,
            p.k,
            p.v,
            p.gates,
            config,
            k_compressed=p.k_compressed,
            v_compressed=p.v_compressed,
            backend=backend,
            return_aux=True,
        )

    return _sparse(config, forward, with_aux)


def _other_nsa(baseline: Baseline, config: NSAConfig) -> Implementation:
    def with_aux(p: Problem) -> tuple[Tensor, Aux]:
        assert baseline.block_indices is not None
        with torch.no_grad():
            blocks = baseline.block_indices(p)
        return baseline.attend(p), Aux(blocks, {}, {}, baseline.name)

    return _sparse(config, baseline.attend, with_aux, lambda: baseline.refusals(baseline.name))


def _sparse(
    config: NSAConfig,
    forward: Callable[[Problem], Tensor],
    with_aux: Callable[[Problem], tuple[Tensor, Aux]],
    refusals: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Implementation:
    def check(p: Problem, backward: bool, seed: int) -> Correctness:
        return verify.check_nsa(p, config, with_aux, rows=NSA_ROWS, backward=backward, seed=seed)

    def chosen(p: Problem) -> Aux:
        with torch.no_grad():
            return with_aux(p)[1]

    def compare(p: Problem, answer: Answer, aux: Aux | None, picked: Sequence[QueryRow]) -> Correctness:
        assert aux is not None
        return verify.compare_nsa(p, config, answer, aux, picked)

    def compare_all(p: Problem, answer: Answer, aux: Aux | None, rows: Tensor) -> RowComparison:
        assert aux is not None
        return all_rows.compare_nsa(p, config, answer, aux.block_indices, rows)

    return Implementation(forward, verify.NSA_INPUTS, config, check, chosen, compare, compare_all, refusals)


def _dense(baseline: Baseline) -> Implementation:
    name = baseline.name

    def check(p: Problem, backward: bool, seed: int) -> Correctness:
        require_kernel(baseline, p)
        return verify.check_dense(p, baseline.attend, name, rows=DENSE_ROWS, backward=backward, seed=seed)

    def compare(p: Problem, answer: Answer, _: Aux | None, picked: Sequence[QueryRow]) -> Correctness:
        return verify.compare_dense(p, answer, name, picked)

    def compare_all(p: Problem, answer: Answer, _: Aux | None, rows: Tensor) -> RowComparison:
        return all_rows.compare_dense(p, answer, rows)

    refusals = lambda: baseline.refusals(name)  # noqa: E731 - as in _other_nsa
    return Implementation(
        baseline.attend, verify.DENSE_INPUTS, None, check, lambda _: None, compare, compare_all, refusals
    )


def _work(key: Key, implementation: Implementation, problem: Problem, step: int = 0) -> Work:
    backward = key.mode.removeprefix(HOST) in ("prefill-forward-backward", "memory")
    names = implementation.differentiated if backward else ()
    d_o = _output_gradient(problem) if backward else None

    def redraw(seed: int) -> None:
        _overwrite(problem.tensors, _problem(key, problem.q.device.type, seed, step).tensors)

    def recheck(call: Call, seed: int, rows_share: float = 1.0) -> Correctness:
        picked = oracle.random_rows(problem, FRESH_ROWS, seed)
        before = call()
        if d_o is not None:
            d_o.copy_(verify.sparse_gradient(before[0], picked))
        anti_cheat.poison(before)
        redraw(seed)
        answer, aux = _answer(call, names, d_o), implementation.chosen(problem)
        correctness = implementation.compare(problem, answer, aux, picked)
        queries, sequences = problem.q.shape[1], problem.q.shape[0]
        if len(picked) == queries * sequences:
            return verify.with_comparison(correctness, seed, len(picked))
        rows = all_rows.rows_to_compare(problem, implementation.config, seed, backward=backward, share=rows_share)
        if d_o is not None:
            d_o.copy_(all_rows.output_gradient(answer.o, rows, seed))
            del answer  # as large as the outputs that come now
            answer = _answer(call, names, d_o)
        compared = implementation.compare_all(problem, answer, aux, rows)
        return verify.with_comparison(correctness, seed, compared.rows, compared.checks)

    minimum = None if key.mode.startswith(HOST) else roofline.of(key)  # of the device's time, not of the host's
    return Work(
        lambda seed: implementation.check(problem, backward, seed),
        _call(problem, implementation, names, d_o),
        key.batch * key.num_queries,
        minimum.flops if minimum else None,
        minimum.bytes_moved if minimum else None,
        refusals=implementation.refusals,
        inputs=problem.tensors,
        recheck=recheck,
        redraw=redraw,
        copy=lambda: _work(key, implementation, problem.map(torch.clone), step),
    )


def _answer(call: Call, names: Sequence[str], d_o: Tensor | None) -> Answer:
    o, *gradients = anti_cheat.as_read_by_this_stream(call())
    return Answer(o, d_o, verify.gradients_by_name(names, gradients))


def _call(problem: Problem, implementation: Implementation, names: Sequence[str], d_o: Tensor | None) -> Call:
    if d_o is None:

        def forward() -> tuple[Tensor, ...]:
            with torch.no_grad():
                return (implementation.forward(problem),)

        return forward

    leaves = problem.map(lambda x: x.detach().requires_grad_())
    wanted = [leaves.tensors[name] for name in names]

    def forward_backward() -> tuple[Tensor, ...]:
        o = implementation.forward(leaves)
        return o, *torch.autograd.grad(o, wanted, d_o)

    return forward_backward


def _output_gradient(problem: Problem) -> Tensor:
    return torch.randn(*problem.q.shape[:3], problem.v.shape[3], dtype=problem.q.dtype, device=problem.q.device)


def _overwrite(old: Mapping[str, Tensor], new: Mapping[str, Tensor]) -> None:
    for name, x in old.items():
        x.copy_(new[name])
