"""The selected branch under a mask of its blocks, which short sequences take and tiny ones only when told to."""

from __future__ import annotations

import pytest
import torch

import nsa
from nsa.geometry import Layout

pytest.importorskip("triton")

import triton.language as tl

from nsa.triton_backend import (
    architecture,
    attention_ops,
    compressed_window,
    dispatch,
    partial_sums,
    selected,
    selected_masked,
)
from tests.nsa.triton_backend import masking
from tests.nsa.triton_backend.test_selected_kv_major import agree, draw

MASKED = nsa.NSAConfig(l=4, d=2, l_sel=16, n_sel=3, w=13)


@pytest.fixture(autouse=True)
def every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with several programs for the queries of a tile of keys; in the interpreter what is not finite is looked for
    16 keys, and rows, at a time, so that it takes several steps."""
    masking.serve(monkeypatch)
    monkeypatch.setattr(compressed_window, "MIN_TOKENS_PER_SPLIT", 16)
    if dispatch.interpreted():
        monkeypatch.setattr(compressed_window, "CHECKED", tl.constexpr(16))


@pytest.fixture
def masked_calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of blocks of each call that these kernels serve."""
    calls, chosen = list[int](), selected_masked._chosen

    def noted(bits: torch.Tensor, layout: Layout) -> compressed_window.BlockMask:
        calls.append(layout.max_blocks)
        return chosen(bits, layout)

    monkeypatch.setattr(selected_masked, "_chosen", noted)
    return calls


def draw_masked(device: torch.device, queries: int, keys: int, heads: int, num_kv_heads: int, dv: int) -> tuple:
    q, k, v, _ = draw(device, queries, keys, heads, num_kv_heads, dv)
    blocks = nsa.select_blocks(q, nsa.compress(k, MASKED), MASKED, num_keys=keys, backend="reference")
    return q, k, v, blocks


def run_masked(backend: str, inputs: tuple) -> list[torch.Tensor]:
    q, k, v, blocks = inputs
    o, lse = nsa.selected_attention(q, k, v, blocks, MASKED, backend=backend)
    return [o, lse, *torch.autograd.grad(o.nan_to_num().sum() + lse.nan_to_num(neginf=0.0).sum(), (q, k, v))]


@pytest.mark.parametrize(
    ("queries", "keys", "heads", "num_kv_heads", "dv"),
    [(70, 70, 4, 2, 24), (33, 90, 3, 1, 16), (1, 40, 2, 2, 16), (40, 40, 8, 1, 16)],
)
def test_it_agrees_with_the_oracle(
    device: torch.device, masked_calls: list[int], queries: int, keys: int, heads: int, num_kv_heads: int, dv: int
) -> None:
    inputs = draw_masked(device, queries, keys, heads, num_kv_heads, dv)
    agree(run_masked("triton", inputs), run_masked("reference", inputs))
    assert masked_calls == 2 * [-(-keys // 16)]


def test_the_last_bit_of_a_mask_is_a_block(device: torch.device) -> None:
    """64 blocks, of which the last one is chosen: its bit is the sign of the number."""
    q, k, v, _ = draw(device, 8, 1024, 2, 1, 16)
    blocks = torch.tensor([0, 31, 63], dtype=torch.int32, device=device).expand(1, 8, 1, 3)
    inputs = q, k, v, blocks
    agree(run_masked("triton", inputs), run_masked("reference", inputs))


def test_more_blocks_than_bits_go_elsewhere(device: torch.device, masked_calls: list[int]) -> None:
    inputs = draw_masked(device, 4, 1025, 2, 1, 16)
    agree(run_masked("triton", inputs), run_masked("reference", inputs))
    assert masked_calls == []


@pytest.mark.parametrize("l_sel", [8, 24])
def test_blocks_that_steps_do_not_divide_go_elsewhere(
    device: torch.device, masked_calls: list[int], l_sel: int
) -> None:
    q, k, v, _ = draw(device, 60, 60, 2, 1, 16)
    config = nsa.NSAConfig(l=4, d=2, l_sel=l_sel, n_sel=3, w=13)
    blocks = nsa.select_blocks(q, nsa.compress(k, config), config, backend="reference")
    found, true = (nsa.selected_attention(q, k, v, blocks, config, backend=b)[0] for b in ("triton", "reference"))
    torch.testing.assert_close(found, true, rtol=1e-5, atol=2e-5)
    assert masked_calls == []


def test_documents_go_elsewhere(device: torch.device, masked_calls: list[int]) -> None:
    """Blocks are numbered in each document anew."""
    q, k, v, _ = draw(device, 60, 60, 2, 1, 16)
    cu_seqlens = torch.tensor([0, 20, 60], dtype=torch.int32, device=device)
    blocks = torch.tensor([0, 1, -1], dtype=torch.int32, device=device).expand(1, 60, 1, 3)
    found, true = (
        nsa.selected_attention(q, k, v, blocks, MASKED, cu_seqlens=cu_seqlens, backend=backend)[0]
        for backend in ("triton", "reference")
    )
    torch.testing.assert_close(found, true, rtol=1e-5, atol=2e-5)
    assert masked_calls == []


def test_the_length_of_a_shared_sequence_chooses(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part of a long one takes what the whole takes, though it is short itself; and the other way round."""
    q = torch.zeros(1, 64, 2, 16, device=device)
    k = q[:, :, :1]
    monkeypatch.setattr(dispatch, "MASKED_MIN_QUERIES", 1024)

    def chosen(sequence_tokens: int | None) -> dispatch.Variant:
        blocks = dispatch.SelectionBlocks(16, count=4, sequence_tokens=sequence_tokens)
        return dispatch.variant("selected_backward_q", q, k, k, blocks)

    masked, other = dispatch.Variant.MASKED, dispatch.Variant.KV_MAJOR
    assert [chosen(n) for n in (None, 512, 2048, 8192)] == [other, other, masked, other]


@pytest.mark.parametrize(("whole", "part"), [(8192, 1024), (2048, 512), (4096, 4096)])
@pytest.mark.parametrize("l_sel", [16, 64])
def test_a_part_takes_the_kernel_of_the_whole(
    monkeypatch: pytest.MonkeyPatch, device: torch.device, whole: int, part: int, l_sel: int
) -> None:
    """Also where there are more blocks in the whole than a mask has bits, and where the part has too few queries."""
    masking.serve(monkeypatch, 1024)
    config = nsa.NSAConfig(l_sel=l_sel, l=16)

    def of(tokens: int, sequence_tokens: int | None) -> dispatch.Variant:
        layout = Layout(tokens, tokens, config, device, sequence_tokens=sequence_tokens)
        q = torch.zeros(1, 1, 1, 1, device=device).expand(1, tokens, 6, 64)
        return dispatch.variant("selected_forward", q, q[:, :, :1], q[:, :, :1], selected._blocks(layout, config.n_sel))

    assert of(part, whole) is of(whole, None)


@pytest.mark.parametrize("operand", ["q", "k", "v"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_reaches_the_rows_that_see_it_and_no_others(
    device: torch.device, operand: str, value: float
) -> None:
    inputs = draw_masked(device, 64, 64, 2, 1, 16)
    with torch.no_grad():
        inputs["qkv".index(operand)][0, 29, 0, 3] = value
    (found, *gradients), (true, *_) = (run_masked(backend, inputs) for backend in ("triton", "reference"))
    found, true = (~o.isfinite().all(-1) for o in (found, true))
    t = torch.arange(64, device=device)[:, None]
    sees = (t == 29) if operand == "q" else (inputs[3] == 29 // 16).any(-1)[0] & (t >= 29)
    assert true.any()
    assert not (true & ~found).any()
    assert not (found & ~sees).any()
    assert gradients[1][0, ~sees[:, 0]].isfinite().all(), "dq of a query that does not see it"
    if operand == "q":
        seen = (inputs[3][0, 29] == t // 16).any(-1) & (t[:, 0] <= 29)
        assert all(x[0, ~seen].isfinite().all() for x in gradients[2:]), "dk and dv of a key that it does not see"


@pytest.mark.parametrize("splits", [1, 7, 8, 9, 20])
def test_partial_sums_add_up(device: torch.device, splits: int) -> None:
    parts = [torch.randn(splits, 1, 37, 3, size, device=device) for size in (16, 24)]
    for found, part in zip(partial_sums.add_parts(parts, torch.float32), parts, strict=True):
        torch.testing.assert_close(found, part.sum(0))


@pytest.mark.parametrize(
    ("tiles", "queries", "wanted"),
    [(64, 2048, 8), (128, 2048, 4), (512, 2048, 3), (4096, 2048, 1), (32, 1024, 16), (0, 64, 1)],
)
def test_no_program_takes_many_queries_unless_there_are_many_programs(
    monkeypatch: pytest.MonkeyPatch, tiles: int, queries: int, wanted: int
) -> None:
    monkeypatch.undo()
    assert compressed_window._splits(tiles, queries, 512, masked=True) == wanted


def test_only_masked_queries_are_cut_so(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    """However they are cut the sums are the same, so that nothing else would notice."""
    told, splits = list[bool](), compressed_window._splits

    def listening(*numbers: int, masked: bool) -> int:
        told.append(masked)
        return splits(*numbers, masked=masked)

    monkeypatch.setattr(compressed_window, "_splits", listening)
    q, k, v, blocks = draw_masked(device, 40, 40, 2, 1, 16)
    run_masked("triton", (q, k, v, blocks))
    nsa.window_attention(q, k, v, MASKED, backend="triton")[0].sum().backward()
    assert told == [True, False]


def test_a_table_says_up_to_which_length_it_is_sooner(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of Hopper, with 12/2 heads of 64 and 32/8 of 128; one that was not measured never is."""
    monkeypatch.undo()

    def served(kernel: str, group: int, dim: int, keys: int, architecture_: int = 90) -> bool:
        monkeypatch.setattr(architecture, "of_gpu", lambda _: architecture_)
        k = torch.zeros(1, 1, 1, 1, dtype=torch.bfloat16).expand(1, keys, 1, dim)
        q = k.expand(1, keys, group, dim)
        return dispatch.variant(f"selected_{kernel}", q, k, k, dispatch.SelectionBlocks(64)) is dispatch.Variant.MASKED

    assert served("forward", 6, 64, 2048)
    assert not served("forward", 6, 64, 2049)
    assert served("backward_q", 6, 64, 2048)
    assert not served("backward_q", 6, 64, 2049)
    assert served("forward", 4, 128, 2048)
    assert not served("forward", 16, 128, 2048)
    assert not served("backward_q", 4, 128, 2048)
    assert not served("forward", 6, 64, 2048, architecture_=86)


def test_choices_of_none_read_nothing(device: torch.device) -> None:
    q, k, v, _ = draw(device, 40, 40, 2, 1, 16)
    blocks = torch.full((1, 40, 1, 3), -1, dtype=torch.int32, device=device)
    inputs = q, k, v, blocks
    found = run_masked("triton", inputs)
    agree(found, run_masked("reference", inputs))
    assert not found[0].any()
    assert found[1].isneginf().all()


@pytest.mark.parametrize("window", [True, False])
def test_an_operator_of_a_graph_keeps_the_masks(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, window: bool
) -> None:
    """Made anew they took a fiftieth of the backward pass of 2 x 2048 tokens."""
    made, bits_of, flags_of = list[str](), selected_masked._bits, selected_masked.finite_keys
    monkeypatch.setattr(selected_masked, "_bits", lambda blocks: made.append("bits") or bits_of(blocks))
    monkeypatch.setattr(selected_masked, "finite_keys", lambda *kv: made.append("flags") or flags_of(*kv))
    q, k, v, _ = draw(device, 70, 70, 4, 2, 24)
    more = (k + 1, v + 1) if window else (None, None)
    gates, layout = torch.rand(*q.shape[:3], 3, device=device), Layout(70, 70, MASKED, device)
    gradients = []
    for short in (True, False):
        monkeypatch.setattr(attention_ops, "_is_short", lambda *_, short=short: short)
        made.clear()
        o, *_ = attention_ops.attention(q, k, v, *more, *4 * (None,), gates, layout, 0.5, observed=False)
        assert not made  # the choice writes the bits, and other lanes of a graph the flags
        gradients.append(torch.autograd.grad(o.sum(), (q, k, v)))
        assert made == ([] if short else ["bits"] + ["flags"] * window)
    for one, other in zip(*gradients, strict=True):
        assert torch.equal(one, other)
