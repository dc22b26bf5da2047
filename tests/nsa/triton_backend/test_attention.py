"""A whole call against the parts of the same backend: one function, the same kernels, fewer launches."""

from __future__ import annotations

import functools
import gc
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

import nsa
from nsa import backends
from nsa.geometry import Layout
from regression.detectors import memory

pytest.importorskip("triton")

from nsa import triton_backend
from nsa.triton_backend import attention, compressed_window, dispatch, selected_kv_major
from tests.nsa.triton_backend import masking

CONFIG = nsa.NSAConfig(l=8, d=4, l_sel=16, n_sel=3, w=13)
SHARING = {"all": (0, 0, 0), "none": (0, 1, 2), "selected and window": (0, 1, 1), "source and selected": (0, 0, 1)}
"""Which of three pairs of keys and values the source, the selected branch and the window take."""


def draw(
    device: torch.device, queries: int, keys: int, heads: tuple[int, int, int, int], dtype: torch.dtype, sharing: str
) -> tuple[Tensor, Tensor, list[tuple[Tensor, Tensor]]]:
    """q, gates, and (k, v) of source, selected branch and window; `heads` are (Hq, Hkv, Dk, Dv)."""
    (heads_q, heads_kv, dk, dv), generator = heads, torch.Generator().manual_seed(queries)

    def leaf(*shape: int) -> Tensor:
        return torch.randn(1, *shape, generator=generator).to(device, dtype).requires_grad_()

    q, gates = leaf(queries, heads_q, dk), leaf(queries, heads_q, 3)
    pairs = [(leaf(keys, heads_kv, dk), leaf(keys, heads_kv, dv)) for _ in range(3)]
    return q, gates, [pairs[i] for i in SHARING[sharing]]


def outcome(call: Any, q: Tensor, gates: Tensor, pairs: Any, layout: Layout, pools: bool) -> tuple[Any, Any]:
    """(all that the call gives, the gradients of its inputs); the upstream gradient reaches o and every lse."""
    source, selected, window = pairs
    o, (blocks, lse, read) = call(q, selected, window, source, pools, gates, layout, 0.3, True)
    upstream = [torch.linspace(-1, 1, x.numel(), device=x.device).view(x.shape).to(x.dtype) for x in (o, *lse)]
    leaves = list({id(x): x for x in (q, gates, *itertools.chain(*pairs))}.values())
    return (o, blocks, *lse, *read), torch.autograd.grad([o, *lse], leaves, upstream)


def agree(q: Tensor, gates: Tensor, pairs: Any, layout: Layout, *, pools: bool = True, tolerance: float = 2e-5) -> None:
    (found, gradients), (wanted, true) = (
        outcome(call, q, gates, pairs, Layout(*layout_arguments(layout)), pools)
        for call in (triton_backend.attend, backends.by_parts(triton_backend))
    )
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one, other)
    for one, other in zip(gradients, true, strict=True):
        assert one.dtype == other.dtype
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance * float(other.abs().max()))


def layout_arguments(layout: Layout) -> tuple[Any, ...]:
    """Of a new layout, of which nothing is computed yet."""
    return layout.num_queries, layout.num_keys, layout.config, layout.device, layout.cu_seqlens


@pytest.fixture(params=["merged", "by query", "masked"])
def forward_of_selected(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Real sizes take the KV-stationary forward, short ones masks, both of which add up the branches; tiny ones only
    when told to."""
    monkeypatch.setattr(dispatch, "KV_MAJOR_MIN_QUERIES", 1 if request.param == "merged" else 2**20)
    if request.param == "masked":
        masking.serve(monkeypatch)


@pytest.mark.usefixtures("forward_of_selected")
@pytest.mark.parametrize("sharing", SHARING)
def test_it_gives_what_the_parts_give(device: torch.device, sharing: str) -> None:
    inputs = draw(device, 27, 40, (4, 2, 16, 8), torch.float32, sharing)
    agree(*inputs, Layout(27, 40, CONFIG, device))


@pytest.mark.usefixtures("forward_of_selected")
def test_of_packed_documents(device: torch.device) -> None:
    documents = torch.tensor([0, 9, 9, 10, 40], dtype=torch.int32, device=device)
    inputs = draw(device, 40, 40, (4, 2, 16, 8), torch.float32, "all")
    agree(*inputs, Layout(40, 40, CONFIG, device, documents))


@pytest.mark.parametrize("most_parts", [1, 100])
def test_of_tiles_of_keys_whose_queries_several_programs_share(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, most_parts: int
) -> None:
    """Partial sums of dk and dv: those of compressed keys are added up beforehand where they are many."""
    # 16 heads in a group, so that a tile has few tokens
    inputs, layout = draw(device, 27, 40, (16, 1, 16, 8), torch.float32, "none"), (27, 40, CONFIG, device)
    _, whole = outcome(triton_backend.attend, *inputs, Layout(*layout), True)
    monkeypatch.setattr(compressed_window, "MIN_TOKENS_PER_SPLIT", 2)
    monkeypatch.setattr(attention, "MOST_PARTS", most_parts)
    _, shared = outcome(triton_backend.attend, *inputs, Layout(*layout), True)
    for one, other in zip(shared, whole, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-5, atol=2e-5 * float(other.abs().max()))


def test_of_groups_that_take_a_program_per_query(device: torch.device) -> None:
    """dq comes from a kernel of its own there, and another adds up the branches."""
    inputs = draw(device, 20, 20, (9, 1, 16, 16), torch.float32, "all")
    agree(*inputs, Layout(20, 20, CONFIG, device))


def test_of_blocks_that_the_caller_compressed(device: torch.device) -> None:
    q, gates, pairs = draw(device, 20, 20, (2, 1, 16, 8), torch.float32, "selected and window")
    pairs[0] = tuple(x[:, :4].detach().requires_grad_() for x in pairs[0])  # 20 tokens have four blocks
    agree(q, gates, pairs, Layout(20, 20, CONFIG, device), pools=False)


@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (5, 5), (3, 7)])
def test_before_there_is_a_compressed_block(device: torch.device, queries: int, keys: int) -> None:
    inputs = draw(device, queries, keys, (2, 1, 16, 8), torch.float32, "all")
    agree(*inputs, Layout(queries, keys, CONFIG, device))


def test_every_gradient_is_written(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where some tiles of the index are empty and leave no partial sum."""
    monkeypatch.setattr(selected_kv_major, "BACKWARD_PAIRS", 8)
    inputs, layout = draw(device, 21, 40, (4, 2, 16, 8), torch.float32, "all"), (21, 40, CONFIG, device)
    _, wanted = outcome(triton_backend.attend, *inputs, Layout(*layout), True)
    with memory.poisoned_allocations():
        _, found = outcome(triton_backend.attend, *inputs, Layout(*layout), True)
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one, other)


@pytest.mark.usefixtures("forward_of_selected")
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("sharing", ["all", "none"])
def test_what_is_not_finite_reaches_as_far_as_by_parts(device: torch.device, sharing: str, value: float) -> None:
    q, gates, pairs = draw(device, 40, 40, (2, 1, 16, 8), torch.float32, sharing)
    with torch.no_grad():
        pairs[1][0][0, 21, 0, 3] = value
    (found, gradients), (wanted, true) = (
        outcome(call, q, gates, pairs, Layout(40, 40, CONFIG, device), True)
        for call in (triton_backend.attend, backends.by_parts(triton_backend))
    )
    for one, other in zip((*found, *gradients), (*wanted, *true), strict=True):
        assert torch.equal(one.isfinite(), other.isfinite())


@pytest.mark.gpu
@pytest.mark.parametrize("sharing", ["all", "none"])
@pytest.mark.parametrize("heads", [(12, 2, 64, 64), (64, 4, 128, 128), (32, 8, 128, 128), (16, 1, 192, 128)], ids=str)
@pytest.mark.parametrize(("queries", "keys", "packed"), [(2048, 2048, False), (4000, 8192, False), (6000, 6000, True)])
def test_at_real_sizes(
    device: torch.device, heads: tuple[int, int, int, int], queries: int, keys: int, packed: bool, sharing: str
) -> None:
    """Gradients of both are rounded to bfloat16, those of the parts once for each branch and once for each sum."""
    documents = None
    if packed:
        documents = torch.tensor([0, 5, 1500, 1500, 4099, keys], dtype=torch.int32, device=device)
    inputs = draw(device, queries, keys, heads, torch.bfloat16, sharing)
    agree(*inputs, Layout(queries, keys, nsa.NSAConfig(), device, documents), tolerance=2**-6)


def test_a_part_of_a_tensor_goes_backward_as_its_copy_does(device: torch.device) -> None:
    """As a rank that shares a sequence asks for the rows of one of its pieces (`nsa.parallel.branches`)."""
    generator = torch.Generator().manual_seed(0)
    do, *outputs = (torch.randn(2, 24, 4, 16, generator=generator).to(device) for _ in range(4))
    lse, dlse = ([torch.randn(2, 24, 4, generator=generator).to(device) for _ in range(3)] for _ in range(2))
    gates = torch.rand(2, 24, 4, 3, generator=generator).to(device)

    def of_piece(x: Tensor, *, copied: bool) -> Tensor:
        return x[:, 8:16].contiguous() if copied else x[:, 8:16]

    answers = []
    for copied in (False, True):
        piece = functools.partial(of_piece, copied=copied)
        rows, d_gates = triton_backend.gated_rows(
            piece(do), [*map(piece, dlse)], [*map(piece, outputs)], [*map(piece, lse)], piece(gates)
        )
        answers.append([d_gates, *(x for branch in rows for x, _ in branch)])
    for part, copy in zip(*answers, strict=True):
        assert part.is_contiguous()
        assert torch.equal(part, copy)


@pytest.mark.parametrize("batch", [1, 2])
def test_a_piece_is_written_where_it_stands(device: torch.device, batch: int) -> None:
    """As in a tensor of its own; of two sequences it is no contiguous part. No other row is written."""
    rows, generator = slice(3, 9), torch.Generator().manual_seed(batch)
    drawn = [torch.randn(batch, 12, 4, channels, generator=generator).to(device) for channels in (16, 16, 16, 3)]
    *outputs, gates = (x[:, rows] for x in drawn)
    o_cmp, o_sel, o_win = outputs
    o, dq = (torch.full_like(drawn[0], 7.0) for _ in range(2))
    wanted_o, wanted_dq = o.clone(), dq.clone()
    wanted_o[:, rows] = triton_backend.combine((o_cmp, o_sel, o_win), gates)
    wanted_dq[:, rows] = o_sel + o_cmp + o_win
    triton_backend.combine_into(o[:, rows], (o_cmp, o_sel, o_win), gates)
    triton_backend.add_gradients(dq[:, rows], o_cmp, o_sel, o_win)
    assert torch.equal(o, wanted_o)
    assert torch.equal(dq, wanted_dq)


@pytest.mark.parametrize("group", [2, 9])
def test_dq_of_the_branches_adds_up_to_that_of_a_whole_call(device: torch.device, group: int) -> None:
    """Bit for bit, as a rank adds it: small groups' kernel rounds its own before it adds the others' to it."""
    q, gates, (pair, *_) = draw(device, 24, 24, (group, 1, 16, 16), torch.bfloat16, "all")
    layout, do = Layout(24, 24, CONFIG, device), torch.linspace(-1, 1, q.numel(), device=device).view(q.shape).to(q)
    o, (blocks, *_) = triton_backend.attend(q, pair, pair, pair, True, gates, layout, 0.3, True)
    (whole,) = torch.autograd.grad(o, q, do)
    with torch.no_grad():
        compressed = [triton_backend.compress(x, layout) for x in pair]
        branches = [
            triton_backend.compressed_attention(q, *compressed, layout, 0.3),
            triton_backend.selected_attention(q, *pair, blocks, layout, 0.3),
            triton_backend.window_attention(q, *pair, layout, 0.3),
        ]
        outputs, lse, _ = zip(*branches, strict=True)
        of_branches, _ = triton_backend.gated_rows(do, [torch.zeros_like(x) for x in lse], outputs, lse, gates)
        rows = [[x for x, _ in branch] for branch in of_branches]
        dq_cmp, *_ = triton_backend.compressed_attention_backward(rows[0], q, *compressed, layout, 0.3)
        dq_sel, *_ = triton_backend.selected_attention_backward(rows[1], q, *pair, blocks, layout, 0.3)
        dq_win, *_ = triton_backend.window_attention_backward(rows[2], q, *pair, layout, 0.3)
        dq = torch.empty_like(whole)
        triton_backend.add_gradients(dq, dq_cmp, dq_sel, dq_win)
        assert torch.equal(dq, whole)


def _gradients(device: torch.device, kept: int) -> tuple[list[Tensor], int]:
    """(gradients of the last backward pass, peak bytes) after `kept` passes that keep the graph."""
    q, gates, (pair, *_) = draw(device, 64, 64, (16, 1, 16, 16), torch.float32, "all")
    gc.collect()
    with memory.Allocations() as made:
        o = nsa.nsa_attention(q, *pair, gates, CONFIG, backend="triton")
        upstream = torch.linspace(-1, 1, o.numel(), device=device).view(o.shape)
        for _ in range(kept):
            torch.autograd.grad(o, (q, *pair, gates), upstream, retain_graph=True)
        return list(torch.autograd.grad(o, (q, *pair, gates), upstream)), made.peak_bytes


def test_a_last_backward_pass_takes_the_memory_of_the_branches_outputs(device: torch.device) -> None:
    """Three tensors as large as the output; one that may be followed by another leaves them as they are."""
    (once, peak), (again, peak_when_kept) = _gradients(device, 0), _gradients(device, 2)
    for one, other in zip(once, again, strict=True):
        assert torch.equal(one, other)
    of_output = 64 * 16 * 16 * 4
    assert peak_when_kept - peak >= 2.9 * of_output
