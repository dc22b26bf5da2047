"""KVCache: prefill = chunked prefill = token-by-token decode, whatever happens in between; and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from torch import Tensor

from nsa import KVCache, NativeSparseAttention
from tests.nsa.layers import BACKENDS, DIM, PHIS, OpCounter, documents, make_layer, small_config, tokens

MAX_TOKENS = 37


def in_chunks(layer: NativeSparseAttention, cache: KVCache, x: Tensor, size: int) -> Tensor:
    with torch.no_grad():
        return torch.cat([layer(chunk, cache) for chunk in x.split(size, 1)], 1)


def buffers(cache: KVCache) -> list[Tensor]:
    return [value for value in vars(cache).values() if isinstance(value, Tensor)]


class CacheMachine(RuleBasedStateMachine):
    """Two sequences take turns through two caches of one layer; each call is held to a full prefill of its tokens."""

    @initialize(phi=st.sampled_from(PHIS), shared_kv=st.booleans(), d=st.integers(1, 3), batch=st.integers(1, 2))
    def make(self, phi: str, shared_kv: bool, d: int, batch: int) -> None:
        config = small_config(phi, l=2 * d, d=d, l_sel=4 * d, w=5)
        self.layer = make_layer(config, shared_kv=shared_kv)
        self.batch = batch
        self.vocabulary = tokens(1, 64)[0]  # [64, DIM]
        self.caches = [KVCache(self.layer, batch_size=batch, max_tokens=MAX_TOKENS) for _ in range(2)]
        self.texts: list[list[int]] = [[], []]

    def embed(self, text: list[int]) -> Tensor:
        """Another token in each row of the batch: [batch, len(text), DIM]."""
        rows = [[(token + 7 * row) % 64 for token in text] for row in range(self.batch)]
        return self.vocabulary[torch.tensor(rows, dtype=torch.long)].view(self.batch, len(text), DIM)

    @rule(which=st.integers(0, 1), new=st.lists(st.integers(0, 63), max_size=12))
    def append(self, which: int, new: list[int]) -> None:
        text, cache = self.texts[which], self.caches[which]
        if len(text) + len(new) > MAX_TOKENS:
            with torch.no_grad(), pytest.raises(ValueError, match="cache has room for max_tokens=37"):
                self.layer(self.embed(new), cache)
            return
        self.texts[which] = text + new
        with torch.no_grad():
            out = self.layer(self.embed(new), cache)
            full = self.layer(self.embed(self.texts[which]))
        torch.testing.assert_close(out, full[:, len(text) :], rtol=1e-9, atol=1e-9)

    @rule(which=st.integers(0, 1), token=st.integers(0, 63))
    def append_one(self, which: int, token: int) -> None:
        self.append(which, [token])

    @rule(which=st.integers(0, 1), share=st.floats(0, 1))
    def truncate(self, which: int, share: float) -> None:
        length = int(share * len(self.texts[which]))
        self.caches[which].truncate(length)
        del self.texts[which][length:]

    @rule(which=st.integers(0, 1))
    def reset(self, which: int) -> None:
        self.caches[which].reset()
        self.texts[which].clear()

    @invariant()
    def lengths_agree(self) -> None:
        if hasattr(self, "caches"):
            assert [len(cache) for cache in self.caches] == [len(text) for text in self.texts]


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(settings.default, stateful_step_count=30)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("phi", PHIS)
@pytest.mark.parametrize("shared_kv", [False, True])
@pytest.mark.parametrize("size", [1, 5, 37])
def test_any_chunking_equals_the_whole(backend: str, phi: str, shared_kv: bool, size: int) -> None:
    layer, x = make_layer(small_config(phi), shared_kv=shared_kv, backend=backend), tokens(2, MAX_TOKENS)
    cache = KVCache(layer, batch_size=2, max_tokens=MAX_TOKENS)
    torch.testing.assert_close(in_chunks(layer, cache, x, size), layer(x), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_decode_is_as_precise_as_prefill(dtype: torch.dtype) -> None:
    layer, x = make_layer(dtype=dtype), tokens(2, 24, dtype=dtype)  # 3 blocks, all selected
    cache = KVCache(layer, batch_size=2, max_tokens=24)
    out, prefill = in_chunks(layer, cache, x, 1), layer(x)
    truth = layer.double()(x.double())
    assert out.dtype == dtype
    assert (out.double() - truth).abs().max() <= 2 * (prefill.double() - truth).abs().max()


@pytest.mark.parametrize("phi", PHIS)
def test_only_what_was_written_is_read(phi: str) -> None:
    layer, x = make_layer(small_config(phi)), tokens(1, MAX_TOKENS)
    cache = KVCache(layer, batch_size=1, max_tokens=MAX_TOKENS + 20)
    for buffer in buffers(cache):
        buffer.fill_(torch.nan)
    torch.testing.assert_close(in_chunks(layer, cache, x, 3), layer(x))


def test_a_cache_that_was_reset_or_cut_goes_on_as_one_that_was_not() -> None:
    layer, x, other = make_layer(small_config("mlp")), tokens(1, 24), tokens(1, 24, seed=2)
    cache = KVCache(layer, batch_size=1, max_tokens=24)
    in_chunks(layer, cache, other, 7)
    cache.reset()
    torch.testing.assert_close(in_chunks(layer, cache, x[:, :15], 4), layer(x)[:, :15])
    in_chunks(layer, cache, other[:, 15:], 5)
    cache.truncate(15)  # in the middle of a block that was full
    torch.testing.assert_close(in_chunks(layer, cache, x[:, 15:], 2), layer(x)[:, 15:])


def test_a_block_is_compressed_once() -> None:
    layer, made = make_layer(), []
    layer.compress_k.register_forward_hook(lambda module, args, out: made.append(out.shape[1]))
    in_chunks(layer, KVCache(layer, batch_size=1, max_tokens=MAX_TOKENS), tokens(1, MAX_TOKENS), 1)
    assert sum(made) == (MAX_TOKENS - 4) // 2 + 1


def test_a_step_costs_as_many_operations_late_as_early_and_waits_for_nothing() -> None:
    layer, x = make_layer(dtype=torch.float32), tokens(1, 202, dtype=torch.float32)
    cache = KVCache(layer, batch_size=1, max_tokens=202)
    counts = []
    for length in (101, 201):  # neither completes a block
        in_chunks(layer, cache, x[:, len(cache) : length - 1], 100)
        with OpCounter() as counter:
            in_chunks(layer, cache, x[:, length - 1 : length], 1)
        counts.append(counter.ops)
        assert not counter.waits
    assert counts[0] == counts[1]


def test_a_call_that_fails_midway_leaves_the_cache_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = make_layer(), tokens(1, MAX_TOKENS)
    cache = KVCache(layer, batch_size=1, max_tokens=MAX_TOKENS)
    before = in_chunks(layer, cache, x[:, :11], 11)
    with monkeypatch.context() as patch:
        patch.setattr("nsa.cache.nsa_attention", lambda *args, **options: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            in_chunks(layer, cache, torch.full((1, 9, DIM), torch.nan, dtype=torch.float64), 9)
    assert len(cache) == 11
    after = in_chunks(layer, cache, x[:, 11:], 5)
    torch.testing.assert_close(torch.cat([before, after], 1), layer(x))


@pytest.mark.parametrize("phi", PHIS)
@pytest.mark.parametrize("shared_kv", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_its_bytes_are_known_before(phi: str, shared_kv: bool, dtype: torch.dtype) -> None:
    layer = make_layer(small_config(phi), shared_kv=shared_kv, dtype=dtype)
    sizes = {"batch_size": 3, "max_tokens": 21}
    with torch.autocast("cpu", torch.bfloat16):  # float32 projections come out as bfloat16 here
        allocated = sum(buffer.untyped_storage().nbytes() for buffer in buffers(KVCache(layer, **sizes)))
        assert KVCache.bytes(layer, **sizes) == allocated
    itemsize = 8 if dtype == torch.float64 else 2
    tokens_and_blocks = (1 if shared_kv else 3) * 21 + (21 - 4) // 2 + 1
    assert allocated == itemsize * 3 * tokens_and_blocks * 2 * (6 + 5)


def test_under_autocast_it_holds_what_autocast_makes() -> None:
    layer, x = make_layer(dtype=torch.float32), tokens(1, 24, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        cache = KVCache(layer, batch_size=1, max_tokens=24)
        assert in_chunks(layer, cache, x[:, :20], 3).dtype == torch.bfloat16
    wanted = "cache must hold the keys that the layer makes here, torch.float32 on cpu; it was made for torch.bfloat16"
    with torch.no_grad(), pytest.raises(TypeError, match=wanted):
        layer(x[:, 20:], cache)
    assert len(cache) == 20


def test_made_in_inference_mode_it_serves_outside() -> None:
    layer, x = make_layer(), tokens(1, 24)
    with torch.inference_mode():
        cache = KVCache(layer, batch_size=1, max_tokens=24)
        first = layer(x[:, :10], cache)
    torch.testing.assert_close(torch.cat([first, in_chunks(layer, cache, x[:, 10:], 3)], 1), layer(x))


@pytest.mark.parametrize("frozen", [False, True])
def test_gradients_through_it_are_refused(frozen: bool) -> None:
    layer = make_layer().requires_grad_(not frozen)
    cache = KVCache(layer, batch_size=1, max_tokens=8)
    with pytest.raises(ValueError, match=r"cache is for inference; call the layer under torch.no_grad\(\)"):
        layer(tokens(1, 4).requires_grad_(frozen), cache)
    assert len(cache) == 0


def test_frozen_weights_need_no_mode() -> None:
    layer = make_layer().requires_grad_(False)
    cache = KVCache(layer, batch_size=1, max_tokens=8)
    layer(tokens(1, 4), cache)
    assert len(cache) == 4


REFUSED: list[tuple[Tensor, type[Exception], str]] = [
    (tokens(2, 14), ValueError, "cache has room for max_tokens=24; it holds 11 and 14 more came"),
    (tokens(1, 2), ValueError, "x must have the cache's batch_size, 2 rows; got 1"),
    (tokens(2, 2, dtype=torch.float32), TypeError, "x must have the layer's dtype"),
    (tokens(2, 2)[..., 1:], ValueError, "x must have shape"),
]


@pytest.mark.parametrize(("wrong", "error", "message"), REFUSED)
def test_a_refused_call_leaves_it_as_it_was(wrong: Tensor, error: type[Exception], message: str) -> None:
    layer, x = make_layer(), tokens(2, 24)
    cache = KVCache(layer, batch_size=2, max_tokens=24)
    before = in_chunks(layer, cache, x[:, :11], 11)
    held = [buffer.nan_to_num().clone() for buffer in buffers(cache)]
    with torch.no_grad(), pytest.raises(error, match=message):
        layer(wrong, cache)
    assert all(torch.equal(buffer.nan_to_num(), was) for buffer, was in zip(buffers(cache), held, strict=True))
    torch.testing.assert_close(torch.cat([before, in_chunks(layer, cache, x[:, 11:], 13)], 1), layer(x))


def test_another_layers_cache_is_refused() -> None:
    layer, twin = make_layer(), make_layer()
    with torch.no_grad(), pytest.raises(ValueError, match="cache was made for another layer"):
        layer(tokens(1, 4), KVCache(twin, batch_size=1, max_tokens=8))


def test_packed_documents_are_refused() -> None:
    layer = make_layer()
    cache = KVCache(layer, batch_size=1, max_tokens=8)
    with torch.no_grad(), pytest.raises(ValueError, match="cache and cu_seqlens exclude each other"):
        layer(tokens(1, 4), cache, documents(4))


def test_a_layer_moved_to_another_dtype_is_refused() -> None:
    layer = make_layer()
    cache = KVCache(layer, batch_size=1, max_tokens=8)
    layer.float()
    with torch.no_grad(), pytest.raises(TypeError, match=r"it was made for torch.float64"):
        layer(tokens(1, 4, dtype=torch.float32), cache)


MADE_WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"layer": torch.nn.Linear(2, 2)}, TypeError, "layer must be a NativeSparseAttention; got Linear"),
    ({"batch_size": 0}, ValueError, "batch_size must be at least 1; got 0"),
    ({"max_tokens": 1.5}, TypeError, "max_tokens must be an int; got 1.5"),
]


@pytest.mark.parametrize(("wrong", "error", "message"), MADE_WRONG)
def test_wrong_sizes_are_named(wrong: dict[str, Any], error: type[Exception], message: str) -> None:
    arguments: dict[str, Any] = {"layer": make_layer(), "batch_size": 1, "max_tokens": 8, **wrong}
    for make in (KVCache, KVCache.bytes):
        with pytest.raises(error, match=message):
            make(arguments["layer"], batch_size=arguments["batch_size"], max_tokens=arguments["max_tokens"])


@pytest.mark.parametrize(("length", "error"), [(-1, ValueError), (5, ValueError), (2.0, TypeError), (True, TypeError)])
def test_truncate_refuses_what_is_not_held(length: Any, error: type[Exception]) -> None:
    layer = make_layer()
    cache = KVCache(layer, batch_size=1, max_tokens=8)
    in_chunks(layer, cache, tokens(1, 4), 4)
    with pytest.raises(error, match="length must be"):
        cache.truncate(length)
    assert len(cache) == 4
