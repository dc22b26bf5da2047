"""NativeSparseAttention: the paper's layer written out, gradients, precision, documents, errors."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import nsa
from nsa import NativeSparseAttention
from nsa.model import DecoderLM, ModelConfig
from nsa.rope import rotate, rotation
from tests.nsa.layers import (
    BACKENDS,
    DIM,
    HEAD_DIM_K,
    HEAD_DIM_V,
    HEADS,
    KV_HEADS,
    PHIS,
    documents,
    make_layer,
    pieces,
    small_config,
    tokens,
)


def written_out(layer: NativeSparseAttention, x: Tensor) -> Tensor:
    """The layer from its weights and the parts of the reference: branch by branch, one projection each."""
    config, angles = layer.config, rotation(torch.arange(x.shape[1]), HEAD_DIM_K)

    def project(weight: Tensor, heads: int) -> Tensor:
        return (x @ weight.T).view(*x.shape[:2], heads, -1)

    q = rotate(project(layer.q.weight, HEADS), angles)
    k_weights, v_weights = layer.k.weight.chunk(layer.num_kv_sets), layer.v.weight.chunk(layer.num_kv_sets)
    k = [rotate(project(weight, KV_HEADS), angles) for weight in k_weights]
    v = [project(weight, KV_HEADS) for weight in v_weights]
    k_cmp, v_cmp = layer.compress_k(k[0]), layer.compress_v(v[0])
    o_cmp, _ = nsa.compressed_attention(q, k_cmp, v_cmp, config, backend="reference")
    chosen = nsa.select_blocks(q, k_cmp, config, backend="reference")
    o_sel, _ = nsa.selected_attention(q, k[len(k) // 2], v[len(k) // 2], chosen, config, backend="reference")
    o_win, _ = nsa.window_attention(q, k[-1], v[-1], config, backend="reference")
    gates = (x @ layer.gates.linear.weight.T + layer.gates.linear.bias).sigmoid().view(*x.shape[:2], HEADS, 3)
    o = gates[..., :1] * o_cmp + gates[..., 1:2] * o_sel + gates[..., 2:] * o_win
    return o.flatten(2) @ layer.o.weight.T


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("phi", PHIS)
@pytest.mark.parametrize("shared_kv", [False, True])
def test_equals_the_layer_written_out(backend: str, phi: str, shared_kv: bool) -> None:
    layer = make_layer(small_config(phi), shared_kv=shared_kv, backend=backend)
    x = tokens(2, 37)
    torch.testing.assert_close(layer(x), written_out(layer, x))


def close_gates_except(layer: NativeSparseAttention, branch: int) -> None:
    """Gates of exactly 0 and 1, whatever x is."""
    with torch.no_grad():
        layer.gates.linear.weight.zero_()
        layer.gates.linear.bias.fill_(-torch.inf).view(HEADS, 3)[:, branch] = torch.inf


@pytest.mark.parametrize("branch", [0, 1, 2])
def test_a_branch_has_its_own_keys_and_values(branch: int) -> None:
    layer, x = make_layer(), tokens(1, 37)
    close_gates_except(layer, branch)
    layer(x).square().sum().backward()
    for projection in (layer.k, layer.v):
        touched = [(grad != 0).any().item() for grad in projection.weight.grad.chunk(3)]
        assert touched == [i == branch for i in range(3)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("phi", PHIS)
@pytest.mark.parametrize("shared_kv", [False, True])
def test_every_parameter_gets_a_gradient(backend: str, phi: str, shared_kv: bool) -> None:
    layer = make_layer(small_config(phi), shared_kv=shared_kv, backend=backend)
    layer(tokens(2, 37)).square().sum().backward()
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        rows = parameter.grad.view(len(parameter), -1)
        assert (rows.abs().amax(1) > 1e-9).all(), f"{name}: one of its outputs has no gradient beyond rounding"


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("phi", PHIS)
@pytest.mark.parametrize("length", [1, 3])
def test_without_compressed_blocks_gradients_are_zero_not_missing(backend: str, phi: str, length: int) -> None:
    layer = make_layer(small_config(phi), backend=backend)
    layer(tokens(1, length)).square().sum().backward()
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
    assert (layer.k.weight.grad.chunk(3)[0] == 0).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("phi", PHIS)
def test_no_tokens(backend: str, phi: str) -> None:
    assert make_layer(small_config(phi), backend=backend)(tokens(2, 0)).shape == (2, 0, DIM)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("phi", PHIS)
def test_packed_documents_equal_the_documents_one_by_one(backend: str, phi: str) -> None:
    layer, x, cu_seqlens = make_layer(small_config(phi), backend=backend), tokens(1, 43), documents(0, 1, 21, 3, 18)
    alone = torch.cat([layer(x[:, piece]) for piece in pieces(cu_seqlens)], 1)
    torch.testing.assert_close(layer(x, cu_seqlens=cu_seqlens), alone)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("phi", PHIS)
@pytest.mark.parametrize("at", [0, 9, 30])
def test_a_nan_reaches_later_tokens_only(backend: str, phi: str, at: int) -> None:
    layer, x = make_layer(small_config(phi), backend=backend), tokens(1, 37)
    clean = layer(x)
    x[:, at] = torch.nan
    found = layer(x)
    torch.testing.assert_close(found[:, :at], clean[:, :at])
    assert found[:, at].isnan().all()


def test_rows_depend_on_distances_not_on_positions() -> None:
    layer, x = make_layer(), tokens(1, 60)
    close_gates_except(layer, 2)
    x[:, 40:60] = x[:, 10:30]
    out = layer(x)
    torch.testing.assert_close(out[:, 47:60], out[:, 17:30])  # rows whose window holds equal tokens
    assert not torch.allclose(out[:, 40], out[:, 10])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("phi", PHIS)
@pytest.mark.parametrize("length", [3, 24])
def test_precision_is_that_of_the_reference_in_the_same_dtype(dtype: torch.dtype, phi: str, length: int) -> None:
    # 24 tokens are 3 selection blocks, all taken: rounding cannot choose others
    layer = make_layer(small_config(phi), dtype=dtype)
    x = tokens(2, length, dtype=dtype)
    out = layer(x)
    plain, exact = copy.deepcopy(layer), copy.deepcopy(layer).double()
    plain.backend = plain.compress_k.backend = plain.compress_v.backend = "reference"
    truth = exact(x.double())
    own_error = (plain(x).double() - truth).abs().max()
    ulp = torch.finfo(dtype).eps * truth.abs().max()
    assert out.dtype == dtype
    assert (out.double() - truth).abs().max() <= 2 * own_error + ulp


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("phi", PHIS)
def test_gradients_have_the_dtype_and_are_finite(dtype: torch.dtype, phi: str) -> None:
    layer, x = make_layer(small_config(phi), dtype=dtype), tokens(2, 37, dtype=dtype).requires_grad_()
    layer(x).sum().backward()
    for tensor in (x, *layer.parameters()):
        assert tensor.grad is not None
        assert tensor.grad.dtype == dtype
        assert tensor.grad.isfinite().all()


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("phi", PHIS)
@pytest.mark.parametrize("packed", [False, True])
def test_autocast_computes_low_and_keeps_float32_gradients(low: torch.dtype, phi: str, packed: bool) -> None:
    layer, x = make_layer(small_config(phi), dtype=torch.float32), tokens(1, 24, dtype=torch.float32)
    cu_seqlens = documents(11, 13) if packed else None
    with torch.autocast("cpu", low):
        out = layer(x, cu_seqlens=cu_seqlens)
    out.float().square().sum().backward()
    assert out.dtype == low
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in layer.parameters())
    exact = copy.deepcopy(layer).double()(x.double(), cu_seqlens=cu_seqlens)
    as_low = copy.deepcopy(layer).to(low)(x.to(low), cu_seqlens=cu_seqlens)
    own_error = (as_low.double() - exact).abs().max()
    assert (out.double() - exact).abs().max() <= 2 * own_error


def test_the_same_call_twice_is_the_same_bit_for_bit() -> None:
    layer, x = make_layer(small_config("mlp"), dtype=torch.float32), tokens(2, 37, dtype=torch.float32)
    runs = []
    for _ in range(2):
        layer.zero_grad()
        out = layer(x)
        out.square().sum().backward()
        runs.append([out, *(p.grad.clone() for p in layer.parameters() if p.grad is not None)])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_layers_with_different_configs_do_not_disturb_each_other() -> None:
    long, short = tokens(1, 37), tokens(1, 13)
    one = make_layer(small_config())
    other = make_layer(small_config("linear", l=8, d=4, l_sel=16, n_sel=4, w=5), shared_kv=True)
    first, other_first = one(long), other(long)
    for x in (short, long, short):
        other(x), one(x)
    assert torch.equal(one(long), first)
    assert torch.equal(other(long), other_first)


PARTS = ("compress", "compressed_attention", "select_blocks", "selected_attention", "window_attention", "combine")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("make", ["layer", "model"])
def test_the_backend_that_was_asked_for_computes_all_of_it(
    monkeypatch: pytest.MonkeyPatch, backend: str, make: str
) -> None:
    """Compression, a prefill, a step with either cache: no part of another backend is entered."""
    for other in ("reference", "torch"):
        for part in PARTS if other != backend else ():
            monkeypatch.setattr(f"nsa.{other}{'' if other == 'reference' else '_backend'}.{part}", _not_to_be_entered)
    layer: Any
    if make == "layer":
        layer, x = make_layer(backend=backend), tokens(1, 20)
        kv_cache: Any = nsa.KVCache(layer, batch_size=1, max_tokens=20)
        pages = nsa.PagedCache(layer, num_pages=20, max_tokens=20)
        rows: Any = pages.rows([pages.new()]).layers[0]
    else:
        sizes = {"dim": 12, "n_layers": 1, "n_heads": 4, "num_kv_heads": 2, "d_k": 6, "d_v": 5}
        layer, x = DecoderLM(ModelConfig(**sizes, nsa=small_config(), backend=backend)), torch.arange(20)[None]
        kv_cache = layer.new_cache(1, 20)
        pages = nsa.PagedCache(layer.attentions(), num_pages=20, max_tokens=20)
        rows = pages.rows([pages.new()])
    with torch.no_grad():
        wanted = layer(x)
        for cache in (kv_cache, rows):
            found = torch.cat([layer(part, cache) for part in x.split(13, 1)], 1)
            torch.testing.assert_close(found, wanted)


def _not_to_be_entered(*_: object, **__: object) -> None:
    pytest.fail("a part of another backend was entered")


@pytest.mark.parametrize("attention", ["nsa", "dense"])
def test_a_model_hands_its_options_to_its_layers(attention: str) -> None:
    """rope_base and shared_kv change what it computes; sizes are counted elsewhere."""
    sizes: dict[str, Any] = {"dim": 12, "n_layers": 1, "n_heads": 4, "num_kv_heads": 2, "d_k": 6, "d_v": 5}
    text = torch.arange(40)[None]

    def run(**changes: Any) -> Tensor:
        torch.manual_seed(0)
        lm = DecoderLM(ModelConfig(**sizes, nsa=small_config(), attention=attention, **changes))
        with torch.no_grad():
            out: Tensor = lm(text)
        return out

    assert torch.equal(run(), run(rope_base=10000.0))
    assert not torch.allclose(run(), run(rope_base=10.0))
    if attention == "nsa":
        assert not torch.allclose(run(), run(shared_kv=True))


def test_an_observer_gets_what_was_read_and_no_graph() -> None:
    """Gates, aux and documents of the call, which give the layer's own output; nothing that keeps its graph alive."""
    layer, x, cu_seqlens, seen = make_layer(), tokens(1, 37), documents(16, 21), []
    plain = layer(x, cu_seqlens=cu_seqlens)
    layer.observer = lambda gates, aux, cu: seen.append((gates, aux, cu))
    out = layer(x, cu_seqlens=cu_seqlens)
    assert torch.equal(out, plain)
    out.sum().backward()
    ((gates, aux, given),) = seen
    assert given is cu_seqlens
    assert aux.backend == "torch"
    torch.testing.assert_close(gates, layer.gates(x).detach())
    assert not any(tensor.requires_grad for tensor in (gates, *aux.lse.values()))
    assert int(aux.keys_read["window"]) == KV_HEADS * sum(min(t + 1, 8) for n in (16, 21) for t in range(n))


CONSTRUCTION: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"dim": 0}, ValueError, "dim must be at least 1; got 0"),
    ({"num_heads": 4.0}, TypeError, r"num_heads must be an int; got 4.0 \(float\)"),
    ({"num_kv_heads": 3}, ValueError, "num_kv_heads must divide num_heads; got 3 and 4"),
    ({"head_dim_k": -1}, ValueError, "head_dim_k must be at least 1; got -1"),
    ({"head_dim_v": True}, TypeError, "head_dim_v must be an int; got True"),
    ({"config": {"l": 4}}, TypeError, "config must be an NSAConfig; got dict"),
    ({"backend": "cuda"}, ValueError, "backend must be one of auto, reference, torch, triton; got 'cuda'"),
    ({"rope_base": 0.0}, ValueError, "rope_base must be positive; got 0.0"),
]


@pytest.mark.parametrize(("wrong", "error", "message"), CONSTRUCTION)
def test_wrong_sizes_are_named(wrong: dict[str, Any], error: type[Exception], message: str) -> None:
    right: dict[str, Any] = {
        "dim": DIM,
        "num_heads": HEADS,
        "num_kv_heads": KV_HEADS,
        "head_dim_k": HEAD_DIM_K,
        "head_dim_v": HEAD_DIM_V,
        "config": small_config(),
    }
    with pytest.raises(error, match=message):
        NativeSparseAttention(**{**right, **wrong})


CALLS: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
    ([1.0], {}, TypeError, "x must be a tensor; got list"),
    (torch.ones(4, DIM), {}, ValueError, r"x must have shape \[B, S, 12\]; got \[4, 12\]"),
    (torch.ones(1, 4, DIM + 1), {}, ValueError, r"x must have shape \[B, S, 12\]; got \[1, 4, 13\]"),
    (torch.ones(1, 4, DIM), {}, TypeError, "x must have the layer's dtype, torch.float64; got torch.float32"),
    (torch.ones(1, 4, DIM).int(), {}, TypeError, "x must be float32, bfloat16, float16 or float64; got torch.int32"),
    (torch.ones(1, 4, DIM, device="meta").double(), {}, ValueError, "x must be on the layer's device, cpu; got meta"),
    (tokens(1, 4), {"cache": {}}, TypeError, "cache must be a KVCache, rows of a PagedCache, or None; got dict"),
    (tokens(1, 4), {"cu_seqlens": torch.tensor([0, 4])}, TypeError, "cu_seqlens must be int32"),
    (tokens(1, 4), {"cu_seqlens": documents(3)}, ValueError, "cu_seqlens must ascend from 0 to 4"),
    (tokens(2, 4), {"cu_seqlens": documents(4)}, ValueError, "B = 1"),
]


@pytest.mark.parametrize(("x", "options", "error", "message"), CALLS)
def test_wrong_calls_are_named(x: Any, options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make_layer()(x, **options)


def test_autocast_does_not_mix_float64_with_less() -> None:
    with (
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(TypeError, match=r"x must have the layer's dtype, torch.float64; got torch.float32"),
    ):
        make_layer()(tokens(1, 4, dtype=torch.float32))
