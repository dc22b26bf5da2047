"""Batch rows, key/value groups and packed documents do not know of one another."""

from __future__ import annotations

from dataclasses import replace

import torch

from nsa import NSAConfig
from tests.laws import oracle
from tests.laws.budget import agree, output_unit
from tests.laws.cases import Case, cases
from tests.laws.parts import Parts, branch_law, law

PLAIN = cases(packed=False, least_keys=1)
PACKED = cases(least_keys=1).filter(lambda case: case.documents is not None)


@branch_law(PLAIN)
def test_batch_rows_are_independent(parts: Parts, case: Case, branch: str) -> None:
    """Other numbers in row 1 leave row 0 bitwise as it was, in value and gradient."""
    case = replace(case, batch=2)
    x = case.inputs(parts.device)
    other = x.with_floats(tuple(torch.cat([a[:1], case.noise(a[1:])]) for a in x.floats()))
    o = parts.forward(case, x, branch)
    assert torch.equal(o[:1], parts.forward(case, other, branch)[:1])
    upstream = case.noise(o)
    for a, b in zip(*(parts.gradients(case, y, branch, upstream) for y in (x, other)), strict=True):
        assert torch.equal(a[:1], b[:1])


@branch_law(PLAIN)
def test_batch_is_its_rows_one_by_one(parts: Parts, case: Case, branch: str) -> None:
    """A row alone chooses the same blocks and gives the same output as in a batch."""
    case = replace(case, batch=2)
    x, alone = case.inputs(parts.device), replace(case, batch=1)
    block_indices = parts.select(case, x)
    o, (pytorch, truth) = parts.forward(case, x, branch), oracle.pytorch_and_truth(case, x, branch, block_indices)
    for i in range(2):
        row = x.with_floats(tuple(a[i : i + 1] for a in x.floats()))
        assert torch.equal(parts.select(alone, row), block_indices[i : i + 1])
        here = slice(i, i + 1)
        again = parts.forward(alone, row, branch)
        agree(f"row {i}", again, o[here], pytorch[here], truth[here], unit=output_unit(x))


@branch_law(PLAIN)
def test_groups_are_independent(parts: Parts, case: Case, branch: str) -> None:
    """Other numbers in one key/value head and its queries leave the other groups bitwise as they were."""
    case = replace(case, num_kv_heads=2)
    x = case.inputs(parts.device)
    heads = (case.group, 1, 1, case.group)
    other = x.with_floats(
        tuple(torch.cat([a[:, :, :n], case.noise(a[:, :, n:])], 2) for a, n in zip(x.floats(), heads, strict=True))
    )
    before, after = parts.forward(case, x, branch), parts.forward(case, other, branch)
    assert torch.equal(before[:, :, : case.group], after[:, :, : case.group])
    assert torch.equal(parts.select(case, x)[:, :, 0], parts.select(case, other)[:, :, 0])


@branch_law(PACKED)
def test_documents_are_independent(parts: Parts, case: Case, branch: str) -> None:
    """Other numbers, or NaN, in one document leave the others bitwise as they were, in value and gradient."""
    x, bounds = case.inputs(parts.device), case.bounds
    i = case.seed % (len(bounds) - 1)
    inside = torch.zeros(case.keys, dtype=torch.bool, device=parts.device)
    inside[bounds[i] : bounds[i + 1]] = True
    o = parts.forward(case, x, branch)
    upstream = case.noise(o)
    grads = parts.gradients(case, x, branch, upstream)
    for new in (torch.nan, 3.0):
        other = x.with_floats(
            tuple(torch.where(inside[None, :, None, None], case.noise(a) * new, a) for a in x.floats())
        )
        assert torch.equal(o[:, ~inside], parts.forward(case, other, branch)[:, ~inside])
        for a, b in zip(grads, parts.gradients(case, other, branch, upstream), strict=True):
            assert torch.equal(a[:, ~inside], b[:, ~inside])


def test_a_document_without_blocks_does_not_reach_the_blocks_before_it(parts: Parts) -> None:
    """Its NaN queries share a tile with those of the document before it, and see no block at all."""
    config = NSAConfig(l=12, d=3, l_sel=12, n_sel=2, w=5, init_blocks=1, local_blocks=1)
    case = Case(config, 1, 3, 1, 16, 16, 47, 47, documents=(3, 24, 13, 7), seed=3)  # the seed names the last document
    test_documents_are_independent.check(parts, case, "compressed")


@branch_law(PACKED)
def test_packed_documents_are_the_documents_one_by_one(parts: Parts, case: Case, branch: str) -> None:
    """The block grid, the window and the forced blocks start again in each document; 0 and 1 token are legal."""
    x = case.inputs(parts.device)
    block_indices = parts.select(case, x)
    o, (pytorch, truth) = parts.forward(case, x, branch), oracle.pytorch_and_truth(case, x, branch, block_indices)
    for start, end in zip(case.bounds[:-1], case.bounds[1:], strict=True):
        alone = replace(case, documents=None, queries=end - start, keys=end - start)
        one = x.with_floats(tuple(a[:, start:end] for a in x.floats()))._replace(cu_seqlens=None)
        assert torch.equal(parts.select(alone, one), block_indices[:, start:end])
        here = slice(start, end)
        again = parts.forward(alone, one, branch)
        agree(f"{start}:{end}", again, o[:, here], pytorch[:, here], truth[:, here], unit=output_unit(x))


@law(PACKED)
def test_one_document_is_no_packing(parts: Parts, case: Case) -> None:
    """cu_seqlens = [0, S] changes nothing."""
    single = replace(case, documents=(case.keys,))
    x = single.inputs(parts.device)
    assert torch.equal(
        parts.select(single, x), parts.select(replace(single, documents=None), x._replace(cu_seqlens=None))
    )
