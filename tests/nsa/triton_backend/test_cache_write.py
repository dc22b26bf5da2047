"""A cache's write as one kernel: every bit of what a prefill gives, in its place, and nothing anywhere else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test
from torch import Tensor

import nsa
from nsa import KVCache, NativeSparseAttention, NSAConfig, PagedCache
from nsa.backends import why_not_triton
from nsa.geometry import num_compressed_blocks
from nsa.layer import PerBranch, per_branch

triton = pytest.importorskip("triton")

from nsa.triton_backend import cache_write, dispatch
from tests.nsa.layers import make_layer, small_config, tokens
from tests.nsa.paged.machine import PagedMachine

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HKV, DK, DV, MAX_TOKENS = 2, 20, 16, 45
CONFIGS = [small_config(), small_config(l=8, d=4), small_config(l=3, d=3, l_sel=6)]
PAGE_SIZE = 24
"""Of 24 tokens: every size of CONFIGS divides it."""
needs_interpreter = pytest.mark.skipif(not dispatch.interpreted(), reason="the fault is injected into the interpreter")
New = tuple[PerBranch, PerBranch]


def layer_of(config: NSAConfig, *, shared_kv: bool = False, dtype: torch.dtype = torch.float32) -> Any:
    sizes = (8, 2 * HKV, HKV, DK, DV, config)
    return NativeSparseAttention(*sizes, shared_kv=shared_kv, backend="triton", dtype=dtype, device=DEVICE)


def draw(batch: int, length: int, layer: NativeSparseAttention) -> New:
    """Keys and values of each branch, as the layer cuts them from one projection."""
    generator, sets = torch.Generator().manual_seed(length), layer.num_kv_sets
    both = (torch.randn(batch, length, sets * HKV, dim, generator=generator) for dim in (DK, DV))
    k, v = (per_branch(x.to(DEVICE, layer.q.weight.dtype).chunk(sets, 2)) for x in both)
    return k, v


def cut(new: New, rows: Any) -> New:
    """Some rows (and sequences) of every branch."""
    k, v = (per_branch([x[rows] for x in branches]) for branches in new)
    return k, v


def means(x: Tensor, config: NSAConfig) -> Tensor:
    """The compressed rows of a prefill."""
    return nsa.compress(x, config, backend="triton")


def in_one_cache(config: NSAConfig, size: int, *, shared_kv: bool, dtype: torch.dtype) -> None:
    """Write chunks of `size` tokens to a KVCache, and hold every bit of its buffers to what it should be."""
    layer = layer_of(config, shared_kv=shared_kv, dtype=dtype)
    (k, v), cache = draw(2, MAX_TOKENS - 3, layer), KVCache(layer, batch_size=2, max_tokens=MAX_TOKENS)
    buffers = (cache._k, cache._v, cache._k_compressed, cache._v_compressed)
    for buffer in buffers:
        buffer.fill_(torch.nan)
    with torch.no_grad():
        for first in range(0, MAX_TOKENS - 3, size):
            chunk = cut((k, v), (slice(None), slice(first, first + size)))
            cache.stage(*chunk)
            cache.commit(chunk[0][0].shape[1])
    wanted = [torch.full_like(buffer, torch.nan) for buffer in buffers]
    for own, new in zip(wanted[:2], (k, v), strict=True):
        own[:, :, : MAX_TOKENS - 3] = torch.stack(new[: layer.num_kv_sets])
    for own, new in zip(wanted[2:], (k[0], v[0]), strict=True):
        compressed = means(new, config)
        own[:, : compressed.shape[1]] = compressed
    for name, found, true in zip(("k", "v", "k_compressed", "v_compressed"), buffers, wanted, strict=True):
        assert torch.equal(found.isnan(), true.isnan()), f"{name}: rows written"
        assert torch.equal(found.nan_to_num(), true.nan_to_num()), f"{name}: bits"


def in_pages(
    config: NSAConfig, size: int, *, shared_kv: bool = False, dtype: torch.dtype = torch.float32, graphed: bool = False
) -> None:
    """The same for sequences of different lengths in pages, told from all other rows of all pages."""
    layer = layer_of(config, shared_kv=shared_kv, dtype=dtype)
    new, starts, steps = draw(3, MAX_TOKENS, layer), [19, 1, 30], 15 // size
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
    for name, found, true in zip("kv", (store.k, store.v), wanted, strict=True):
        assert torch.equal(found[1:].isnan(), true[1:].isnan()), f"{name}: rows written"
        assert torch.equal(found[1:].nan_to_num(), true[1:].nan_to_num()), f"{name}: bits"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: f"{c.l}/{c.d}")
def test_any_chunking_writes_the_bits_of_a_prefill(config: NSAConfig, dtype: torch.dtype) -> None:
    if reason := why_not_triton(torch.empty(1, dtype=dtype, device=DEVICE), torch.empty(1, device=DEVICE)):
        pytest.skip(reason)
    for size, shared_kv in ((1, False), (7, True), (7, False), (MAX_TOKENS, False)):
        in_one_cache(config, size, shared_kv=shared_kv, dtype=dtype)


@pytest.mark.parametrize("size", [1, 3, 15])
@pytest.mark.parametrize("shared_kv", [False, True])
def test_pages_hold_the_bits_of_a_prefill_and_nothing_else_is_written(size: int, shared_kv: bool) -> None:
    in_pages(small_config(), size, shared_kv=shared_kv)
    in_pages(small_config(l=8, d=4), size, shared_kv=shared_kv, dtype=torch.float16, graphed=True)


def _wrong_place(patch: pytest.MonkeyPatch) -> None:
    """A token's row is written one further."""
    healthy = cache_write._row.fn

    def row(TABLE, table_b, b, number, inside, rows, PAGE):  # type: ignore[no-untyped-def]
        return healthy(TABLE, table_b, b, number, inside, rows, PAGE) + 1

    patch.setattr(cache_write, "_row", triton.jit(row))


def _block_left_out(patch: pytest.MonkeyPatch) -> None:
    """A block that the last of the new tokens completes is not written."""
    healthy = cache_write.visible_blocks.fn

    def visible_blocks(t, SIZE, STRIDE):  # type: ignore[no-untyped-def]
        return healthy(t - 1, SIZE, STRIDE)

    patch.setattr(cache_write, "visible_blocks", triton.jit(visible_blocks))


def _one_page(patch: pytest.MonkeyPatch) -> None:
    """The page of a program's first row is taken for that of all its rows."""

    def row(TABLE, table_b, b, number, inside, rows, PAGE):  # type: ignore[no-untyped-def]
        tl = triton.language
        if PAGE == 0:
            return b * rows + number
        page = tl.load(TABLE + b * table_b + tl.min(number, axis=0) // PAGE).to(tl.int64)
        return page * PAGE + number % PAGE

    patch.setattr(cache_write, "_row", triton.jit(row))


def _values_of_keys(patch: pytest.MonkeyPatch) -> None:
    """New tokens of a block are not told from old ones, whose rows another program may not have written yet."""

    def load_rows(base, offsets, inside, SIZE, PADDED):  # type: ignore[no-untyped-def]
        return healthy(base, offsets, inside & (offsets == 0), SIZE, PADDED)

    healthy = cache_write.load_rows.fn
    patch.setattr(cache_write, "load_rows", triton.jit(load_rows))


FAULTS: dict[Callable[[pytest.MonkeyPatch], None], str] = {
    _wrong_place: "rows written|bits",
    _block_left_out: "rows written",
    _one_page: "rows written|bits",
}
