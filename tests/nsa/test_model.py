"""The LM: its sizes, its loss, its caches, and that both kinds of attention look back only."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from nsa import NSAConfig
from nsa.model import ATTENTIONS, BASE_125M, SHOWCASE, DecoderLM, ModelCache, ModelConfig, next_token_loss
from tests.nsa.layers import documents, pieces, small_config

VOCAB = 11


def make(attention: str = "nsa", dtype: torch.dtype = torch.float64, **changes: Any) -> DecoderLM:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"dim": 12, "n_layers": 2, "n_heads": 4, "num_kv_heads": 2, "d_k": 6, "d_v": 5}
    config = ModelConfig(**{**sizes, "nsa": small_config(), "vocab_size": VOCAB, "attention": attention, **changes})
    return DecoderLM(config).to(dtype)


def text(batch: int, length: int, seed: int = 0) -> Tensor:
    return torch.randint(0, VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))


def test_the_names_are_those_of_the_profiles() -> None:
    model = {"dim": 128, "n_layers": 1, "n_heads": 8, "num_kv_heads": 2, "d_k": 16, "d_v": 16}
    nsa = {"l": 16, "d": 8, "l_sel": 32, "n_sel": 8, "w": 64, "phi": "avg"}
    assert ModelConfig(**model, nsa=NSAConfig.from_mapping(nsa)) == SHOWCASE


def test_the_fields_name_of_the_key_value_heads_is_an_alias() -> None:
    mapping = dataclasses.asdict(SHOWCASE)
    mapping["n_kv_groups"] = mapping.pop("num_kv_heads")
    assert ModelConfig.from_mapping(mapping) == ModelConfig.from_mapping(dataclasses.asdict(SHOWCASE)) == SHOWCASE
    with pytest.warns(DeprecationWarning, match="num_kv_heads"):
        assert SHOWCASE.n_kv_groups == SHOWCASE.num_kv_heads


@pytest.mark.parametrize("config", [SHOWCASE, BASE_125M])
def test_parameters_are_counted_one_by_one(config: ModelConfig) -> None:
    with torch.device("meta"):
        nsa, dense, untied = (
            DecoderLM(changed).num_parameters()
            for changed in (config, config.dense_twin(), dataclasses.replace(config, tied_head=False))
        )
    dim, heads, num_kv_heads = config.dim, config.n_heads, config.num_kv_heads
    q_and_o = dim * heads * (config.d_k + config.d_v)
    kv = dim * num_kv_heads * (config.d_k + config.d_v)
    gates = (dim + 1) * 3 * heads
    mlp_and_norms = 3 * dim * config.hidden_dim + 2 * dim
    embedding_and_norm = 256 * dim + dim
    assert dense == config.n_layers * (q_and_o + kv + mlp_and_norms) + embedding_and_norm
    assert nsa == dense + config.n_layers * (2 * kv + gates)
    assert untied == nsa + 256 * dim


def test_norm_eps_reaches_every_norm() -> None:
    norms = [m.eps for m in make(norm_eps=0.5).modules() if isinstance(m, torch.nn.RMSNorm)]
    assert norms == [0.5] * 5  # two in each of two blocks, and the last


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_untrained_it_knows_nothing(attention: str) -> None:
    model, tokens = make(attention, vocab_size=256), torch.randint(0, 256, (4, 64))
    assert next_token_loss(model(tokens), tokens).item() == pytest.approx(math.log(256), abs=0.2)


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("tied_head", [True, False])
@pytest.mark.parametrize("phi", ["avg", "mlp"])
def test_every_parameter_gets_a_gradient(attention: str, tied_head: bool, phi: str) -> None:
    model, tokens = make(attention, tied_head=tied_head, nsa=small_config(phi)), text(2, 37)
    next_token_loss(model(tokens), tokens).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.abs().max() > 1e-12, name


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("changed", [1, 20, 36])
def test_logits_depend_on_earlier_tokens_only(attention: str, changed: int) -> None:
    model, tokens = make(attention), text(1, 37)
    other = tokens.clone()
    other[0, changed] = (other[0, changed] + 1) % VOCAB
    before, after = model(tokens), model(other)
    torch.testing.assert_close(after[:, :changed], before[:, :changed], rtol=0, atol=1e-12)
    assert not torch.allclose(after[:, changed], before[:, changed])


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_packed_documents_equal_the_documents_one_by_one(attention: str) -> None:
    model, tokens, cu_seqlens = make(attention), text(1, 40), documents(1, 0, 21, 18)
    alone = torch.cat([model(tokens[:, piece]) for piece in pieces(cu_seqlens)], 1)
    torch.testing.assert_close(model(tokens, cu_seqlens=cu_seqlens), alone)


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_logits_are_float32_whatever_the_weights(attention: str, dtype: torch.dtype) -> None:
    logits = make(attention, dtype)(text(1, 9))
    assert logits.dtype == torch.float32
    assert logits.isfinite().all()


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_it_learns_under_autocast(attention: str) -> None:
    model, tokens = make(attention, torch.float32), text(1, 6).repeat(2, 5)
    optimiser, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for _ in range(30):
        with torch.autocast("cpu", torch.bfloat16):
            loss = next_token_loss(model(tokens), tokens)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2


def one_hot_logits(tokens: Tensor, size: float = 50.0) -> Tensor:
    return torch.nn.functional.one_hot(tokens, VOCAB).float() * size


def test_the_target_is_the_next_token() -> None:
    tokens = (torch.arange(12) % VOCAB)[None]
    assert next_token_loss(one_hot_logits((tokens + 1) % VOCAB), tokens).item() < 1e-6
    assert next_token_loss(one_hot_logits(tokens), tokens).item() == pytest.approx(50, abs=1e-4)


def test_the_loss_is_the_mean_over_next_tokens_written_out() -> None:
    tokens, logits = text(2, 5), torch.randn(2, 5, VOCAB, dtype=torch.float64)
    each = [-logits[b, t].log_softmax(0)[tokens[b, t + 1]] for b in range(2) for t in range(4)]
    torch.testing.assert_close(next_token_loss(logits, tokens), torch.stack(each).mean())


def test_no_document_is_asked_for_the_next_ones_first_token() -> None:
    tokens, cu_seqlens = text(1, 12), documents(0, 5, 1, 6, 0)
    logits = torch.randn(1, 12, VOCAB, dtype=torch.float64)
    alone = [next_token_loss(logits[:, a:b], tokens[:, a:b]) * (b - a - 1) for a, b in ((0, 5), (6, 12))]
    torch.testing.assert_close(next_token_loss(logits, tokens, cu_seqlens), (alone[0] + alone[1]) / (4 + 5))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_loss_of_large_low_precision_logits_is_that_in_float32(dtype: torch.dtype) -> None:
    logits, tokens = (torch.randn(1, 300, VOCAB) * 1e4).to(dtype), text(1, 300)
    loss = next_token_loss(logits, tokens)
    assert loss.dtype == torch.float32
    assert loss.isfinite()
    assert torch.equal(loss, next_token_loss(logits.float(), tokens))


@pytest.mark.parametrize("size", [1, 7, 37])
def test_decode_equals_prefill(size: int) -> None:
    model, tokens = make(), text(2, 37)
    cache = model.new_cache(batch_size=2, max_tokens=37)
    with torch.no_grad():
        for turn in range(2):
            out = torch.cat([model(chunk, cache) for chunk in tokens.split(size, 1)], 1)
            torch.testing.assert_close(out, model(tokens), rtol=1e-9, atol=1e-9)
            assert len(cache) == 37
            cache.reset() if turn == 0 else cache.truncate(20)
        torch.testing.assert_close(model(tokens[:, 20:], cache), model(tokens)[:, 20:], rtol=1e-9, atol=1e-9)


def test_a_call_that_fails_in_one_layer_leaves_all_caches_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokens = make(), text(1, 20)
    cache = model.new_cache(1, 20)
    with torch.no_grad():
        model(tokens[:, :9], cache)
        with monkeypatch.context() as patch:
            patch.setattr(model.blocks[1].attention.gates, "forward", lambda x: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                model(tokens[:, 9:12], cache)
        assert [len(layer) for layer in cache.layers] == [9, 9]
        with pytest.raises(ValueError, match="cache has room for max_tokens=20; it holds 9 and 12 more came"):
            model(tokens[:, :12], cache)
        torch.testing.assert_close(model(tokens[:, 9:], cache), model(tokens)[:, 9:])


def test_wrong_caches_are_named() -> None:
    model = make()
    with pytest.raises(ValueError, match="attention must be 'nsa' for a cache; got 'dense'"):
        make("dense").new_cache(1, 8)
    with torch.no_grad(), pytest.raises(ValueError, match="cache was made for another layer"):
        model(text(1, 4), make().new_cache(1, 8))
    for wrong in ([], ModelCache(model.new_cache(1, 8).layers[:1])):
        with torch.no_grad(), pytest.raises(TypeError, match="cache must come from this model's new_cache"):
            model(text(1, 4), wrong)


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        (torch.tensor([[0, VOCAB]]), ValueError, "tokens must be between 0 and 10; got 11"),
        (torch.tensor([[-1, 0]]), ValueError, "tokens must be between 0 and 10; got -1"),
        (torch.ones(1, 4), TypeError, r"tokens must be int64 or int32 of shape \[B, S\]; got torch.float32 \[1, 4\]"),
        (torch.tensor([1, 2]), TypeError, r"tokens must be int64 or int32 of shape \[B, S\]; got torch.int64 \[2\]"),
        ([[1]], TypeError, "tokens must be .* got list"),
    ],
)
def test_wrong_tokens_are_named(wrong: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()(wrong)


def test_wrong_losses_are_named() -> None:
    with pytest.raises(ValueError, match=r"tokens must have S >= 2 for a next token; got \[2, 1\]"):
        next_token_loss(torch.randn(2, 1, VOCAB), text(2, 1))
    with pytest.raises(ValueError, match=r"logits must have shape \[2, 4, vocab_size\]; got \[2, 5, 11\]"):
        next_token_loss(torch.randn(2, 5, VOCAB), text(2, 4))


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ({"dim": 0}, ValueError, "dim must be at least 1; got 0"),
        ({"n_layers": "12"}, TypeError, "n_layers must be an int; got '12'"),
        ({"num_kv_heads": 3}, ValueError, "num_kv_heads must divide n_heads; got 3 and 4"),
        ({"attention": "flash"}, ValueError, "attention must be one of nsa, dense; got 'flash'"),
        ({"mlp_dim": 0}, ValueError, "mlp_dim must be at least 1; got 0"),
        ({"norm_eps": 0.0}, ValueError, "norm_eps must be positive or None; got 0.0"),
        ({"nsa": {}}, TypeError, "nsa must be an NSAConfig; got dict"),
    ],
)
def test_wrong_sizes_are_named(wrong: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make(**wrong)
