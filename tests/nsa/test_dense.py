"""DenseAttention: a baseline is worth nothing unless it is right."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from nsa.dense import DenseAttention
from nsa.rope import rotate, rotation
from tests.nsa.layers import DIM, HEAD_DIM_K, HEAD_DIM_V, HEADS, KV_HEADS, documents, pieces, tokens


def make(num_kv_heads: int = KV_HEADS) -> DenseAttention:
    torch.manual_seed(0)
    return DenseAttention(DIM, HEADS, num_kv_heads, HEAD_DIM_K, HEAD_DIM_V).double()


def written_out(layer: DenseAttention, x: Tensor) -> Tensor:
    """One query, one head at a time, over the keys up to its own."""
    angles, group = rotation(torch.arange(x.shape[1]), HEAD_DIM_K), HEADS // layer.num_kv_heads
    q = rotate(layer.q(x).unflatten(-1, (HEADS, -1)), angles)
    k = rotate(layer.k(x).unflatten(-1, (layer.num_kv_heads, -1)), angles)
    v = layer.v(x).unflatten(-1, (layer.num_kv_heads, -1))
    rows = []
    for t in range(x.shape[1]):
        for h in range(HEADS):
            p = (k[:, : t + 1, h // group] @ q[:, t, h, :, None] / HEAD_DIM_K**0.5).softmax(1)
            rows.append((p * v[:, : t + 1, h // group]).sum(1))
    return layer.o(torch.stack(rows, 1).view(x.shape[0], x.shape[1], -1))


@pytest.mark.parametrize("num_kv_heads", [1, 2, HEADS])
def test_equals_attention_written_out(num_kv_heads: int) -> None:
    layer, x = make(num_kv_heads), tokens(2, 9)
    torch.testing.assert_close(layer(x), written_out(layer, x))


def test_packed_documents_equal_the_documents_one_by_one() -> None:
    layer, x, cu_seqlens = make(), tokens(1, 12), documents(0, 1, 7, 4)
    alone = torch.cat([layer(x[:, piece]) for piece in pieces(cu_seqlens)], 1)
    torch.testing.assert_close(layer(x, cu_seqlens=cu_seqlens), alone)


def test_a_cache_is_refused() -> None:
    with pytest.raises(ValueError, match="cache must be None, dense attention has none here; got list"):
        make()(tokens(1, 4), [])


def test_a_wrong_shape_is_named() -> None:
    with pytest.raises(ValueError, match=r"x must have shape \[B, S, 12\]; got \[1, 4, 13\]"):
        make()(torch.ones(1, 4, 13))
