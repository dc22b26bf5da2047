"""No figure without a green oracle, on the same inputs, in the same process, before the first sample.

A sample of rows is compared with `benchmarks.oracle`. The gradients are those of Σ o·do with do zero outside the
sampled rows: they are then known exactly from these rows alone, also where they must be zero.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from benchmarks import compare, oracle
from benchmarks.inputs import Problem
from benchmarks.oracle import Row
from benchmarks.records import Gate
from nsa import Aux, NSAConfig

_MAX_SEQUENCES = 4  # float64 copies of every sequence of a large decode batch would not fit beside the cache


class IncorrectError(Exception):
    """Further from the oracle than the budget."""

    def __init__(self, gate: Gate) -> None:
        self.gate = gate
        failed = (
            f"{check.name}: error {'not finite' if check.error is None else f'{check.error:.2e}'}"
            f" > budget {check.budget:.2e}"
            for check in gate.checks
            if not check.passed
        )
        super().__init__(f"{'; '.join(failed)} ({gate.rows_checked} rows against float64)")


class NonFiniteError(Exception):
    """NaN or infinity where every input was finite."""


def check_nsa(
    problem: Problem,
    config: NSAConfig,
    attend: Callable[[Problem], tuple[Tensor, Aux]],
    *,
    rows: int,
    backward: bool = False,
) -> Gate:
    """Compare blocks, output and, if asked, gradients. Raises IncorrectError or NonFiniteError."""
    problem, step = _leaves(problem, backward), _stride(problem)
    with torch.set_grad_enabled(backward):
        o, aux = attend(problem)
    finite("o", o)
    sample, blocks = problem.map(lambda x: x[::step]), aux.block_indices[::step]
    picked = oracle.sample_rows(sample, config, rows)
    truth, eager = oracle.compressed(sample, torch.float64, config), oracle.compressed(sample, o.dtype, config)
    sources = ((truth, oracle.nsa_row), (eager, oracle.pytorch_nsa_row))
    expected = [
        [attend_row(oracle.prefix(x, row, config), oracle.own_blocks(blocks, row), config) for row in picked]
        for x, attend_row in sources
    ]
    checks = [
        compare.block_sets(truth, eager, blocks, picked, config),
        compare.outputs(o[::step], picked, *expected),
    ]
    if backward:
        d_o, d_rows = _sparse_gradient(o, picked)
        found = _backward(problem, ("q", "k", "v", "gates"), o, d_o)
        wanted = [oracle.nsa_gradients(x, blocks, picked, d_rows, config, attend_row) for x, attend_row in sources]
        checks += compare.tensors(found, *wanted)
    return green(Gate(len(picked), tuple(checks), aux.backend))


def check_dense(
    problem: Problem, attend: Callable[[Problem], Tensor], name: str, *, rows: int, backward: bool = False
) -> Gate:
    """The same for a dense baseline: a wrong one would make every ratio wrong."""
    problem, step = _leaves(problem, backward), _stride(problem)
    with torch.set_grad_enabled(backward):
        o = attend(problem)
    finite("o", o)
    sample = problem.map(lambda x: x.detach()[::step])
    picked = oracle.sample_rows(sample, NSAConfig(), rows)
    sources = ((sample.map(torch.Tensor.double), oracle.dense_row), (sample, oracle.pytorch_dense_row))
    expected = [[attend_row(oracle.prefix(x, row, NSAConfig())) for row in picked] for x, attend_row in sources]
    checks = [compare.outputs(o[::step], picked, *expected)]
    if backward:
        d_o, d_rows = _sparse_gradient(o, picked)
        found = _backward(problem, ("q", "k", "v"), o, d_o)
        wanted = [oracle.dense_gradients(x, picked, d_rows, attend_row) for x, attend_row in sources]
        checks += compare.tensors(found, *wanted)
    return green(Gate(len(picked), tuple(checks), name))


def finite(name: str, x: Tensor) -> None:
    """Raises NonFiniteError naming what is not finite and how much of it."""
    bad = int((~x.isfinite()).sum())
    if bad:
        raise NonFiniteError(f"{name} holds {bad} values that are not finite, of {x.numel()}")


def green(gate: Gate) -> Gate:
    """The gate itself; raises IncorrectError unless every check passed."""
    if not gate.passed:
        raise IncorrectError(gate)
    return gate


def _leaves(problem: Problem, backward: bool) -> Problem:
    return problem.map(lambda x: x.detach().requires_grad_(backward))


def _stride(problem: Problem) -> int:
    """Every how-many-th sequence is compared."""
    return -(-problem.q.shape[0] // _MAX_SEQUENCES) or 1


def _sparse_gradient(o: Tensor, rows: Sequence[Row]) -> tuple[Tensor, list[Tensor]]:
    """(do like o, zero outside the rows; its rows [1, 1, Hq, Dv]).

    Late rows are averages of many values, hence small, and so are their gradients: a do that is larger by as much
    makes every row count.
    """
    generator = torch.Generator(o.device).manual_seed(1)
    d_o = torch.zeros_like(o)
    for row in rows:
        noise = torch.randn(o.shape[2:], generator=generator, device=o.device)
        size = o[row.batch, row.query].detach().float().square().mean().sqrt()
        d_o[row.batch, row.query] = (noise / size).to(o.dtype)
    return d_o, [d_o[row.batch, row.query][None, None] for row in rows]


def _backward(problem: Problem, names: Sequence[str], o: Tensor, d_o: Tensor) -> dict[str, Tensor]:
    found = torch.autograd.grad(o, [problem.tensors[name] for name in names], d_o)
    gradients = {f"d{name}": gradient for name, gradient in zip(names, found, strict=True)}
    for name, gradient in gradients.items():
        finite(name, gradient)
    return gradients
