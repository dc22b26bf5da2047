"""The rows of the benches' oracle are those of the reference run whole, and its scores choose the same blocks."""

from __future__ import annotations

import pytest
import torch

from benchmarks.cases import inputs
from benchmarks.cases.inputs import Problem
from benchmarks.correctness import oracle
from benchmarks.correctness.oracle import QueryRow
from nsa import compress, nsa_attention, select_blocks
from nsa.geometry import is_forced
from tests.benchmarks.synthetic import CONFIG, key

ROWS = [QueryRow(b, t) for b in (0, 1) for t in (0, 3, 4, 7, 8, 31, 32, 45)]


@pytest.fixture
def problem() -> Problem:
    drawn = inputs.draw(key(length=46, batch=2), "cpu")
    return oracle.compressed(drawn, torch.float64, CONFIG)


def test_block_means_are_phi(problem: Problem) -> None:
    torch.testing.assert_close(inputs.block_means(problem.k, CONFIG), compress(problem.k, CONFIG, backend="reference"))
    assert inputs.block_means(problem.k[:, :3], CONFIG).shape[1] == 0


def test_rows_are_those_of_the_whole(problem: Problem) -> None:
    whole, aux = nsa_attention(
        problem.q, problem.k, problem.v, problem.gates, CONFIG, backend="reference", return_aux=True
    )
    for attend in (oracle.nsa_row, oracle.pytorch_nsa_row):
        for row in ROWS:
            x, blocks = oracle.prefix(problem, row, CONFIG), oracle.own_blocks(aux.block_indices, row)
            torch.testing.assert_close(attend(x, blocks, CONFIG)[0, 0], whole[row.batch, row.query])


def test_dense_rows_are_causal_attention(problem: Problem) -> None:
    q, k, v = (x.transpose(1, 2) for x in (problem.q, problem.k, problem.v))
    whole = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)
    for attend in (oracle.dense_row, oracle.pytorch_dense_row):
        for row in ROWS:
            torch.testing.assert_close(attend(oracle.prefix(problem, row, CONFIG))[0, 0], whole[row.batch, row.query])


def test_the_best_scores_are_the_blocks_that_the_reference_selects(problem: Problem) -> None:
    assert problem.k_compressed is not None
    selected = select_blocks(problem.q, problem.k_compressed, CONFIG, backend="reference")
    for row in ROWS:
        scores = oracle.block_scores(oracle.prefix(problem, row, CONFIG), CONFIG)
        current = row.query // CONFIG.l_sel
        scores[:, [j for j in range(current + 1) if is_forced(j, current, CONFIG)]] = torch.inf
        best = scores.topk(min(CONFIG.n_sel, current + 1)).indices.sort(-1).values
        assert selected[row.batch, row.query, :, : best.shape[-1]].tolist() == best.tolist()


def test_gradients_are_those_of_the_whole(problem: Problem) -> None:
    source = Problem(*(x.detach().requires_grad_() for x in (problem.q, problem.k, problem.v, problem.gates)))
    o, aux = nsa_attention(source.q, source.k, source.v, source.gates, CONFIG, backend="reference", return_aux=True)
    d_o = torch.zeros_like(o)
    for row in ROWS:
        d_o[row.batch, row.query] = torch.randn(o.shape[2:], dtype=o.dtype)
    whole = torch.autograd.grad(o, (source.q, source.k, source.v, source.gates), d_o)
    d_rows = [d_o[row.batch, row.query][None, None] for row in ROWS]
    found = oracle.nsa_gradients(problem, aux.block_indices, ROWS, d_rows, CONFIG, oracle.nsa_row)
    assert list(found) == ["dq", "dk", "dv", "dgates"]
    for gradient, wanted in zip(found.values(), whole, strict=True):
        torch.testing.assert_close(gradient, wanted)


def test_sampled_rows_hold_the_ends_and_the_boundaries(problem: Problem) -> None:
    rows = oracle.sample_rows(problem, CONFIG, 24)
    assert len(rows) == len(set(rows)) == 24
    assert {(row.batch, row.query) for row in rows} >= {
        (0, 0),
        (1, 45),
        (0, 3),
        (1, 4),
        (0, 7),
        (1, 8),
        (0, 31),
        (1, 32),
    }
    assert len(oracle.sample_rows(problem, CONFIG, 1000)) == 92
