"""A row that sees no key gives exactly 0, lse −inf, and gradients that are 0, not NaN."""

from __future__ import annotations

from dataclasses import replace

import torch

from nsa import selected_attention
from tests.laws import oracle
from tests.laws.cases import Case, cases
from tests.laws.parts import Parts, law


@law(cases(least_keys=1))
def test_rows_before_the_first_block_are_zero(parts: Parts, case: Case) -> None:
    """Rows that see no compressed block, alone and next to rows that do."""
    x = case.inputs(parts.device)
    empty = ~oracle.compressed_mask(case, parts.device).any(-1)
    o, lse = parts.compressed(case, x)
    assert torch.equal(o[:, empty], torch.zeros_like(o[:, empty]))
    assert (lse[:, empty] == -torch.inf).all()
    assert lse[:, ~empty].isfinite().all()
    dq, dk, dv, _ = parts.gradients(case, x, "compressed", case.noise(o))
    assert torch.equal(dq[:, empty], torch.zeros_like(dq[:, empty]))
    assert all(grad.isfinite().all() for grad in (dq, dk, dv))


@law(cases(least_keys=1))
def test_rows_without_a_chosen_block_are_zero(parts: Parts, case: Case) -> None:
    """Rows whose block_indices are all −1 (here every other row of every other group)."""
    x = case.inputs(parts.device)
    block_indices = parts.select(case, x)
    block_indices[:, ::2, ::2] = -1
    q, k, v = (a.detach().requires_grad_() for a in x.qkv())
    o, lse = selected_attention(q, k, v, block_indices, case.config, cu_seqlens=x.cu_seqlens, backend=parts.backend)
    dq, dk, dv = torch.autograd.grad(o, (q, k, v), case.noise(o))
    empty = (block_indices < 0).all(-1).repeat_interleave(case.group, 2)  # [B, S, Hq]
    assert torch.equal(o[empty], torch.zeros_like(o[empty]))
    assert torch.equal(dq[empty], torch.zeros_like(dq[empty]))
    assert (lse[empty] == -torch.inf).all()
    assert lse[~empty].isfinite().all()
    assert all(grad.isfinite().all() for grad in (dq, dk, dv))


@law(cases(least_keys=1))
def test_text_shorter_than_a_block_has_finite_gradients(parts: Parts, case: Case) -> None:
    """S < l: no compressed block at all, and every gradient of the whole is finite."""
    keys = min(case.keys, case.config.l - 1) or 1
    case = replace(case, keys=keys, queries=keys, documents=None)
    x = case.inputs(parts.device)
    grads = parts.gradients(case, x, "all", case.noise(parts.forward(case, x, "all")))
    assert all(grad.isfinite().all() for grad in grads)
