"""Means of blocks, their gradient and the flags beside them, against the specification."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

import nsa
from nsa import reference
from nsa.geometry import Layout

pytest.importorskip("triton")

from nsa.triton_backend import compression
from nsa.triton_backend.places import located

CONFIGS = (
    nsa.NSAConfig(l=8, d=4, l_sel=16, n_sel=3, w=13),
    nsa.NSAConfig(l=9, d=3, l_sel=9, n_sel=3, w=13),
    nsa.NSAConfig(l=5, d=5, l_sel=5, n_sel=3, w=13),
)
DOCUMENTS = (None, (30, 1, 0, 39), (0, 0, 3, 2, 0), (11, 70))


def draw(lengths: tuple[int, ...] | None, device: torch.device, dtype: torch.dtype, batch: int = 1) -> list[Tensor]:
    """k [B, T, 2, 5] and v [B, T, 2, 20]."""
    tokens, generator = 70 if lengths is None else sum(lengths), torch.Generator().manual_seed(0)
    return [torch.randn(batch, tokens, 2, d, generator=generator).to(device, dtype) for d in (5, 20)]


def layout_of(x: Tensor, lengths: tuple[int, ...] | None, config: nsa.NSAConfig) -> Layout:
    documents = None
    if lengths is not None:
        documents = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=x.device)
    return located(Layout(x.shape[1], x.shape[1], config, x.device, documents))


def prepared(k: Tensor, v: Tensor, layout: Layout, first: int = 0) -> tuple[Tensor, ...]:
    made = compression.prepare(k, v, *layout.slot_tokens, layout.config.l, layout.config.d, (k, v), first)
    return tuple(x for x in made if x is not None)


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("lengths", DOCUMENTS, ids=str)
def test_means_and_their_gradient(device: torch.device, lengths: tuple[int, ...] | None, config: nsa.NSAConfig) -> None:
    """Of parts whose sum is the gradient, and with what two other branches give."""
    k, v = draw(lengths, device, torch.float32, batch=1 if lengths else 2)
    layout = layout_of(k, lengths, config)
    k_cmp, v_cmp, *_ = prepared(k, v, layout)
    places = compression.places(layout)
    for x, found in ((k, k_cmp), (v, v_cmp)):
        leaf = x.clone().requires_grad_()
        wanted = reference.compress(leaf, layout) + 0 * leaf.sum()  # of no block at all it knows no leaf
        torch.testing.assert_close(found, wanted)
        parts = torch.randn(3, *found.shape, device=device)
        (true,) = torch.autograd.grad(wanted, leaf, parts.sum(0))
        others = tuple(torch.randn_like(x) for _ in range(2))
        numbers = config.l, config.d, x.dtype
        (alone,) = compression.gradients((parts,), None, x.shape[1], places, *numbers)
        torch.testing.assert_close(alone, true, rtol=1e-5, atol=1e-5)
        added = compression.gradients((parts, parts), (others[0], others[0], others[1], others[1]), x.shape[1], places,
                                      *numbers)  # fmt: skip
        for one in added:
            torch.testing.assert_close(one, true + others[0] + others[1], rtol=1e-5, atol=1e-5)


def test_flags_say_what_is_finite_and_blocks_hold_only_their_tokens(device: torch.device) -> None:
    k, v = draw(None, device, torch.float32)
    k[0, 9, 0, 2], v[0, 33, 1, 7] = torch.nan, -torch.inf
    layout = layout_of(k, None, CONFIGS[0])
    k_cmp, v_cmp, finite, tokens = prepared(k, v, layout, first=5)
    assert torch.equal(finite, k_cmp.isfinite().all(-1) & v_cmp.isfinite().all(-1))
    assert torch.equal(tokens[:, 5:], (k.isfinite().all(-1) & v.isfinite().all(-1))[:, 5:])
    holds = [c * 4 <= 9 < c * 4 + 8 for c in range(layout.num_slots)]
    assert (~k_cmp[0, :, 0].isfinite().all(-1)).tolist() == holds


def test_a_mean_that_overflows_its_type_is_not_finite(device: torch.device) -> None:
    k, v = (torch.full((1, 16, 1, 16), 65504.0, device=device, dtype=torch.float16) for _ in range(2))
    *_, finite, _ = prepared(k, v, layout_of(k, None, CONFIGS[0]))
    assert finite.all()  # the sum does, the mean does not
    v[0, 3] = torch.inf
    *_, finite, _ = prepared(k, v, layout_of(k, None, CONFIGS[0]))
    assert finite[0, :, 0].tolist() == [False, True, True]


def test_blocks_that_hold_the_same_are_equal_wherever_they_stand(device: torch.device) -> None:
    """Else equal scores would differ, and a tie would not go to the lower index."""
    k, v = draw(None, device, torch.bfloat16)
    k, v = (x[:, :4].repeat(1, 18, 1, 1) for x in (k, v))
    for found in prepared(k, v, layout_of(k, None, CONFIGS[0]))[:2]:
        assert torch.equal(found, found[:, :1].expand_as(found))


@pytest.mark.gpu
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("heads", [(2, 64, 64), (4, 128, 128), (4, 192, 128)], ids=str)
def test_at_real_sizes(device: torch.device, heads: tuple[int, int, int], packed: bool) -> None:
    """65,536 tokens, against float64 PyTorch."""
    (num, dk, dv), tokens, config = heads, 65536, nsa.NSAConfig()
    lengths = (1000, 31, 0, 1, 30000, 34504) if packed else None
    k, v = (torch.randn(1, tokens, num, d, device=device, dtype=torch.bfloat16) for d in (dk, dv))
    layout = layout_of(k, lengths, config)
    k_cmp, v_cmp, finite, flags = prepared(k, v, layout)
    assert finite.all()
    assert flags.all()
    for x, found in ((k, k_cmp), (v, v_cmp)):
        leaf = x.double().requires_grad_()
        first, used = layout.slot_tokens
        held = first[:, None] + torch.arange(config.l, device=device)
        wanted = leaf[:, held.clamp(max=tokens - 1)].mean(2).masked_fill(~used[:, None, None], 0)
        eps = torch.finfo(x.dtype).eps
        assert (found - wanted).abs().max() <= 0.51 * eps * wanted.abs().max()
        parts = torch.randn(4, *found.shape, device=device)
        (true,) = torch.autograd.grad(wanted, leaf, parts.sum(0).double())
        (alone,) = compression.gradients(
            (parts,), None, tokens, compression.places(layout), config.l, config.d, x.dtype
        )
        assert (alone - true).abs().max() <= 0.51 * eps * true.abs().max()
