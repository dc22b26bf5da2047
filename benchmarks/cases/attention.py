"""Prefill (forward, forward + backward) and decode, for NSA and for dense attention."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks import gate, inputs
from benchmarks.baselines import sdpa
from benchmarks.cases import NSA, Work
from benchmarks.inputs import Problem
from benchmarks.records import Gate, Key
from nsa import Aux, NSAConfig, nsa_attention

NSA_ROWS = 24
"""Query rows of NSA that meet the oracle; fewer for a baseline, which has no selection to go wrong."""
DENSE_ROWS = 8

Forward = Callable[[Problem], Tensor]


def prepare(key: Key, device: str) -> Work:
    """The work of a key whose mode is prefill-*, decode, or memory (which is a prefill forward + backward)."""
    problem = inputs.draw(key, device)
    backward = key.mode in ("prefill-forward-backward", "memory")
    if key.implementation == NSA:
        assert key.config is not None
        config = NSAConfig.from_mapping(key.config)
        if key.mode == "decode":  # the cache holds the compressed keys and values already
            problem = inputs.with_compressed(problem, config)
        forward, check = _nsa(key, config, problem, backward)
    else:
        forward, check = _dense(key, problem, backward)
    wanted = ("q", "k", "v", "gates") if key.implementation == NSA else ("q", "k", "v")
    call = _forward_backward(problem, wanted, forward) if backward else _forward_only(problem, forward)
    return Work(check, call, key.batch * key.num_queries)


def _nsa(key: Key, config: NSAConfig, problem: Problem, backward: bool) -> tuple[Forward, Callable[[], Gate]]:
    assert key.backend_asked is not None
    backend = key.backend_asked

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

    return forward, lambda: gate.check_nsa(problem, config, with_aux, rows=NSA_ROWS, backward=backward)


def _dense(key: Key, problem: Problem, backward: bool) -> tuple[Forward, Callable[[], Gate]]:
    name = key.implementation

    def forward(p: Problem) -> Tensor:
        return sdpa.attend(p, name)

    def check() -> Gate:
        sdpa.require(problem, name)
        return gate.check_dense(problem, forward, name, rows=DENSE_ROWS, backward=backward)

    return forward, check


def _forward_only(problem: Problem, forward: Forward) -> Callable[[], tuple[Tensor, ...]]:
    def call() -> tuple[Tensor, ...]:
        with torch.no_grad():
            return (forward(problem),)

    return call


def _forward_backward(problem: Problem, wanted: tuple[str, ...], forward: Forward) -> Callable[[], tuple[Tensor, ...]]:
    leaves = problem.map(lambda x: x.detach().requires_grad_())
    d_o = torch.randn(*problem.q.shape[:3], problem.v.shape[3], dtype=problem.q.dtype, device=problem.q.device)

    def call() -> tuple[Tensor, ...]:
        o = forward(leaves)
        return o, *torch.autograd.grad(o, [leaves.tensors[name] for name in wanted], d_o)

    return call
