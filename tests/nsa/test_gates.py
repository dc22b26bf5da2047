"""The gates: their shape, their order and that they are independent of one another."""

from __future__ import annotations

import torch

from nsa.layer import Gates


def test_each_head_and_branch_has_its_own_row_of_weights() -> None:
    gates, x = Gates(4, 3), torch.randn(2, 5, 4)
    assert gates(x).shape == (2, 5, 3, 3)
    with torch.no_grad():
        gates.linear.weight.zero_()
        gates.linear.bias.copy_(torch.arange(9) / 4)
    torch.testing.assert_close(gates(x)[1, 4], (torch.arange(9) / 4).sigmoid().view(3, 3))


def test_gates_do_not_compete() -> None:
    gates, x = Gates(4, 2), torch.randn(1, 3, 4)
    before = gates(x)
    with torch.no_grad():
        gates.linear.bias[0] += 5  # head 0's compressed branch
    after = gates(x)
    assert (after[..., 0, 0] > before[..., 0, 0]).all()
    assert torch.equal(after[..., 1:, :], before[..., 1:, :])
    assert torch.equal(after[..., 0, 1:], before[..., 0, 1:])


def test_extreme_inputs_give_open_and_closed_gates_with_finite_gradients() -> None:
    gates = Gates(1, 1)
    x = torch.tensor([[[1e6], [-1e6]]], requires_grad=True)
    out = gates(x)
    out.sum().backward()
    assert set(out.flatten().tolist()) <= {0.0, 1.0}
    assert x.grad is not None
    assert x.grad.isfinite().all()
