"""Time for memory is PyTorch's own checkpointing: what a call saves for its backward pass, with it and without."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import nsa

pytest.importorskip("triton")

CONFIG = nsa.NSAConfig(l=8, d=4, l_sel=16, n_sel=4, w=13)


def call(q: Tensor, k: Tensor, v: Tensor, gates: Tensor) -> Tensor:
    return nsa.nsa_attention(q, k, v, gates, CONFIG, backend="triton")


def recomputed(*inputs: Tensor) -> Tensor:
    o = checkpoint(call, *inputs, use_reentrant=False)
    assert isinstance(o, Tensor)
    return o


def saved_bytes(attend: Callable[..., Tensor], inputs: list[Tensor]) -> tuple[int, list[Tensor]]:
    """Bytes that are kept for the backward pass beside the inputs; the output and the gradients."""
    kept: dict[int, int] = {}

    def noted(x: Tensor) -> Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(noted, lambda x: x):
        o = attend(*inputs)
    own = {x.untyped_storage().data_ptr() for x in inputs}
    gradients = torch.autograd.grad(o.sin().sum(), inputs)
    return sum(size for place, size in kept.items() if place not in own), [o, *gradients]


def test_recomputing_gives_the_same_bits_and_saves_the_inputs_alone(device: torch.device) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = (1, 24, 4, 16), (1, 24, 2, 16), (1, 24, 2, 16), (1, 24, 4, 3)
    inputs = [torch.randn(shape, generator=generator).to(device).requires_grad_() for shape in shapes]
    full, wanted = saved_bytes(call, inputs)
    least, found = saved_bytes(recomputed, inputs)
    output = 24 * 4 * 16 * 4
    assert full > 3 * output  # those of the three branches
    assert least <= output  # which `sin` keeps here
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one, other)
