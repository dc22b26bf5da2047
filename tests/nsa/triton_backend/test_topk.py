"""The choice of the n best blocks, against a sort of the same scores."""

from __future__ import annotations

import itertools

import pytest
import torch

import nsa
from nsa.geometry import Layout

pytest.importorskip("triton")

from nsa.triton_backend import selected_masked, topk


def wanted(scores: torch.Tensor, current: int, config: nsa.NSAConfig) -> list[int]:
    """n best of the blocks 0 ... current by (forced, score, lower index), ascending, padded with -1."""

    def forced(block: int) -> bool:
        return block < config.init_blocks or block > current - config.local_blocks

    order = sorted(range(current + 1), key=lambda j: (not forced(j), -float(scores[j].nan_to_num(0.0)), j))
    chosen = sorted(order[: config.n_sel])
    return chosen + [-1] * (config.n_sel - len(chosen))


@pytest.mark.parametrize("n", [1, 3, 5, 16])
@pytest.mark.parametrize("kind", ["random", "equal", "few values", "zeros", "nan", "tiny and huge"])
def test_choice_is_that_of_a_sort(device: torch.device, n: int, kind: str) -> None:
    config = nsa.NSAConfig(
        l=8, d=8, l_sel=8, n_sel=n, init_blocks=1 if n > 2 else 0, local_blocks=2 if n > 2 else 1, w=8
    )
    length = 8 * 21 + 3
    generator = torch.Generator().manual_seed(n)
    p = torch.rand(1, length, 2, 21, generator=generator)  # l = d = l': a block's score is one probability
    if kind == "equal":
        p[:] = 0.25
    elif kind == "few values":
        p = (p * 3).round() / 3
    elif kind == "zeros":
        p[:] = 0.0
    elif kind == "nan":
        p[..., 5] = float("nan")
    elif kind == "tiny and huge":
        p = torch.exp(200 * (p - 0.5)).clamp(1e-44, 1e38)
    layout = Layout(length, length, config, device)
    out = torch.empty(1, length, 2, n, dtype=torch.int32, device=device)
    topk.choose(p.to(device), layout, 0, length, out)
    found = out.cpu()
    for t in range(0, length, 7):
        visible = (t + 1) // 8  # blocks that have ended; the current one scores 0
        for h in range(2):
            scores = torch.cat([p[0, t, h, :visible], torch.zeros(22 - visible)])
            assert found[0, t, h].tolist() == wanted(scores, t // 8, config), (t, h)


@pytest.mark.parametrize("n", [3, 16])
@pytest.mark.parametrize("kind", ["random", "peaked", "next floats", "all but a few the same", "descending"])
def test_choice_among_many_blocks_is_that_of_a_sort(device: torch.device, n: int, kind: str) -> None:
    blocks, queries = 1050, 5
    config = nsa.NSAConfig(l=8, d=8, l_sel=8, n_sel=n, init_blocks=1, local_blocks=2, w=8)
    p = torch.rand(1, queries, 1, blocks, generator=torch.Generator().manual_seed(n))
    if kind == "peaked":
        p = (40 * (p - 1)).exp()
    elif kind == "next floats":  # each is the next float of the one before, in any order
        p = (p.argsort(-1).int() + torch.tensor(0.125).view(torch.int32)).view(torch.float32)
    elif kind == "all but a few the same":
        p = torch.where(p > 0.99, p, 0.5)
    elif kind == "descending":
        p = p.sort(-1, descending=True).values
    length = 8 * blocks
    out = torch.empty(1, queries, 1, n, dtype=torch.int32, device=device)
    topk.choose(p.to(device), Layout(queries, length, config, device), 0, queries, out)
    for i in range(queries):
        t = length - queries + i
        visible = (t + 1) // 8
        scores = torch.cat([p[0, i, 0, :visible], torch.zeros(blocks - visible)])
        assert out[0, i, 0].tolist() == wanted(scores, t // 8, config), i


@pytest.mark.parametrize("keys", [40, 300])
def test_choice_by_scores_is_that_by_probabilities(device: torch.device, keys: int) -> None:
    config, queries = nsa.NSAConfig(l=4, d=2, l_sel=8, n_sel=5, w=30), 33
    layout = Layout(queries, keys, config, device)
    p = torch.rand(2, queries, 2, layout.num_slots, generator=torch.Generator().manual_seed(keys)).to(device)
    seen = torch.arange(layout.num_slots, device=device) < layout.compressed_interval[1][:, None, None]
    width = -(-layout.max_blocks // topk.READ_AT_ONCE) * topk.READ_AT_ONCE
    padded = torch.nn.functional.pad(torch.where(seen, p, 0.0), (1, 4 * width - layout.num_slots))
    scores = padded[..., 0:-1:4]
    for offset, weight in enumerate(topk.weights(config)[1][1:], start=1):
        scores = scores + weight * padded[..., offset::4][..., :width]
    has_any = 4 * torch.arange(width, device=device) - 1 < layout.compressed_interval[1][:, None, None]
    by_scores, by_probabilities = (
        torch.empty(2, queries, 2, config.n_sel, dtype=torch.int32, device=device) for _ in range(2)
    )
    topk.choose(torch.where(has_any, scores, torch.inf), layout, 0, queries, by_scores, summed=True)
    topk.choose(torch.where(seen, p, torch.inf), layout, 0, queries, by_probabilities)
    assert torch.equal(by_scores, by_probabilities)


@pytest.mark.parametrize(("keys", "n"), [(33, 5), (512, 16)])
def test_a_choice_is_written_as_bits_too(device: torch.device, keys: int, n: int) -> None:
    """Of fewer blocks than are chosen, and of 64; the second half of the queries in a call of its own."""
    config, queries = nsa.NSAConfig(l=4, d=2, l_sel=8, n_sel=n, w=30), 30
    layout = Layout(queries, keys, config, device)
    p = torch.rand(2, queries, 2, layout.num_slots, generator=torch.Generator().manual_seed(keys)).to(device)
    out = torch.empty(2, queries, 2, n, dtype=torch.int32, device=device)
    bits = torch.empty(2, queries, 2, dtype=torch.int64, device=device)
    for first in (0, 15):
        topk.choose(p[:, first : first + 15].contiguous(), layout, first, 15, out, bits=bits)
    assert torch.equal(bits, selected_masked._bits(out))
    assert (layout.max_blocks == 64) == bool((bits < 0).any())


@pytest.mark.parametrize("documents", [None, (30, 1, 0, 39)])
def test_queries_choose_alike_piece_by_piece(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, documents: tuple[int, ...] | None
) -> None:
    """Scores of 24 queries at a time, which is no multiple of a tile's, for 70 queries."""
    config = nsa.NSAConfig(l=4, d=2, l_sel=8, n_sel=4, w=13)
    generator = torch.Generator().manual_seed(7)
    q, k = (torch.randn(1, 70, heads, 16, generator=generator).to(device) for heads in (4, 2))
    cu_seqlens = None
    if documents is not None:
        cu_seqlens = torch.tensor([0, *itertools.accumulate(documents)], dtype=torch.int32, device=device)
    k_cmp = nsa.compress(k, config, cu_seqlens=cu_seqlens)
    monkeypatch.setattr("nsa.triton_backend.scores.CHUNK", 24)

    def chosen(backend: str) -> torch.Tensor:
        return nsa.select_blocks(q, k_cmp, config, num_keys=70, cu_seqlens=cu_seqlens, backend=backend)

    assert torch.equal(chosen("triton"), chosen("reference"))
