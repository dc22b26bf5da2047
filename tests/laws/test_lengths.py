"""The same text in pieces: a prefix, the last queries, one token at a time."""

from __future__ import annotations

from dataclasses import replace

import torch

from tests.laws import oracle
from tests.laws.budget import agree, output_unit
from tests.laws.cases import Case, Inputs, cases
from tests.laws.parts import Parts, branch_law

PLAIN = cases(packed=False, fewer_queries=False, least_keys=1)


def _piece(case: Case, x: Inputs, first: int, end: int) -> tuple[Case, Inputs]:
    """The queries first <= i < end of a call, over the keys up to the last of them."""
    q, k, v, gates = x.floats()
    piece = x.with_floats((q[:, first:end], k[:, :end], v[:, :end], gates[:, first:end]))
    return replace(case, queries=end - first, keys=end), piece


def agrees_with_the_whole_call(parts: Parts, case: Case, branch: str, spans: list[tuple[int, int]]) -> None:
    """Each piece chooses the blocks and gives the rows that the whole call does."""
    x = case.inputs(parts.device)
    block_indices = parts.select(case, x)
    o, (pytorch, truth) = parts.forward(case, x, branch), oracle.pytorch_and_truth(case, x, branch, block_indices)
    for first, end in spans:
        piece, y = _piece(case, x, first, end)
        rows = slice(first, end)
        assert torch.equal(parts.select(piece, y), block_indices[:, rows]), f"blocks of {first}:{end}"
        again = parts.forward(piece, y, branch)
        agree(f"rows {first}:{end}", again, o[:, rows], pytorch[:, rows], truth[:, rows], unit=output_unit(x))


@branch_law(PLAIN)
def test_prefix_is_the_prefix(parts: Parts, case: Case, branch: str) -> None:
    """f(x[:s]) = f(x)[:s], nothing at all included."""
    agrees_with_the_whole_call(parts, case, branch, [(0, case.cut), (0, 0)])


@branch_law(PLAIN)
def test_fewer_queries_are_the_last_rows(parts: Parts, case: Case, branch: str) -> None:
    """The queries are aligned with the last keys: a chunk of a prefill, and no query at all."""
    agrees_with_the_whole_call(parts, case, branch, [(case.cut, case.keys), (case.keys, case.keys)])


@branch_law(cases(packed=False, fewer_queries=False, least_keys=1).map(lambda case: case.prefix(min(case.keys, 24))))
def test_batched_is_one_token_at_a_time(parts: Parts, case: Case, branch: str) -> None:
    """One query over many keys sees all of them, not the first one only."""
    tokens = range(case.keys)[-4:] if parts.interpreted else range(case.keys)
    agrees_with_the_whole_call(parts, case, branch, [(t, t + 1) for t in tokens])
