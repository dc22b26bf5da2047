"""Parts of a row's keys make the whole again, to the precision of their type."""

from __future__ import annotations

import torch

from nsa.torch_backend.tile import attend, log_sum_exp, partial_weights

EPS = torch.finfo(torch.float32).eps


def test_weights_of_parts_are_as_exact_for_large_scores_as_for_small_ones() -> None:
    """Weights from the parts' lse would be wrong by eps · |lse|, here some 60 times as much."""
    generator = torch.Generator().manual_seed(1)
    m = 100 + torch.rand(1000, 16, generator=generator)
    l = 1 + torch.rand(1000, 16, generator=generator)
    weights, lse = partial_weights(m, l)
    truth = l.double().log() + m.double()
    assert torch.allclose(lse.double(), truth.logsumexp(-1), rtol=2 * EPS, atol=0)
    assert float((weights.double() / truth.softmax(-1) - 1).abs().max()) < 4 * EPS
    from_lse = (log_sum_exp(m, l) - lse[:, None]).exp()
    assert float((from_lse.double() / truth.softmax(-1) - 1).abs().max()) > 30 * EPS, "else this shows nothing"


def test_a_row_that_sees_nothing_in_a_part_or_in_all() -> None:
    q, k, v = torch.ones(1, 2, 4), -100 * torch.ones(1, 3, 4), torch.ones(1, 3, 4)
    visible = torch.tensor([[[False, False, False], [True, False, False]]])
    o = torch.empty(1, 2, 4)
    m, l = attend(q, k, v, visible, o)
    assert m.tolist() == [[-torch.inf, -400.0]]
    assert l.tolist() == [[0.0, 1.0]]
    assert o.tolist() == [[[0.0] * 4, [1.0] * 4]]
    weights, lse = partial_weights(
        torch.tensor([[-torch.inf, -400.0], [-torch.inf] * 2]), torch.tensor([[0.0, 1.0]] * 2)
    )
    assert weights[0].tolist() == [0.0, 1.0]
    assert lse[0] == -400.0
    weights, lse = partial_weights(torch.full((2,), -torch.inf), torch.zeros(2))
    assert weights.tolist() == [0.0, 0.0]
    assert lse == -torch.inf
