"""A cache's write as one kernel: every bit of what a prefill gives, in its place, and nothing anywhere else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test
from torch import Tensor

import nsa
from nsa import KVCache, NativeSparseAttention, NSAConfig, PagedCache
from nsa.backends import why_not_triton
from nsa.layer import PerBranch, per_branch

pytest.importorskip("triton")

import triton.language as tl

from nsa.triton_backend import cache_write
from tests.nsa.layers import make_layer, small_config, tokens
from tests.nsa.paged.machine import PagedMachine

pytestmark = pytest.mark.usefixtures("device")  # on a GPU, where there is one
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HKV, DK, DV, LENGTH, MAX_TOKENS, PAGE_SIZE = 2, 20, 16, 22, 25, 8
CONFIGS = {"4/2": small_config(), "8/4": small_config(l=8, d=4), "3/3": small_config(l=3, d=3, l_sel=6)}
New = tuple[PerBranch, PerBranch]


def layer_of(config: NSAConfig, *, shared_kv: bool = False, dtype: torch.dtype = torch.float32) -> Any:
    sizes = (8, 2 * HKV, HKV, DK, DV, config)
    return NativeSparseAttention(*sizes, shared_kv=shared_kv, backend="triton", dtype=dtype, device=DEVICE)


def draw(batch: int, length: int, layer: NativeSparseAttention) -> New:
    """Keys and values of each branch, as the layer cuts them from one projection; two numbers are not finite."""
    generator, sets = torch.Generator().manual_seed(length), layer.num_kv_sets
    both = [torch.randn(batch, length, sets * HKV, dim, generator=generator) for dim in (DK, DV)]
    both[0][0, 5, 0, 3], both[1][0, 9, 1, 2] = torch.inf, -torch.inf
    k, v = (per_branch(x.to(DEVICE, layer.q.weight.dtype).chunk(sets, 2)) for x in both)
    return k, v


def cut(new: New, rows: Any) -> New:
    """Some rows (and sequences) of every branch."""
    k, v = (per_branch([x[rows] for x in branches]) for branches in new)
    return k, v


def means(x: Tensor, config: NSAConfig) -> Tensor:
    """The compressed rows of a prefill."""
    return nsa.compress(x, config, backend="triton")


def in_one_cache(
    config: NSAConfig,
    size: int,
    *,
    shared_kv: bool = False,
    dtype: torch.dtype = torch.float32,
    rejected: bool = False,
) -> None:
    """Write chunks of `size` tokens to a KVCache, and hold every bit of its buffers to what it should be.

    If `rejected`, other tokens come before each chunk and are taken back.
    """
    layer = layer_of(config, shared_kv=shared_kv, dtype=dtype)
    (k, v), cache = draw(2, LENGTH, layer), KVCache(layer, batch_size=2, max_tokens=MAX_TOKENS)
    buffers = (cache._k, cache._v, cache._k_compressed, cache._v_compressed)
    for buffer in buffers:
        buffer.fill_(torch.nan)
    with torch.no_grad():
        for first in range(0, LENGTH, size):
            chunk = cut((k, v), (slice(None), slice(first, first + size)))
            if rejected:
                held = len(cache)
                cache.stage(*(per_branch([-x for x in branches]) for branches in chunk))
                cache.commit(chunk[0][0].shape[1])
                cache.truncate(held)
            cache.stage(*chunk)
            cache.commit(chunk[0][0].shape[1])
    wanted = [torch.full_like(buffer, torch.nan) for buffer in buffers]
    for own, new in zip(wanted[:2], (k, v), strict=True):
        own[:, :, :LENGTH] = torch.stack(new[: layer.num_kv_sets])
    for own, new in zip(wanted[2:], (k[0], v[0]), strict=True):
        compressed = means(new, config)
        own[:, : compressed.shape[1]] = compressed
    equal(buffers, wanted, ("k", "v", "k_compressed", "v_compressed"))


def equal(buffers: Sequence[Tensor], wanted: Sequence[Tensor], names: Sequence[str]) -> None:
    """Every bit, and NaN where no row should be written."""
    for name, found, true in zip(names, buffers, wanted, strict=True):
        assert torch.equal(found.isnan(), true.isnan()), f"{name}: rows written"
        assert torch.equal(found.nan_to_num(), true.nan_to_num()), f"{name}: bits"


def in_pages(
    config: NSAConfig, size: int, *, shared_kv: bool = False, dtype: torch.dtype = torch.float32, graphed: bool = False
) -> None:
    """The same for sequences of different lengths in pages, told from all other rows of all pages."""
    layer = layer_of(config, shared_kv=shared_kv, dtype=dtype)
    new, starts, steps = draw(3, MAX_TOKENS, layer), [7, 1, 13], 9 // size
    cache = PagedCache(layer, num_pages=40, max_tokens=MAX_TOKENS, page_size=PAGE_SIZE, max_rollback=MAX_TOKENS)
    store = cache.stores[0]
    store.k.fill_(torch.nan)
    store.v.fill_(torch.nan)
    sequences = [cache.new() for _ in starts]

    def step(rows: Any, chunk: New) -> None:
        rows.every_step_alike = graphed
        length = chunk[0][0].shape[1]
        rows.prepare(length)
        with torch.no_grad():
            store.append(*chunk, rows.new_tokens(length))
        rows.commit(length)

    for b, start in enumerate(starts):
        step(cache.rows([sequences[b]]), cut(new, (slice(b, b + 1), slice(start))))
    together = cache.rows(sequences)
    for number in range(steps):
        at = torch.tensor(starts)[:, None] + number * size + torch.arange(size)
        step(together, cut(new, (torch.arange(3)[:, None], at)))

    wanted = torch.full_like(store.k, torch.nan), torch.full_like(store.v, torch.nan)
    names = ("tokens",) if shared_kv else ("source", "selected", "window")
    for b, sequence in enumerate(sequences):
        length = starts[b] + steps * size
        for own, branches in zip(wanted, new, strict=True):
            streams = {name: branches[i][b, :length] for i, name in enumerate(names)}
            streams["compressed"] = means(branches[0][b : b + 1, :length], config)[0]
            for name, rows in streams.items():
                pages = cache.tables.table(sequence, name).pages
                for row, true in enumerate(rows):
                    own[pages[row // PAGE_SIZE], row % PAGE_SIZE] = true
    equal([store.k[1:], store.v[1:]], [own[1:] for own in wanted], "kv")


@pytest.mark.parametrize(
    ("sizes", "chunk", "dtype", "shared_kv"),
    [
        ("4/2", 1, torch.float32, True),
        ("4/2", LENGTH, torch.float16, False),
        ("8/4", 7, torch.bfloat16, False),
        ("3/3", 5, torch.float32, False),
    ],
)
def test_any_chunking_writes_the_bits_of_a_prefill(sizes: str, chunk: int, dtype: torch.dtype, shared_kv: bool) -> None:
    x = torch.empty(1, dtype=dtype, device=DEVICE)
    if reason := why_not_triton(x, x):
        pytest.skip(reason)
    in_one_cache(CONFIGS[sizes], chunk, shared_kv=shared_kv, dtype=dtype)


def test_tokens_that_were_taken_back_leave_nothing() -> None:
    in_one_cache(CONFIGS["8/4"], 5, rejected=True)


@pytest.mark.parametrize(
    ("sizes", "chunk", "shared_kv", "graphed"),
    [("4/2", 1, True, True), ("8/4", 3, False, False), ("4/2", 9, False, True)],
)
def test_pages_hold_the_bits_of_a_prefill_and_nothing_else_is_written(
    sizes: str, chunk: int, shared_kv: bool, graphed: bool
) -> None:
    in_pages(CONFIGS[sizes], chunk, shared_kv=shared_kv, graphed=graphed)


@pytest.mark.parametrize(("phi", "shared_kv"), [("mlp", True), pytest.param("avg", False, marks=pytest.mark.nightly)])
def test_a_layer_decodes_in_both_caches_as_it_prefills(phi: str, shared_kv: bool) -> None:
    """A learned phi compresses by itself what the kernel has written."""
    layer = make_layer(small_config(phi), shared_kv=shared_kv, backend="triton", dtype=torch.float32, device=DEVICE)
    x = tokens(1, 8, dtype=torch.float32).to(DEVICE)
    side_by_side, paged = KVCache(layer, batch_size=1, max_tokens=8), PagedCache(layer, num_pages=20, max_tokens=8)
    rows = paged.rows([paged.new()])
    with torch.no_grad():
        wanted = layer(x)
        for cache in (side_by_side, rows.layers[0]):
            out = torch.cat([layer(chunk, cache) for chunk in x.split([6, 1, 1], 1)], 1)
            torch.testing.assert_close(out, wanted, rtol=1e-4, atol=1e-5)


def test_operations_of_pages_lose_nothing() -> None:
    effort = settings(max_examples=4, stateful_step_count=25, derandomize=True, phases=[Phase.generate])
    run_state_machine_as_test(TritonMachine, settings=effort)


class TritonMachine(PagedMachine):
    """The paged cache against plain lists, written by the kernel."""

    backend, dtype = "triton", torch.float32


@pytest.mark.interpreter
def test_a_mean_waits_for_no_other_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """New tokens are read from where they came: another program may not have stored them yet."""
    config = CONFIGS["4/2"]
    layer = layer_of(config)
    cache, (k, v) = KVCache(layer, batch_size=2, max_tokens=MAX_TOKENS), draw(2, LENGTH, layer)
    monkeypatch.setattr(cache_write, "_copy", lambda *arguments: None)
    *_, k_compressed, v_compressed = cache.stage(k, v)
    equal((k_compressed, v_compressed), (means(k[0], config), means(v[0], config)), "kv")


def _row_in_the_wrong_place(patch: pytest.MonkeyPatch) -> None:
    """Rows are written one further."""
    healthy = cache_write._row
    patch.setattr(cache_write, "_row", lambda *arguments: healthy(*arguments) + 1)


def _block_left_out(patch: pytest.MonkeyPatch) -> None:
    """A block that the last of the new tokens completes is not written."""
    healthy = cache_write.visible_blocks
    patch.setattr(cache_write, "visible_blocks", lambda t, *sizes: healthy(t - 1, *sizes))


def _one_page(patch: pytest.MonkeyPatch) -> None:
    """The page of a program's first row is taken for that of all its rows."""
    healthy = cache_write._row

    def row(TABLE, table_b, b, number, inside, rows, PAGE):  # type: ignore[no-untyped-def]
        in_one_page = tl.min(number, axis=0) // PAGE * PAGE + number % PAGE
        return healthy(TABLE, table_b, b, in_one_page, inside, rows, PAGE)

    patch.setattr(cache_write, "_row", row)


def _window_in_the_selected_pages(patch: pytest.MonkeyPatch) -> None:
    """The window's rows go where the selected branch's belong."""
    healthy = cache_write.write

    def write(k: Any, v: Any, into: Any, *others: Any) -> None:
        healthy(k, v, (into[0], into[1], into[1]), *others)

    patch.setattr(cache_write, "write", write)


FAULTS: dict[Callable[[pytest.MonkeyPatch], None], str] = {
    _row_in_the_wrong_place: "k: rows written",
    _block_left_out: "k(_compressed)?: rows written",
    _one_page: "k: rows written",
    _window_in_the_selected_pages: "k: rows written",
}


@pytest.mark.interpreter
@pytest.mark.parametrize("inject", FAULTS)
def test_a_fault_in_pages_is_found(
    monkeypatch: pytest.MonkeyPatch, inject: Callable[[pytest.MonkeyPatch], None]
) -> None:
    inject(monkeypatch)
    with pytest.raises(AssertionError, match=FAULTS[inject]):
        in_pages(CONFIGS["8/4"], 3)


@pytest.mark.interpreter
@pytest.mark.parametrize("inject", [_row_in_the_wrong_place, _block_left_out])
def test_a_fault_side_by_side_is_found(
    monkeypatch: pytest.MonkeyPatch, inject: Callable[[pytest.MonkeyPatch], None]
) -> None:
    inject(monkeypatch)
    with pytest.raises(AssertionError, match=FAULTS[inject]):
        in_one_cache(CONFIGS["4/2"], 7)
