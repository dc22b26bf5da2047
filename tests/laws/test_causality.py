"""No row depends on a later token, in value or in gradient, whatever stands there."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from tests.laws.cases import Case, cases
from tests.laws.parts import Parts, branch_law

NONEMPTY = cases(least_keys=1)


def _rows_before(case: Case, token: int) -> int:
    """Queries that stand before a token."""
    return max(token - case.offset, 0)


def _replaced_from(x: Tensor, first: int, new: Tensor | float) -> Tensor:
    """x [B, tokens, …] with everything from token `first` on replaced."""
    later = torch.arange(x.shape[1], device=x.device) >= first
    return torch.where(later.view(1, -1, *[1] * (x.dim() - 2)), new, x)


@branch_law(NONEMPTY)
def test_past_ignores_a_changed_future(parts: Parts, case: Case, branch: str) -> None:
    """Other tokens from `cut` on leave the rows before it bitwise as they were."""
    x, rows = case.inputs(parts.device), _rows_before(case, case.cut)
    changed = x.with_floats(
        tuple(
            _replaced_from(a, first, case.noise(a) * 3)
            for a, first in zip(x.floats(), (rows, case.cut, case.cut, rows), strict=True)
        )
    )
    before, after = parts.forward(case, x, branch), parts.forward(case, changed, branch)
    assert torch.equal(before[:, :rows], after[:, :rows])


@branch_law(NONEMPTY)
def test_past_ignores_a_future_that_is_not_finite(parts: Parts, case: Case, branch: str) -> None:
    """NaN in token `cut` and infinities after it leave the rows before it finite and bitwise as they were."""
    x, rows = case.inputs(parts.device), _rows_before(case, case.cut)
    broken = x.with_floats(
        tuple(
            _replaced_from(_replaced_from(a, first, torch.nan), first + 1, torch.inf)
            for a, first in zip(x.floats(), (rows, case.cut, case.cut, rows), strict=True)
        )
    )
    before, after = parts.forward(case, x, branch), parts.forward(case, broken, branch)
    assert after[:, :rows].isfinite().all()
    assert torch.equal(before[:, :rows], after[:, :rows])


@branch_law(NONEMPTY)
def test_gradient_of_the_past_ignores_the_future(parts: Parts, case: Case, branch: str) -> None:
    """Rows up to a token have exactly no gradient with respect to later tokens."""
    x, rows = case.inputs(parts.device), _rows_before(case, case.cut)
    o = parts.forward(case, x, branch)
    upstream = _replaced_from(case.noise(o), rows, 0.0)
    grads = parts.gradients(case, x, branch, upstream)
    for grad, first in zip(grads, (rows, case.cut, case.cut, rows), strict=True):
        assert torch.equal(grad[:, first:], torch.zeros_like(grad[:, first:]))


@branch_law(NONEMPTY)
def test_nan_gradient_of_a_row_stays_with_the_past(parts: Parts, case: Case, branch: str) -> None:
    """A NaN in the upstream gradient of one row reaches no later token and no other query."""
    x, row = case.inputs(parts.device), _rows_before(case, case.cut)
    upstream = case.noise(parts.forward(case, x, branch))
    broken = upstream.clone()
    broken[:, row : row + 1] = torch.nan
    clean, changed = parts.gradients(case, x, branch, upstream), parts.gradients(case, x, branch, broken)
    after = case.offset + row + 1
    for name, a, b in zip(("k", "v"), clean[1:3], changed[1:3], strict=True):
        assert torch.equal(a[:, after:], b[:, after:]), f"gradient of {name}"
    for name, a, b in zip(("q", "gates"), clean[::3], changed[::3], strict=True):
        others = torch.arange(case.queries, device=parts.device) != row
        assert torch.equal(a[:, others], b[:, others]), f"gradient of {name}"


@branch_law(cases(least_keys=1, fewer_queries=False))
def test_nan_that_a_row_attends_to_shows(parts: Parts, case: Case, branch: str) -> None:
    """A NaN value is not hidden from a row that sees it: the last row of a document sees its own token."""
    x = case.inputs(parts.device)
    documents = pairwise(case.bounds)
    seen = [end - 1 for start, end in documents if _last_row_sees_itself(case, end - start, branch)]
    v = x.v.clone()
    v[:, seen] = torch.nan
    o = parts.forward(case, x._replace(v=v), branch)
    assert o[:, seen].isnan().all()


def _last_row_sees_itself(case: Case, tokens: int, branch: str) -> bool:
    """Whether the last row of a document attends to its own token, in this branch."""
    if branch == "compressed":
        return tokens >= case.config.l and (tokens - case.config.l) % case.config.d == 0
    return tokens > 0 and (branch != "selected" or case.config.local_blocks > 0)
