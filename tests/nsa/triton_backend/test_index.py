"""The index holds the tiles that `nsa.torch_backend.index` finds, which has tests of its own, under other numbers."""

from __future__ import annotations

import pytest
import torch

import nsa

pytest.importorskip("triton")

from nsa.geometry import Layout
from nsa.torch_backend import index as plain
from nsa.triton_backend import index

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


def agree(
    found: index.Index, chosen: torch.Tensor, layout: Layout, first: int, last: int, chunk: int, size: int
) -> None:
    """Fail unless it holds what the plain index finds."""
    (batch, _, num_kv_heads, n), count = chosen.shape, last - first
    block = chosen[:, first:last].transpose(1, 2).long()  # [B, Hkv, count, n]
    cells_of_chunk = batch * num_kv_heads * layout.max_blocks
    kv_row = torch.arange(batch * num_kv_heads, device=chosen.device).view(batch, num_kv_heads, 1, 1)
    chunks_before = torch.arange(count, device=chosen.device) // chunk * cells_of_chunk
    cell = kv_row * layout.max_blocks + (layout.blocks_before[first:last] + chunks_before)[:, None] + block
    wanted = plain.build(torch.where(block < 0, -1, cell).flatten(), size, -(-count // chunk) * cells_of_chunk)
    assert torch.equal(found.query_slot, (wanted.order % (count * n) + first * n).int())
    full, other_full = found.begin < found.end, wanted.begin < wanted.end
    for name, other in (("begin", "begin"), ("end", "end"), ("cell", "block")):
        assert torch.equal(getattr(found, name)[full], getattr(wanted, other)[other_full]), name
    # a cell's tiles stand side by side from `first_tile` on, and what is left there and behind the last cell is empty
    number = torch.arange(full.numel(), device=full.device)
    own = (number >= found.first_tile[found.cell]) & (number < found.first_tile[found.cell + 1])
    assert own[full].all()
    later = full[1:] & ~full[:-1]  # a full tile behind an empty one begins another cell
    assert (found.cell[1:][later] > found.cell[:-1][later]).all()


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("first", "last", "chunk"), [(0, 70, 70), (0, 70, 24), (10, 58, 17), (69, 70, 1)])
@pytest.mark.parametrize("size", [1, 3, 8, 512])
def test_it_holds_what_the_plain_one_finds(
    device: torch.device, first: int, last: int, chunk: int, size: int, packed: bool
) -> None:
    cu_seqlens = torch.tensor([0, 20, 21, 70], dtype=torch.int32, device=device) if packed else None
    chosen, layout = draw(70, 70 if packed else 90, device, cu_seqlens)
    found = index.build(chosen, layout, first, last, chunk=chunk, size=size)
    agree(found, chosen, layout, first, last, chunk, size)
    if (size, chunk, packed) == (1, 70, False):
        assert found.first_tile.diff().max() > index.AT_ONCE, "no cell has more tiles than are written at a time"


def test_several_programs_share_its_work(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index, "PAIRS_PER_PROGRAM", 64)
    monkeypatch.setattr(index, "CELLS_PER_PROGRAM", 16)
    chosen, layout = draw(70, 90, device, None)
    found = index.build(chosen, layout, 10, 58, chunk=17, size=3)
    agree(found, chosen, layout, 10, 58, 17, 3)


@pytest.mark.parametrize(("queries", "keys", "num_kv_heads"), [(7, 604, 31), (8, 2048, 8)])
def test_cells_up_to_where_16_bits_end_and_beyond(
    device: torch.device, queries: int, keys: int, num_kv_heads: int
) -> None:
    """2**15 - 1 of them, the most that are sorted as 16 bits beside the number for none; and one more."""
    config = nsa.NSAConfig(l=4, d=2, l_sel=4, n_sel=4, w=13)
    layout = Layout(queries, keys, config, device)
    assert num_kv_heads * layout.max_blocks * queries in (2**15 - 1, 2**15)
    generator = torch.Generator().manual_seed(queries)
    shape = (1, queries, num_kv_heads, config.n_sel)
    chosen = torch.randint(-1, layout.max_blocks, shape, generator=generator).int().to(device)
    chosen[0, -1, -1, -1] = layout.max_blocks - 1
    found = index.build(chosen, layout, 0, queries, chunk=1, size=8)
    agree(found, chosen, layout, 0, queries, 1, 8)


@pytest.mark.gpu
@pytest.mark.parametrize(("chunk", "size"), [(65536, 512), (32768, 128)])
def test_at_real_sizes(device: torch.device, chunk: int, size: int) -> None:
    """65,536 queries of 4 groups, which choose 16 of 1024 blocks, the first one always."""
    config, queries = nsa.NSAConfig(), 65536
    layout = Layout(queries, queries, config, device)
    current = (layout.positions // config.l_sel)[:, None, None]
    chosen = (torch.rand(1, queries, 4, config.n_sel, device=device) * (current + 1)).int()
    chosen[..., 0] = 0
    first_16 = torch.arange(config.n_sel, device=device, dtype=torch.int32)
    chosen = torch.where(current < config.n_sel, torch.where(first_16 <= current, first_16, -1), chosen).contiguous()
    found = index.build(chosen, layout, 0, queries, chunk=chunk, size=size)
    agree(found, chosen, layout, 0, queries, chunk, size)
