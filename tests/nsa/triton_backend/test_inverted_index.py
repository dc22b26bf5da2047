"""The fused index holds what `nsa.inverted_index` finds, which has tests of its own."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import nsa

pytest.importorskip("triton")

from nsa import inverted_index as plain
from nsa.geometry import Layout
from nsa.triton_backend import inverted_index

CONFIG = nsa.NSAConfig(l=4, d=2, l_sel=8, n_sel=4, w=13)
BATCH, KV_HEADS = 2, 3


def draw(queries: int, keys: int, device: torch.device, cu_seqlens: torch.Tensor | None) -> tuple[torch.Tensor, Layout]:
    """Choices of blocks that each query has, some slots of which are empty."""
    layout = Layout(queries, keys, CONFIG, device, cu_seqlens)
    generator = torch.Generator().manual_seed(queries)
    shape = (BATCH, queries, KV_HEADS, CONFIG.n_sel)
    chosen = torch.randint(layout.max_blocks, shape, generator=generator)
    chosen = torch.minimum(chosen, (layout.positions.cpu() // CONFIG.l_sel)[:, None, None])
    chosen[torch.rand(shape, generator=generator) < 0.3] = -1
    return chosen.int().to(device), layout


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("first", "last", "chunk"), [(0, 70, 70), (0, 70, 24), (10, 58, 17), (69, 70, 1)])
@pytest.mark.parametrize("size", [3, 8, 512])
def test_it_holds_what_the_plain_one_finds(
    device: torch.device, first: int, last: int, chunk: int, size: int, packed: bool
) -> None:
    cu_seqlens = torch.tensor([0, 20, 21, 70], dtype=torch.int32, device=device) if packed else None
    chosen, layout = draw(70, 70 if packed else 90, device, cu_seqlens)
    found = inverted_index.build(chosen, layout, first, last, chunk=chunk, size=size, with_slots=True)

    count, n = last - first, CONFIG.n_sel
    block = chosen[:, first:last].transpose(1, 2).long()  # [B, Hkv, count, n]
    cells_of_chunk = BATCH * KV_HEADS * layout.max_blocks
    kv_row = torch.arange(BATCH * KV_HEADS, device=device).view(BATCH, KV_HEADS, 1, 1)
    chunks_before = torch.arange(count, device=device) // chunk * cells_of_chunk
    cell = kv_row * layout.max_blocks + (layout.blocks_before[first:last] + chunks_before)[:, None] + block
    wanted = plain.build(torch.where(block < 0, -1, cell).flatten(), size, -(-count // chunk) * cells_of_chunk)
    for name, other in (
        ("pair", "order"), ("begin", "begin"), ("end", "end"), ("cell", "block"), ("first_tile", "first_tile")
    ):  # fmt: skip
        assert torch.equal(getattr(found, name), getattr(wanted, other)), name
    assert torch.equal(found.query, (wanted.order % (count * n) + first * n).int())
    without = inverted_index.build(chosen, layout, first, last, chunk=chunk, size=size, with_slots=False)
    assert torch.equal(without.query, found.query // n)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_cells_that_no_longer_fit_in_16_bits_make_no_difference(
    device: torch.device, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen, layout = draw(70, 90, device, None)
    few = inverted_index.build(chosen, layout, 0, 70, chunk=24, size=8, with_slots=True)
    monkeypatch.setattr(inverted_index, "sorted_as", lambda _: dtype)
    many = inverted_index.build(chosen, layout, 0, 70, chunk=24, size=8, with_slots=True)
    for field in dataclasses.fields(few):
        assert torch.equal(getattr(few, field.name), getattr(many, field.name)), field.name
