"""Edges of a call that laws draw seldom or never: nothing to attend from, odd scales, second gradients, bad tokens."""

from __future__ import annotations

import pytest
import torch

import nsa
from nsa.model import next_token_loss

CONFIG = nsa.NSAConfig(l=4, d=2, l_sel=8, n_sel=4, w=6)


@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_no_batch_rows_give_none(backend: str) -> None:
    q, k = torch.randn(0, 12, 4, 8, requires_grad=True), torch.randn(0, 12, 2, 8)
    o = nsa.nsa_attention(q, k, k, torch.rand(0, 12, 4, 3), CONFIG, backend=backend)
    o.sum().backward()
    assert o.shape == (0, 12, 4, 8)
    assert q.grad is not None


def test_no_queries_give_zero_gradients(backend: str, device: torch.device) -> None:
    q, k, v = (torch.randn(1, s, h, 16, device=device, requires_grad=True) for s, h in ((0, 4), (9, 2), (9, 2)))
    none = torch.empty(1, 0, 2, CONFIG.n_sel, dtype=torch.int32, device=device)
    for o, _ in (
        nsa.compressed_attention(q, k, v, CONFIG, 20, backend=backend),
        nsa.selected_attention(q, k, v, none, CONFIG, backend=backend),
        nsa.window_attention(q, k, v, CONFIG, backend=backend),
    ):
        assert o.shape == (1, 0, 4, 16)
        for x, gradient in zip((q, k, v), torch.autograd.grad(o.sum(), (q, k, v)), strict=True):
            assert torch.equal(gradient, torch.zeros_like(x))


@pytest.mark.parametrize("scale", [-0.35, 0.0, 1e-46])
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_scale_may_be_negative_or_zero(backend: str, scale: float, device: torch.device) -> None:
    pytest.importorskip("triton")
    generator = torch.Generator().manual_seed(0)
    q, k = (3 * torch.randn(1, 40, heads, 8, generator=generator) for heads in (4, 2))
    k_cmp = nsa.compress(k, CONFIG)
    wanted = nsa.select_blocks(q, k_cmp, CONFIG, scale=scale, backend="reference")
    found = nsa.select_blocks(q.to(device), k_cmp.to(device), CONFIG, scale=scale, backend=backend)
    assert torch.equal(found.cpu(), wanted)  # on a GPU the reference itself breaks the ties of scale 0


def test_loss_names_an_unknown_token() -> None:
    with pytest.raises(ValueError, match="tokens must be between 0 and 9; got 12"):
        next_token_loss(torch.randn(1, 3, 10), torch.tensor([[1, 12, 3]]))


def test_cache_commits_only_what_fits() -> None:
    layer = nsa.NativeSparseAttention(16, 2, 1, 8, 8, CONFIG)
    cache = nsa.KVCache(layer, batch_size=1, max_tokens=5)
    for tokens in (6, -1):
        with pytest.raises(ValueError, match="num_tokens must be between 0 and 5"):
            cache.commit(tokens)
    assert len(cache) == 0
