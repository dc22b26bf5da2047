"""PagedCache under a layer and a model: rows of different lengths, forks and rollbacks decode as they prefill."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from nsa import NativeSparseAttention, OutOfPagesError, PagedCache
from nsa.graphed_step import GraphedStep
from nsa.model import DecoderLM, ModelConfig
from tests.nsa.layers import BACKENDS, DIM, PHIS, OpCounter, documents, make_layer, small_config, tokens

MAX_TOKENS = 60


def make_cache(layer: NativeSparseAttention, **changes: Any) -> PagedCache:
    return PagedCache(layer, **{"num_pages": 80, "max_tokens": MAX_TOKENS, "page_size": 8, **changes})


def feed(cache: PagedCache, sequences: list[int], x: Tensor) -> Tensor:
    """One call of the only layer."""
    with torch.no_grad():
        out: Tensor = cache.layers[0](x, cache.rows(sequences).layers[0])
    return out


def full(layer: NativeSparseAttention, x: Tensor) -> Tensor:
    with torch.no_grad():
        out: Tensor = layer(x)
    return out


def close(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("phi", PHIS)
@pytest.mark.parametrize("shared_kv", [False, True])
@pytest.mark.parametrize("size", [1, 3, 9])
def test_rows_of_different_lengths_decode_as_they_prefill(backend: str, phi: str, shared_kv: bool, size: int) -> None:
    layer, x = make_layer(small_config(phi), shared_kv=shared_kv, backend=backend), tokens(3, 45)
    wanted, cache, starts = full(layer, x), make_cache(layer, max_tokens=45), [18, 2, 11]
    sequences = [cache.new() for _ in starts]
    for row, (sequence, start) in enumerate(zip(sequences, starts, strict=True)):
        close(feed(cache, [sequence], x[row : row + 1, :start]), wanted[row : row + 1, :start])
    for first, last in pairwise(range(0, 28, size)):
        parts = [slice(start + first, start + last) for start in starts]
        out = feed(cache, sequences, torch.stack([x[row, part] for row, part in enumerate(parts)]))
        close(out, torch.stack([wanted[row, part] for row, part in enumerate(parts)]))


@pytest.mark.parametrize("shared_kv", [False, True])
def test_forks_share_what_was_and_go_their_own_ways(shared_kv: bool) -> None:
    layer, x = make_layer(shared_kv=shared_kv), tokens(2, 40)
    x[1, :21] = x[0, :21]
    wanted, cache = full(layer, x), make_cache(layer)
    trunk = cache.new()
    feed(cache, [trunk], x[:1, :21])
    free = cache.num_free_pages
    branch = cache.fork(trunk)
    assert cache.num_free_pages == free
    close(feed(cache, [branch, trunk], x.flip(0)[:, 21:30]), wanted.flip(0)[:, 21:30])
    close(feed(cache, [trunk], x[:1, 30:]), wanted[:1, 30:])
    cache.free(trunk)
    close(feed(cache, [branch], x[1:, 30:]), wanted[1:, 30:])


def test_a_rejected_step_is_taken_back() -> None:
    """Speculative decoding: eight tokens go in, a few of them stay."""
    layer, x = make_layer(), tokens(1, 50)
    wanted, cache = full(layer, x), make_cache(layer)
    sequence = cache.new()
    for kept in (8, 1, 5, 8, 0, 3, 7):
        length = cache.length(sequence)
        guess = torch.cat((x[:, length : length + kept], torch.full((1, 8 - kept, DIM), torch.nan).double()), 1)
        close(feed(cache, [sequence], guess)[:, :kept], wanted[:, length : length + kept])
        cache.truncate(sequence, length + kept)


def test_rollback_has_its_old_name_still() -> None:
    cache = PagedCache(make_layer(small_config("avg")), num_pages=2, max_tokens=8)
    with pytest.warns(DeprecationWarning, match="rollback"):
        cache.abandon()


def test_a_dry_run_leaves_no_trace() -> None:
    """What a CUDA graph is captured with, even where nothing could be taken back."""
    layer, x = make_layer(), tokens(1, 30)
    wanted, cache = full(layer, x), make_cache(layer, max_rollback=0)
    sequence = cache.new()
    feed(cache, [sequence], x[:, :23])
    free, rows = cache.num_free_pages, cache.rows([sequence])
    with torch.no_grad(), rows.dry_run():
        rows.layers[0].store.layer(torch.zeros(1, 5, DIM).double(), rows.layers[0])
        rows.prepare(5)
        rows.layers[0].store.layer(torch.zeros(1, 5, DIM).double(), rows.layers[0])
    assert (cache.length(sequence), cache.num_free_pages) == (23, free)
    close(feed(cache, [sequence], x[:, 23:]), wanted[:, 23:])


def test_pages_of_the_window_and_the_source_are_released() -> None:
    layer, x = make_layer(), tokens(1, MAX_TOKENS)
    cache, held, outputs = make_cache(layer, max_rollback=0), [], []
    sequence = cache.new()
    for token in x.split(1, 1):
        outputs.append(feed(cache, [sequence], token))
        held.append(80 - cache.num_free_pages)
    close(torch.cat(outputs, 1), full(layer, x))  # nothing that a later token asks for was among them
    selected, compressed, window, source = (
        8,
        4,
        2,
        1,
    )  # pages of 60 tokens, of 29 blocks, of the last 7 and the last 2 tokens
    assert held[-1] == selected + compressed + window + source
    assert max(held) <= cache.pages(layer, MAX_TOKENS, per_call=1, page_size=8, max_rollback=0) < 3 * 8 + 4
    assert cache.pages(layer, MAX_TOKENS, page_size=8) == 3 * 8 + 4
    with pytest.raises(ValueError, match=r"length must be at least 60, or 0: .*; got 30"):
        cache.truncate(sequence, 30)
    cache.truncate(sequence, 0)
    assert cache.num_free_pages == 80


def test_a_second_rollback_reaches_no_further_than_the_first() -> None:
    layer, x = make_layer(), tokens(1, 41)
    cache = make_cache(layer, max_rollback=3)
    sequence = cache.new()
    feed(cache, [sequence], x[:, :40])
    cache.truncate(sequence, 37)
    feed(cache, [sequence], x[:, 37:38])
    with pytest.raises(ValueError, match=r"length must be at least 37, or 0: .*; got 20"):
        cache.truncate(sequence, 20)
    cache.truncate(sequence, 37)
    close(feed(cache, [sequence], x[:, 37:]), full(layer, x)[:, 37:])


def test_an_emptied_sequence_begins_anew() -> None:
    """What it was longer than before does not release what it writes now."""
    layer, x = make_layer(), tokens(1, 40)
    cache = make_cache(layer, max_rollback=3)
    sequence = cache.new()
    feed(cache, [sequence], x)
    cache.truncate(sequence, 0)
    close(feed(cache, [sequence], x[:, :10]), full(layer, x)[:, :10])
    close(feed(cache, [sequence], x[:, 10:12]), full(layer, x)[:, 10:12])


def test_shared_keys_are_kept_whole() -> None:
    layer, x = make_layer(shared_kv=True), tokens(1, MAX_TOKENS)
    cache = make_cache(layer)
    sequence = cache.new()
    feed(cache, [sequence], x)
    cache.truncate(sequence, 7)
    close(feed(cache, [sequence], x[:, 7:]), full(layer, x)[:, 7:])


@pytest.mark.parametrize("shared_kv", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_its_bytes_are_known_before(shared_kv: bool, dtype: torch.dtype) -> None:
    layer = make_layer(shared_kv=shared_kv, dtype=dtype)
    cache = make_cache(layer)
    allocated = sum(x.untyped_storage().nbytes() for store in cache.stores for x in (store.k, store.v))
    assert PagedCache.bytes(layer, num_pages=80, page_size=8) == allocated == 81 * 8 * 2 * (6 + 5) * dtype.itemsize
    assert PagedCache.bytes([layer, layer], num_pages=80, page_size=8) == 2 * allocated


def test_out_of_pages_leaves_all_as_it_was() -> None:
    layer, x = make_layer(), tokens(2, 40)
    wanted, cache = full(layer, x), make_cache(layer, num_pages=9)
    sequences = [cache.new(), cache.new()]
    feed(cache, sequences, x[:, :8])
    with pytest.raises(OutOfPagesError, match="1 more tokens in each of 2 sequences take 6 pages; 1 are free"):
        feed(cache, sequences, x[:, 8:9])
    assert [cache.length(sequence) for sequence in sequences] == [8, 8]
    cache.free(sequences[0])
    close(feed(cache, sequences[1:], x[1:, 8:16]), wanted[1:, 8:16])


def test_a_call_that_fails_midway_leaves_it_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = make_layer(), tokens(2, 30)
    x[1, :11] = x[0, :11]
    wanted, cache = full(layer, x), make_cache(layer)
    trunk = cache.new()
    feed(cache, [trunk], x[:1, :11])
    sequences, free = [trunk, cache.fork(trunk)], cache.num_free_pages
    with monkeypatch.context() as patch:
        patch.setattr("nsa.paged.cache.paged_attention", lambda *args, **options: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            feed(cache, sequences, torch.full((2, 9, DIM), torch.nan).double())
    close(feed(cache, sequences, x[:, 11:]), wanted[:, 11:])
    for sequence in sequences:
        cache.truncate(sequence, 22)
        cache.free(sequence)
    assert cache.num_free_pages == 80 > free


def test_no_tokens_and_no_sequences_are_legal() -> None:
    layer = make_layer()
    cache = make_cache(layer)
    sequence = cache.new()
    assert feed(cache, [sequence], tokens(1, 0)).shape == (1, 0, DIM)
    feed(cache, [sequence], tokens(1, 10))
    assert feed(cache, [sequence], tokens(1, 0)).shape == (1, 0, DIM)
    assert cache.length(sequence) == 10


def test_a_step_costs_as_many_operations_late_as_early_and_waits_for_nothing() -> None:
    layer, x = make_layer(dtype=torch.float32), tokens(2, 202, dtype=torch.float32)
    cache, counts = make_cache(layer, max_tokens=202, num_pages=400), []
    sequences = [cache.new(), cache.new()]
    for length in (101, 201):
        feed(cache, sequences, x[:, cache.length(sequences[0]) : length - 1])
        feed(cache, sequences, x[:, length - 1 : length])
        cache.truncate(sequences[0], length - 1)
        cache.truncate(sequences[1], length - 1)
        rows = cache.rows(sequences)
        rows.prepare(1)
        with OpCounter() as counter, torch.no_grad():
            layer(x[:, length - 1 : length], rows.layers[0])
        counts.append(counter.ops)
        assert not counter.waits
    assert counts[0] == counts[1]


def test_made_in_inference_mode_under_autocast_it_serves_there() -> None:
    layer, x = make_layer(dtype=torch.float32), tokens(1, 24, dtype=torch.float32)
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        cache = make_cache(layer)
        sequence = cache.new()
        assert layer(x[:, :20], cache.rows([sequence]).layers[0]).dtype == torch.bfloat16
    with pytest.raises(TypeError, match=r"layer makes here, torch\.float32 on cpu; it was made for torch\.bfloat16"):
        feed(cache, [sequence], x[:, 20:])
    assert cache.length(sequence) == 20


def make_model() -> DecoderLM:
    torch.manual_seed(0)
    config = ModelConfig(dim=16, n_layers=3, n_heads=4, num_kv_heads=2, d_k=6, d_v=5, nsa=small_config())
    return DecoderLM(config).double()


def test_a_model_decodes_as_it_prefills_and_a_failure_in_one_layer_is_taken_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, text = make_model(), torch.randint(256, (2, 30), generator=torch.Generator().manual_seed(3))
    cache = PagedCache(model.attentions(), num_pages=60, max_tokens=30, page_size=8)
    with torch.no_grad():
        wanted = model(text)
        sequences = [cache.new(), cache.new()]
        close(model(text[:1, :9], cache.rows(sequences[:1])), wanted[:1, :9])
        close(model(text[1:, :14], cache.rows(sequences[1:])), wanted[1:, :14])
        free, rows = cache.num_free_pages, cache.rows(sequences)
        with monkeypatch.context() as patch:
            patch.setattr(model.blocks[1].attention.gates, "forward", lambda x: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                model(text[:, 14:20], rows)
        assert (cache.num_free_pages, [cache.length(s) for s in sequences]) == (free, [9, 14])
        out = model(torch.stack((text[0, 9:20], text[1, 14:25])), rows)
        close(out, torch.stack((wanted[0, 9:20], wanted[1, 14:25])))


def test_layers_out_of_turn_are_refused() -> None:
    layers = [make_layer(), make_layer()]
    cache = PagedCache(layers, num_pages=20, max_tokens=20, page_size=8)
    rows = cache.rows([cache.new()])
    with torch.no_grad(), pytest.raises(ValueError, match="cache must be called by the layers in their order"):
        layers[1](tokens(1, 2), rows.layers[1])
    with pytest.raises(RuntimeError, match="a step of 2 tokens was not prepared"):
        rows.commit(2)


REFUSED: list[tuple[Tensor, type[Exception], str]] = [
    (tokens(2, 50), ValueError, "cache has room for max_tokens=60 in a sequence; sequence 0 holds 11 and 50 more came"),
    (tokens(1, 2), ValueError, "x must have a row for each of the 2 sequences; got 1"),
    (tokens(2, 2, dtype=torch.float32), TypeError, "x must have the layer's dtype"),
]


@pytest.mark.parametrize(("wrong", "error", "message"), REFUSED)
def test_a_refused_call_changes_nothing(wrong: Tensor, error: type[Exception], message: str) -> None:
    layer, x = make_layer(), tokens(2, 24)
    cache = make_cache(layer)
    sequences = [cache.new(), cache.new()]
    feed(cache, sequences, x[:, :11])
    free = cache.num_free_pages
    with pytest.raises(error, match=message):
        feed(cache, sequences, wrong)
    assert cache.num_free_pages == free
    close(feed(cache, sequences, x[:, 11:]), full(layer, x)[:, 11:])


def test_gradients_and_documents_are_refused() -> None:
    layer = make_layer()
    cache = make_cache(layer)
    rows = cache.rows([cache.new()])
    with pytest.raises(ValueError, match="cache is for inference"):
        layer(tokens(1, 4), rows.layers[0])
    with torch.no_grad(), pytest.raises(ValueError, match="cache and cu_seqlens exclude each other"):
        layer(tokens(1, 4), rows.layers[0], documents(4))


def test_a_freed_sequence_and_one_given_twice_are_named() -> None:
    cache = make_cache(make_layer())
    first, second = cache.new(), cache.new()
    cache.free(first)
    for call in (cache.free, cache.fork, cache.length, lambda s: cache.truncate(s, 0), lambda s: cache.rows([s])):
        with pytest.raises(ValueError, match="sequence must be one that was made and not freed; got 0"):
            call(first)
    with pytest.raises(ValueError, match=r"sequences must be distinct; got \[1, 1\]"):
        cache.rows([second, second]).prepare(1)
    with pytest.raises(ValueError, match="length must be between 0 and the 0 tokens held; got 3"):
        cache.truncate(second, 3)


MADE_WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"layers": torch.nn.Linear(2, 2)}, TypeError, "layers must be NativeSparseAttention; got Linear"),
    ({"layers": []}, ValueError, "layers must hold at least one"),
    ({"layers": [make_layer(), make_layer(shared_kv=True)]}, ValueError, "alike in config and shared_kv"),
    ({"num_pages": 0}, ValueError, "num_pages must be at least 1; got 0"),
    ({"max_tokens": 1.5}, TypeError, "max_tokens must be an int; got 1.5"),
    ({"page_size": 12}, ValueError, "page_size must be a multiple of l_sel=8; got 12"),
    ({"max_rollback": -1}, ValueError, "max_rollback must be an int of at least 0; got -1"),
]


@pytest.mark.parametrize(("wrong", "error", "message"), MADE_WRONG)
def test_wrong_sizes_are_named(wrong: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        PagedCache(**{"layers": make_layer(), "num_pages": 4, "max_tokens": 8, **wrong})


def test_a_page_holds_64_rows_or_the_next_multiple_of_a_block() -> None:
    for l_sel, size in ((8, 64), (24, 72), (64, 64), (128, 128)):
        assert PagedCache(make_layer(small_config(l_sel=l_sel)), num_pages=1, max_tokens=1).page_size == size


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_was_read_is_counted_where_asked_for(backend: str) -> None:
    layer, x = make_layer(backend=backend), tokens(2, 40)
    cache = make_cache(layer)
    sequences = [cache.new(), cache.new()]
    feed(cache, sequences[:1], x[:1, :39])
    feed(cache, sequences[1:], x[1:, :5])
    rows = cache.rows(sequences, count_reads=True)
    with torch.no_grad():
        layer(torch.stack((x[0, 39:], x[1, 5:6])), rows.layers[0])
    (counted,) = (part.aux for part in rows.layers)
    assert counted is not None
    read = {branch: int(keys) for branch, keys in counted.keys_read.items()}
    # both key heads: 40 and 6 tokens; 19 and 2 blocks; 3 selected blocks of 8 and the one there is; a window of 8
    assert read == {"compressed": 2 * (19 + 2), "selected": 2 * (24 + 6), "window": 2 * (8 + 6)}
    pair = 8 * (6 + 5)
    found = {branch: int(count) for branch, count in counted.bytes_read(cache.stores[0].k, cache.stores[0].v).items()}
    assert found == {branch: keys * pair for branch, keys in read.items()}


def test_nothing_is_counted_unless_asked_for() -> None:
    """Counting costs three sums on the device per layer and call."""
    layer, x = make_layer(), tokens(1, 6)
    cache = make_cache(layer)
    rows = cache.rows([cache.new()])
    with torch.no_grad():
        layer(x, rows.layers[0])
    assert [part.aux for part in rows.layers] == [None]


def test_a_graph_needs_a_gpu() -> None:
    model = make_model()
    cache = PagedCache(model.attentions(), num_pages=10, max_tokens=8, page_size=8)
    rows = cache.rows([cache.new()])
    with pytest.raises(ValueError, match="model must be on an NVIDIA GPU for a CUDA graph; it is on cpu"):
        GraphedStep(model, rows)
    with pytest.raises(ValueError, match="num_tokens must be at most 8; got 9"):
        GraphedStep(model, rows, 9)
    assert rows.layers[0].why_no_graph() == "'torch' would serve it"


@pytest.mark.parametrize("backend", BACKENDS)
def test_aux_says_what_each_layer_read(backend: str) -> None:
    """Counts per branch, lse in float32 of float64 keys, and the choice, of rows of different lengths."""
    layer = make_layer(backend=backend)
    cache = make_cache(layer)
    sequences, lengths = [cache.new(), cache.new()], [21, 9]
    x = tokens(2, 30)
    for row, (sequence, length) in enumerate(zip(sequences, lengths, strict=True)):
        feed(cache, [sequence], x[row : row + 1, :length])
    rows = cache.rows(sequences, count_reads=True)
    with torch.no_grad():
        layer(torch.stack([x[row, length : length + 2] for row, length in enumerate(lengths)]), rows.layers[0])
    aux = rows.layers[0].aux
    assert aux is not None
    seen = [[t + 1 for t in range(length, length + 2)] for length in lengths]  # tokens at or before each query
    blocks = sum(max((t - 4) // 2 + 1, 0) for row in seen for t in row)
    window = sum(min(t, 8) for row in seen for t in row)
    chosen = sum(sum(max(min(t - 8 * j, 8), 0) for j in picked) for t, picked in _picked(seen, aux.block_indices))
    found = {branch: int(count) for branch, count in aux.keys_read.items()}
    assert found == {"compressed": 2 * blocks, "selected": chosen, "window": 2 * window}
    assert {branch: lse.dtype for branch, lse in aux.lse.items()} == dict.fromkeys(found, torch.float32)
    assert aux.backend == backend


def _picked(seen: list[list[int]], block_indices: Tensor) -> list[tuple[int, list[int]]]:
    """(tokens that a query sees, the blocks that it chose) for each row, query and key/value head."""
    return [
        (t, [j for j in heads if j >= 0])
        for row, chosen in zip(seen, block_indices.tolist(), strict=True)
        for t, of_query in zip(row, chosen, strict=True)
        for heads in of_query
    ]
