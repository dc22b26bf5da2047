"""phi: every kind against a loop over documents and blocks, and how far a NaN spreads."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import gelu

import nsa
from nsa import NSAConfig
from nsa.compression import LinearCompression, MLPCompression, compressor
from tests.nsa.layers import PHIS, OpCounter, documents, pieces, small_config

HEAD_DIM = 5
LEARNED = ("linear", "mlp")


def make(phi: str, config: NSAConfig | None = None, dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    module = compressor(config or small_config(phi), HEAD_DIM, backend="torch", dtype=dtype)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3)
    return module


def tokens(length: int, batch: int = 1, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(batch, length, 2, HEAD_DIM, dtype=dtype)


def phi_of_block(module: nn.Module, block: Tensor) -> Tensor:
    """phi of one block [l, D] of one head, written out."""
    if isinstance(module, LinearCompression):
        weight = module.linear.weight.view(HEAD_DIM, *block.shape)  # [out, l, D]
        return torch.einsum("old,ld->o", weight, block)
    if isinstance(module, MLPCompression):
        first, _, second = module.mlp
        weight = first.weight.view(2 * HEAD_DIM, *block.shape)
        hidden = gelu(torch.einsum("old,ld->o", weight, block + module.position) + first.bias)
        return second.weight @ hidden
    return block.mean(0)


def in_a_loop(module: nn.Module, x: Tensor, config: NSAConfig) -> Tensor:
    """The full blocks of one document x [B, T, H, D], one at a time."""
    firsts = range(0, x.shape[1] - config.l + 1, config.d)
    out = x.new_zeros(x.shape[0], len(firsts), *x.shape[2:])
    for c, first in enumerate(firsts):
        for b in range(x.shape[0]):
            for h in range(x.shape[2]):
                out[b, c, h] = phi_of_block(module, x[b, first : first + config.l, h])
    return out


@pytest.mark.parametrize("phi", PHIS)
@given(d=st.integers(1, 3), ratio=st.integers(1, 3), length=st.integers(0, 20))
def test_equals_a_loop_over_blocks(phi: str, d: int, ratio: int, length: int) -> None:
    config = NSAConfig(l=d * ratio, d=d, l_sel=d * ratio, n_sel=4, w=8, phi=phi)
    module, x = make(phi, config), tokens(length, batch=2)
    torch.testing.assert_close(module(x), in_a_loop(module, x, config))


@pytest.mark.parametrize("phi", PHIS)
@given(lengths=st.lists(st.integers(0, 11), min_size=1, max_size=4))
def test_packed_documents_stand_end_to_end_and_the_rest_is_zero(phi: str, lengths: list[int]) -> None:
    config, cu_seqlens = small_config(phi), documents(*lengths)
    module, x = make(phi), tokens(sum(lengths))
    out = module(x, cu_seqlens)
    expected = torch.cat([in_a_loop(module, x[:, piece], config) for piece in pieces(cu_seqlens)], 1)
    assert out.shape[1] == sum(lengths) // config.d
    torch.testing.assert_close(out[:, : expected.shape[1]], expected)
    assert (out[:, expected.shape[1] :] == 0).all()


def test_linear_starts_as_the_mean() -> None:
    x = tokens(21)
    module = compressor(small_config("linear"), HEAD_DIM, dtype=torch.float64)
    torch.testing.assert_close(module(x), nsa.compress(x, small_config(), backend="torch"))


def test_mlp_starts_with_different_values_for_different_blocks() -> None:
    out = compressor(small_config("mlp"), HEAD_DIM)(tokens(12, dtype=torch.float32))
    assert out.std(1).min() > 1e-3


@pytest.mark.parametrize("phi", PHIS)
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_bad_token_reaches_only_the_blocks_that_hold_it(phi: str, value: float) -> None:
    x, bad = tokens(20), 9
    x[:, bad] = value
    finite = make(phi)(x).isfinite().all(-1).all(-1)[0]
    holds = [c * 2 <= bad < c * 2 + 4 for c in range(9)]
    assert finite.tolist() == [not block for block in holds]


@pytest.mark.parametrize("phi", LEARNED)
def test_a_nan_in_a_document_without_blocks_reaches_no_weight(phi: str) -> None:
    module, x = make(phi), tokens(14)
    x[:, 0] = torch.nan  # the first document has 3 tokens, too few for a block; unused slots must not take them
    module(x, documents(3, 11)).sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in module.parameters())


@pytest.mark.parametrize("phi", LEARNED)
@pytest.mark.parametrize("packed", [False, True])
def test_too_few_tokens_give_no_block_and_zero_gradients(phi: str, packed: bool) -> None:
    module, x = make(phi), tokens(3).requires_grad_()
    module(x, documents(2, 1) if packed else None).sum().backward()
    for tensor in (x, *module.parameters()):
        assert tensor.grad is not None
        assert (tensor.grad == 0).all()


@pytest.mark.parametrize("phi", LEARNED)
def test_every_weight_gets_a_gradient(phi: str) -> None:
    module = make(phi)
    module(tokens(13)).square().sum().backward()
    assert all(p.grad is not None and (p.grad != 0).all() for p in module.parameters())


@pytest.mark.parametrize("phi", PHIS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_the_dtype_is_kept(phi: str, dtype: torch.dtype) -> None:
    assert make(phi, dtype=dtype)(tokens(12, dtype=dtype)).dtype == dtype


@pytest.mark.parametrize("phi", PHIS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_dtype_is_kept_under_autocast(phi: str, dtype: torch.dtype) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert make(phi, dtype=torch.float32)(tokens(12, dtype=dtype)).dtype == dtype


@pytest.mark.parametrize("phi", PHIS)
@pytest.mark.parametrize("packed", [False, True])
def test_as_many_operations_for_many_blocks_as_for_few(phi: str, packed: bool) -> None:
    counts = []
    for length in (16, 256):
        with OpCounter() as counter:
            make(phi)(tokens(length), documents(length // 4, length - length // 4) if packed else None)
        counts.append(counter.ops)
    assert counts[0] == counts[1]


def test_wrong_arguments_are_named() -> None:
    module = make("linear")
    with pytest.raises(ValueError, match=r"x must have shape \[B, T, H, 5\]; got \[1, 8, 2, 6\]"):
        module(torch.randn(1, 8, 2, 6))
    with pytest.raises(TypeError, match="cu_seqlens must be int32"):
        module(tokens(8), torch.tensor([0, 8]))
    with pytest.raises(ValueError, match="B = 1"):
        module(tokens(8, batch=2), documents(8))
