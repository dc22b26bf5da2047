"""Outputs, block sets and gradients beside the oracle's, as `OracleCheck`s.

`truth` is in float64, `eager` is PyTorch's own in the dtype that is measured: its error times a factor is the budget.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from benchmarks.cases.inputs import Problem
from benchmarks.cases.outcome import OracleCheck
from benchmarks.correctness import oracle
from benchmarks.correctness.oracle import QueryRow
from nsa import NSAConfig, geometry

FORWARD_FACTOR = 2.0
"""A budget is this many times PyTorch's own error in the same dtype, both against float64."""
BACKWARD_FACTOR = 3.0
"""The same for gradients."""
LEAST_ERROR = 5 * torch.finfo(torch.float32).eps
"""Everyone sums in float32, whatever the dtype; over a few rows PyTorch's own error can be smaller than this by luck.
In 1,200 draws of a float32 CPU suite (8 rows, up to 2,048 tokens) no right row was off by more than nine steps."""


def check(name: str, error: float, budget: float) -> OracleCheck:
    """A `OracleCheck` whose error is None unless it is finite."""
    return OracleCheck(name, error if math.isfinite(error) else None, budget)


def worst(values: Iterable[float]) -> float:
    """The largest, or NaN where one is: Python's `max` passes over a NaN that does not come first."""
    found = list(values)
    return math.nan if any(map(math.isnan, found)) else max(found)


def pooled(groups: Sequence[Sequence[OracleCheck]]) -> list[OracleCheck]:
    """The same checks on several groups of sequences as if on all at once: largest error, largest budget."""
    return [
        check(same[0].name, max(map(_or_infinite, same)), worst(one.budget for one in same))
        for same in zip(*groups, strict=True)
    ]


def outputs(o: Tensor, rows: Sequence[QueryRow], truth: Sequence[Tensor], eager: Sequence[Tensor]) -> OracleCheck:
    """The worst row, each relative to its own size: late rows are averages of many values, hence small."""
    found = [o[row.batch, row.query][None, None].detach() for row in rows]
    error, own = (worst(map(_relative_error, x, truth)) for x in (found, eager))
    return check("o", error, FORWARD_FACTOR * max(own, LEAST_ERROR))


def tensors(found: Mapping[str, Tensor], truth: Mapping[str, Tensor], eager: Mapping[str, Tensor]) -> list[OracleCheck]:
    """Each tensor (a gradient: "dq") as a whole, relative to its size, also where it must be zero."""
    return [
        check(
            name,
            _relative_error(x, truth[name]),
            BACKWARD_FACTOR * _relative_error(eager[name], truth[name]),
        )
        for name, x in found.items()
    ]


def block_sets(
    truth: Problem, eager: Problem, blocks: Tensor, rows: Sequence[QueryRow], config: NSAConfig, *, given: bool = False
) -> OracleCheck:
    """Chosen sets by their float64 scores; two blocks may change places where these are nearer than the budget. What
    was `given` is held to no score, and must be a legal choice."""
    errors, own_errors = [], []
    for row in rows:
        scores, own = (oracle.block_scores(oracle.prefix(x, row, config), config) for x in (truth, eager))
        largest = max(scores.amax().item(), torch.finfo(scores.dtype).tiny)
        own_errors.append((own - scores).abs().amax().item() / largest)
        position = truth.k.shape[1] - truth.q.shape[1] + row.query
        chosen = blocks[row.batch, row.query].tolist()
        deficits = [_deficit(group, taken, position, config) for group, taken in zip(scores, chosen, strict=True)]
        errors += [0.0 if given and math.isfinite(deficit) else deficit / largest for deficit in deficits]
    # a swap takes two scores, each off by what one may be
    return check("block_indices", worst(errors), 2 * FORWARD_FACTOR * worst(own_errors))


def _or_infinite(found: OracleCheck) -> float:
    return math.inf if found.error is None else found.error


def _relative_error(x: Tensor, truth: Tensor) -> float:
    """Euclidean, because the largest error alone can be 0 by luck: a query with one key has no gradient at all."""
    size = torch.linalg.vector_norm(truth).clamp(min=torch.finfo(truth.dtype).tiny)
    return (torch.linalg.vector_norm(x.to(truth.dtype) - truth) / size).item()


def _deficit(scores: Tensor, chosen: Sequence[int], position: int, config: NSAConfig) -> float:
    """By how much the best block left out beats the worst one taken; infinite for what is no legal choice."""
    current = position // config.l_sel
    count = min(config.n_sel, current + 1)
    taken, padding = list(chosen[:count]), list(chosen[count:])
    forced = {j for j in range(current + 1) if geometry.is_forced(j, current, config)}
    ascending = taken == sorted(set(taken)) and all(0 <= j <= current for j in taken)
    if not ascending or not forced <= set(taken) or any(j != -1 for j in padding):
        return math.inf
    free = torch.ones_like(scores, dtype=torch.bool)
    free[list(forced)] = False
    inside = torch.zeros_like(free)
    inside[taken] = True
    if not bool((free & inside).any()) or not bool((free & ~inside).any()):
        return 0.0
    return worst((0.0, (scores[free & ~inside].amax() - scores[free & inside].amin()).item()))
