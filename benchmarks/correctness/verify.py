"""No figure without a green oracle, in the same process: on the inputs that are timed before the first sample, and on
inputs that no call has seen after the last.

A sample of rows, one of every sequence at least, is compared with `oracle`. The gradients are those of Σ o·do with do
zero outside the sampled rows: they are then known exactly from these rows alone, also where they must be zero. After
the last sample the rest of the output is compared too, by `all_rows`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter

import torch
from torch import Tensor

from benchmarks.cases.inputs import Problem
from benchmarks.cases.outcome import Correctness, OracleCheck
from benchmarks.correctness import diagnosis, oracle, tolerance
from benchmarks.correctness.oracle import QueryRow
from nsa import Aux, NSAConfig

NSA_INPUTS = ("q", "k", "v", "gates")
DENSE_INPUTS = ("q", "k", "v")
"""What each has gradients of."""

_COUNTED_AT_ONCE = 2**28  # values of a tensor: PyTorch adds up bools as int64, in eight bytes for each of them
_SEQUENCES_AT_ONCE = 4  # float64 copies of every sequence of a large decode batch would not fit beside the cache


class IncorrectError(Exception):
    """Not what the oracle says, or not honestly come by; `correctness` holds the comparison, where there is one."""

    def __init__(self, reason: str, correctness: Correctness | None = None) -> None:
        self.correctness = correctness
        super().__init__(reason)


class NonFiniteError(Exception):
    """NaN or infinity where every input was finite."""


@dataclass(frozen=True)
class Answer:
    """What an implementation returned for one problem."""

    o: Tensor  # [B, S, Hq, Dv]
    d_o: Tensor | None = None
    """The gradient of the output that was given, zero outside the picked rows; None for a forward pass."""
    gradients: Mapping[str, Tensor] = field(default_factory=dict)
    """What came of it, by name: "dq", ..."""

    def __post_init__(self) -> None:
        require_finite("o", self.o)
        for name, gradient in self.gradients.items():
            require_finite(name, gradient)

    def of(self, part: slice) -> Answer:
        """Its answer for these sequences alone."""
        d_o = None if self.d_o is None else self.d_o[part]
        return Answer(self.o[part], d_o, {name: x[part] for name, x in self.gradients.items()})

    def d_rows(self, picked: Sequence[QueryRow]) -> list[Tensor]:
        """The rows of `d_o`, each [1, 1, Hq, Dv]."""
        assert self.d_o is not None
        return [self.d_o[row.batch, row.query][None, None] for row in picked]


def check_nsa(
    problem: Problem,
    config: NSAConfig,
    attend: Callable[[Problem], tuple[Tensor, Aux]],
    *,
    rows: int,
    backward: bool = False,
    seed: int = 0,
) -> Correctness:
    """Run it, compare blocks, output and, if asked, gradients. Raises IncorrectError or NonFiniteError."""
    problem, picked = _leaves(problem, backward), oracle.sample_rows(problem, config, rows, seed)
    with torch.set_grad_enabled(backward):
        o, aux = attend(problem)
    return compare_nsa(problem, config, _answer(problem, NSA_INPUTS, o, picked, backward), aux, picked)


def check_dense(
    problem: Problem,
    attend: Callable[[Problem], Tensor],
    name: str,
    *,
    rows: int,
    backward: bool = False,
    seed: int = 0,
) -> Correctness:
    """The same for a dense baseline: a wrong one would make every ratio wrong."""
    problem, picked = _leaves(problem, backward), oracle.sample_rows(problem, NSAConfig(), rows, seed)
    with torch.set_grad_enabled(backward):
        o = attend(problem)
    return compare_dense(problem, _answer(problem, DENSE_INPUTS, o, picked, backward), name, picked)


def compare_nsa(
    problem: Problem, config: NSAConfig, answer: Answer, aux: Aux, picked: Sequence[QueryRow], *, given: bool = False
) -> Correctness:
    """Compare an answer with the oracle; `aux` holds the blocks that its forward pass chose, or was `given`, which must
    be a legal choice and need not be the best. Raises IncorrectError."""
    groups = [
        _nsa_checks(problem.map(itemgetter(part)), config, answer.of(part), aux.block_indices[part], rows, given)
        for part, rows in _groups(picked)
    ]
    found = Correctness(len(picked), tuple(tolerance.pooled(groups)), aux.backend)
    try:
        return require_passed(found)
    except IncorrectError as error:
        blocks, gradients = aux.block_indices, answer.gradients
        if cause := diagnosis.cause(problem, config, answer.o, gradients, blocks, picked[:_SEQUENCES_AT_ONCE]):
            raise IncorrectError(f"{error}: {cause}", found) from error
        raise


def compare_dense(problem: Problem, answer: Answer, name: str, picked: Sequence[QueryRow]) -> Correctness:
    """The same for a dense baseline of this name."""
    groups = [_dense_checks(problem.map(itemgetter(part)), answer.of(part), rows) for part, rows in _groups(picked)]
    return require_passed(Correctness(len(picked), tuple(tolerance.pooled(groups)), name))


def _groups(picked: Sequence[QueryRow]) -> Iterator[tuple[slice, list[QueryRow]]]:
    """A few sequences at a time, and their rows, counted from the first of these sequences."""
    for begin in range(0, 1 + max(row.batch for row in picked), _SEQUENCES_AT_ONCE):
        end = begin + _SEQUENCES_AT_ONCE
        rows = [QueryRow(row.batch - begin, row.query) for row in picked if begin <= row.batch < end]
        if rows:
            yield slice(begin, end), rows


def _nsa_checks(
    problem: Problem, config: NSAConfig, answer: Answer, blocks: Tensor, picked: Sequence[QueryRow], given: bool
) -> list[OracleCheck]:
    truth, eager = (oracle.compressed(problem, dtype, config) for dtype in (torch.float64, answer.o.dtype))
    sources = ((truth, oracle.nsa_row), (eager, oracle.pytorch_nsa_row))
    expected = [
        [attend_row(oracle.prefix(x, row, config), oracle.own_blocks(blocks, row), config) for row in picked]
        for x, attend_row in sources
    ]
    checks = [
        tolerance.block_sets(truth, eager, blocks, picked, config, given=given),
        tolerance.outputs(answer.o, picked, *expected),
    ]
    if answer.gradients:
        d_rows = answer.d_rows(picked)
        wanted = [oracle.nsa_gradients(x, blocks, picked, d_rows, config, attend_row) for x, attend_row in sources]
        checks += tolerance.tensors(answer.gradients, *wanted)
    return checks


def _dense_checks(problem: Problem, answer: Answer, picked: Sequence[QueryRow]) -> list[OracleCheck]:
    problem = problem.map(torch.Tensor.detach)
    sources = ((problem.map(torch.Tensor.double), oracle.dense_row), (problem, oracle.pytorch_dense_row))
    expected = [[attend_row(oracle.prefix(x, row, NSAConfig())) for row in picked] for x, attend_row in sources]
    checks = [tolerance.outputs(answer.o, picked, *expected)]
    if answer.gradients:
        d_rows = answer.d_rows(picked)
        wanted = [oracle.dense_gradients(x, picked, d_rows, attend_row) for x, attend_row in sources]
        checks += tolerance.tensors(answer.gradients, *wanted)
    return checks


def joined(before: Correctness, after: Correctness) -> Correctness:
    """What was compared before the first sample and, on other inputs, after the last."""
    fresh = tuple(dataclasses.replace(check, name=f"{check.name}, fresh inputs") for check in after.checks)
    rows = before.rows_checked + after.rows_checked
    return Correctness(rows, before.checks + fresh, before.path, after.seed, after.rows_compared)


def with_comparison(
    before: Correctness, seed: int, rows_compared: int | None, checks: Sequence[OracleCheck] = ()
) -> Correctness:
    """With what else was compared, and the seed that drew it. Raises IncorrectError unless all passed."""
    return require_passed(
        dataclasses.replace(before, checks=(*before.checks, *checks), seed=seed, rows_compared=rows_compared)
    )


def require_finite(name: str, x: Tensor) -> None:
    """Raises NonFiniteError naming what is not finite and how much of it."""
    parts = x.reshape(-1).split(_COUNTED_AT_ONCE)
    bad = sum(int((~part.isfinite()).sum()) for part in parts if not part.isfinite().all())
    if bad:
        raise NonFiniteError(f"{name} holds {bad} values that are not finite, of {x.numel()}")


def require_passed(found: Correctness) -> Correctness:
    """The comparison itself; raises IncorrectError unless every check passed."""
    if found.passed:
        return found
    failed = (
        f"{check.name}: error {'not finite' if check.error is None else f'{check.error:.2e}'}"
        f" > budget {check.budget:.2e}"
        for check in found.checks
        if not check.passed
    )
    drawn_by = "" if found.seed is None else f", seed {found.seed}"
    raise IncorrectError(f"{'; '.join(failed)} ({found.rows_checked} rows against float64{drawn_by})", found)


def _leaves(problem: Problem, backward: bool) -> Problem:
    return problem.map(lambda x: x.detach().requires_grad_(backward))


def sparse_gradient(o: Tensor, rows: Sequence[QueryRow]) -> Tensor:
    """A do like o, zero outside the rows: the gradients that come of it are known from these rows alone.

    Late rows are averages of many values, hence small, and so are their gradients: a do that is larger by as much
    makes every row count.
    """
    generator = torch.Generator(o.device).manual_seed(1)
    d_o = torch.zeros_like(o)
    for row in rows:
        noise = torch.randn(o.shape[2:], generator=generator, device=o.device)
        size = o[row.batch, row.query].detach().float().square().mean().sqrt()
        d_o[row.batch, row.query] = (noise / size).to(o.dtype)
    return d_o


def _answer(problem: Problem, names: Sequence[str], o: Tensor, picked: Sequence[QueryRow], backward: bool) -> Answer:
    if not backward:
        return Answer(o)
    require_finite("o", o)
    d_o = sparse_gradient(o, picked)
    found = torch.autograd.grad(o, [problem.tensors[name] for name in names], d_o)
    return Answer(o, d_o, gradients_by_name(names, found))


def gradients_by_name(names: Sequence[str], found: Sequence[Tensor]) -> dict[str, Tensor]:
    """("q", "k") -> "dq", "dk"."""
    return {f"d{name}": gradient for name, gradient in zip(names, found, strict=True)}
