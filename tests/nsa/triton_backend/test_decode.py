"""The fused decode: what the reference says, in pages and side by side, for lengths that only the device knows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import nsa
from nsa.backends import decoder
from nsa.kv import DecodeOutput, KVView

pytest.importorskip("triton")

from nsa.triton_backend import decode, decode_attention, decode_kernels
from tests.nsa.layers import make_layer, small_config

pytestmark = pytest.mark.usefixtures("device")  # on a GPU, where there is one
CONFIG = nsa.NSAConfig(l=4, d=2, l_sel=8, n_sel=4, w=13)
WIDE = nsa.NSAConfig(l=8, d=4, l_sel=16, n_sel=4, w=40)  # a tile of keys fits in a block, and in a page
Inputs = dict[str, Any]


@pytest.fixture(autouse=True)
def many_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several programs for one row, in a short text."""
    monkeypatch.setattr(decode, "KEYS", 16)
    monkeypatch.setattr(decode, "MAX_SPLITS", 4)
    monkeypatch.setattr(decode_kernels, "SCORES", 64)  # and several tiles of probabilities, from 64 blocks on
    monkeypatch.setattr(decode, "FEW_CHANNELS", 16)  # and of channels, where there are 24


def draw(
    batch: int, queries: int, keys: int, heads: int, num_kv_heads: int, dk: int, dv: int, config: nsa.NSAConfig
) -> Inputs:
    """Queries, three sets of keys, compressed keys and gates; on a GPU where there is one."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator().manual_seed(queries + keys)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device)

    k, v = (tuple(normal(batch, keys, num_kv_heads, d) for _ in range(3)) for d in (dk, dv))
    cmp = {f"{x}_compressed": nsa.compress(s[0], config, backend="reference") for x, s in (("k", k), ("v", v))}
    return {"q": normal(batch, queries, heads, dk), "k": k, "v": v, "gates": normal(batch, queries, heads, 3), **cmp}


def whole(x: Inputs, config: nsa.NSAConfig, backend: str, **options: Any) -> tuple[Tensor, nsa.Aux]:
    return nsa.nsa_attention(**x, config=config, backend=backend, return_aux=True, **options)


def agree(found: tuple[Tensor, nsa.Aux], wanted: tuple[Tensor, nsa.Aux]) -> None:
    (o, aux), (true_o, true_aux) = found, wanted
    assert torch.equal(aux.block_indices, true_aux.block_indices)
    torch.testing.assert_close(o, true_o, rtol=1e-5, atol=2e-5, equal_nan=True)
    for branch in true_aux.lse:
        torch.testing.assert_close(aux.lse[branch], true_aux.lse[branch], rtol=1e-5, atol=2e-5, equal_nan=True)
        assert aux.keys_read[branch] == true_aux.keys_read[branch]


@pytest.mark.parametrize(
    ("queries", "keys", "heads", "num_kv_heads", "dk", "dv"),
    [
        (1, 100, 4, 2, 16, 24),
        (2, 3, 2, 2, 16, 16),
        (3, 70, 6, 2, 20, 8),
        (8, 37, 3, 1, 16, 16),
        (1, 90, 17, 1, 16, 16),
        (1, 400, 4, 2, 16, 16),
    ],
)
def test_it_agrees_with_the_oracle(
    monkeypatch: pytest.MonkeyPatch, queries: int, keys: int, heads: int, num_kv_heads: int, dk: int, dv: int
) -> None:
    x = draw(2, queries, keys, heads, num_kv_heads, dk, dv, CONFIG)
    wanted = whole(x, CONFIG, "reference")
    agree(whole(x, CONFIG, "triton"), wanted)
    agree(with_many_scores_and_rows(monkeypatch, x, CONFIG), wanted)


def with_many_scores_and_rows(
    monkeypatch: pytest.MonkeyPatch, x: Inputs, config: nsa.NSAConfig
) -> tuple[Tensor, nsa.Aux]:
    """The call with probabilities by a launch of their own, and all channels in one program of the last launch."""
    monkeypatch.setattr(decode, "FEW_BLOCKS", 0)
    monkeypatch.setattr(decode, "FEW_ROWS_PER_SM", 0)
    return whole(x, config, "triton")


class Grids:
    """Stands in for a kernel, and keeps the grids of its launches."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.seen: list[tuple[int, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        self.seen.append(grid)
        return self.kernel[grid]


def test_few_scores_take_a_launch_less_and_few_rows_more_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    probabilities, merge = Grids(decode_kernels._group_probabilities), Grids(decode_kernels._merge)
    monkeypatch.setattr(decode_kernels, "_group_probabilities", probabilities)
    monkeypatch.setattr(decode_kernels, "_merge", merge)
    x = draw(2, 1, 100, 4, 2, 16, 24, CONFIG)
    whole(x, CONFIG, "triton")
    assert (probabilities.seen, merge.seen) == ([], [(8, 2)])
    with_many_scores_and_rows(monkeypatch, x, CONFIG)
    assert (probabilities.seen, merge.seen[1:]) == ([(1, 2, 2)], [(8, 1)])


@pytest.mark.parametrize("keys", [36, 60, 100, 120])
def test_the_last_visible_block_can_be_chosen(monkeypatch: pytest.MonkeyPatch, keys: int) -> None:
    """No block is forced, so that none stands in the choice whatever its score."""
    config = nsa.NSAConfig(l=4, d=2, l_sel=8, n_sel=2, w=13, init_blocks=0, local_blocks=0)
    x = draw(2, 8, keys, 2, 1, 16, 16, config)
    wanted = whole(x, config, "reference")
    agree(whole(x, config, "triton"), wanted)
    agree(with_many_scores_and_rows(monkeypatch, x, config), wanted)


@pytest.mark.parametrize(
    "changes",
    [
        {"w": 1},
        {"w": 200},
        {"n_sel": 9},
        {"init_blocks": 0, "local_blocks": 0},
        {"d": 8},
        {"d": 8, "l_sel": 8},
        {"l": 16, "l_sel": 32},
        {"l": 4, "l_sel": 12},
    ],
)
def test_it_agrees_whatever_the_config(changes: dict[str, int]) -> None:
    config = nsa.NSAConfig(**{"l": 8, "d": 4, "l_sel": 16, "n_sel": 3, "w": 40, **changes})
    x = draw(1, 2, 120, 2, 1, 16, 16, config)
    agree(whole(x, config, "triton"), whole(x, config, "reference"))


def test_scores_are_read_four_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tile of 512 scores, of which the last that a query sees is not the last of four."""
    monkeypatch.setattr(decode_kernels, "SCORES", 8192)
    config = nsa.NSAConfig(l=2, d=1, l_sel=8, n_sel=4, w=13, init_blocks=0, local_blocks=0)
    x = draw(1, 3, 299, 16, 1, 16, 16, config)
    agree(whole(x, config, "triton"), whole(x, config, "reference"))


@pytest.mark.parametrize("scale", [0.0, -0.3, 2.5])
def test_it_agrees_whatever_the_scale(scale: float) -> None:
    x = draw(1, 2, 60, 2, 1, 16, 16, CONFIG)
    agree(whole(x, CONFIG, "triton", scale=scale), whole(x, CONFIG, "reference", scale=scale))


def test_keys_and_gates_need_not_be_contiguous() -> None:
    x = draw(2, 2, 40, 4, 2, 16, 16, CONFIG)
    spread = {name: value for name, value in x.items() if name in ("k", "v")}
    x |= {name: tuple(one.transpose(1, 3).contiguous().transpose(1, 3) for one in k) for name, k in spread.items()}
    x["gates"] = x["gates"].transpose(0, 3).contiguous().transpose(0, 3)
    agree(whole(x, CONFIG, "triton"), whole(x, CONFIG, "reference"))


def in_pages(x: Inputs, lengths: list[int], config: nsa.NSAConfig, size: int) -> tuple[list[KVView], Tensor]:
    """The first `lengths` keys of each row scattered over pages, NaN in all other places; and how many there are."""
    batch, total = x["k"][1].shape[:2]
    held = [[nsa.geometry.num_compressed_blocks(n, config) for n in lengths], lengths, lengths]
    keys, values = ((x[f"{name}_compressed"], *x[name][1:]) for name in "kv")
    width = -(-total // size)
    k, v = (one[1].new_full((3 * batch * width + 1, size, *one[1].shape[2:]), torch.nan) for one in (keys, values))
    order = torch.randperm(3 * batch * width, generator=torch.Generator().manual_seed(1)).to(k.device) + 1
    tables = order.int().view(3, batch, width)
    for branch in range(3):
        for b in range(batch):
            for row in range(held[branch][b]):
                page = int(tables[branch, b, row // size])
                k[page, row % size], v[page, row % size] = keys[branch][b, row], values[branch][b, row]
    return [KVView(k, v, table) for table in tables], torch.tensor(lengths, dtype=torch.int32, device=k.device)


@pytest.mark.parametrize(("config", "size", "queries"), [(CONFIG, 8, 1), (CONFIG, 24, 3), (WIDE, 16, 3), (WIDE, 64, 1)])
def test_sequences_in_pages_differ_in_length(config: nsa.NSAConfig, size: int, queries: int) -> None:
    lengths = [70, queries, 41]
    x = draw(3, queries, 70, 4, 2, 16, 16, config)
    rows, on_device = in_pages(x, lengths, config, size)
    decoded = decode_attention(x["q"], *rows, on_device, x["gates"], config, 0.25)
    found = split(decoded)
    for b, length in enumerate(lengths):
        own = slice(b, b + 1)
        blocks = nsa.geometry.num_compressed_blocks(length, config)
        alone: Inputs = {name: value[own] for name, value in x.items() if name in ("q", "gates")}
        alone |= {name: tuple(one[own, :length] for one in x[name]) for name in "kv"}
        alone |= {name: x[name][own, :blocks] for name in ("k_compressed", "v_compressed")}
        agree(found[b], whole(alone, config, "reference", scale=0.25))


def split(decoded: DecodeOutput) -> list[tuple[Tensor, nsa.Aux]]:
    """Each row of a step by itself."""
    rows = range(decoded.o.shape[0])
    read = [[x[b : b + 1] for x in decoded.keys_read] for b in rows]
    return [
        (
            decoded.o[b : b + 1],
            nsa.Aux.of(
                DecodeOutput(decoded.o, decoded.block_indices[b : b + 1], decoded.lse[:, b : b + 1], tuple(read[b])),  # type: ignore[arg-type]
                "triton",
            ),
        )
        for b in rows
    ]


@pytest.mark.parametrize("operand", ["q", "k", "v", "k_compressed", "v_compressed"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_reaches_the_rows_that_see_it_and_no_others(operand: str, value: float) -> None:
    x = draw(1, 8, 31, 2, 1, 16, 16, CONFIG)  # queries 23 … 30; block 12 holds tokens 24 … 27
    place = {"q": (x["q"], 5), "k": (x["k"][2], 28), "v": (x["v"][2], 28)}
    place |= {name: (x[name], 12) for name in ("k_compressed", "v_compressed")}
    tensor, row = place[operand]
    tensor[0, row, 0, 3] = value
    found, true = ((~whole(x, CONFIG, b)[0].isfinite())[0].flatten(1).any(-1) for b in ("triton", "reference"))
    sees = torch.arange(8, device=found.device) >= {"q": 5, "k": 5, "v": 5}.get(operand, 27 - 23)
    if operand == "q":
        sees = torch.arange(8, device=found.device) == 5
    assert true.any()
    assert not (true & ~found).any()
    assert not (found & ~sees).any()  # the oracle ignores a score of -inf, which may make a row nonfinite here


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_16_bits_it_is_as_precise_as_the_parts(dtype: torch.dtype) -> None:
    x = draw(1, 2, 120, 4, 1, 32, 32, WIDE)
    low = {n: tuple(t.to(dtype) for t in v) if isinstance(v, tuple) else v.to(dtype) for n, v in x.items()}
    wide = {n: tuple(t.double() for t in v) if isinstance(v, tuple) else v.double() for n, v in low.items()}
    truth = whole(wide, WIDE, "reference")[0]
    fused, parts = (whole(low, WIDE, backend)[0].double() for backend in ("triton", "torch"))
    assert (fused - truth).abs().max() <= 2 * (parts - truth).abs().max()


def test_it_serves_few_queries_behind_many_keys_without_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    healthy = decode.attend

    def noted(q: Tensor, *others: Any) -> DecodeOutput:
        calls.append(q.shape[1])
        return healthy(q, *others)

    monkeypatch.setattr(decode, "attend", noted)
    for queries, keys, leaf in ((1, 20, False), (8, 20, False), (9, 20, False), (4, 4, False), (1, 20, True)):
        x = draw(1, queries, keys, 2, 1, 16, 16, CONFIG)
        x["gates"].requires_grad_(leaf)
        o, _ = whole(x, CONFIG, "triton")
        assert o.requires_grad is leaf
    assert calls == [1, 8]
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert decoder("triton", torch.zeros(1, 1, 2, 16)) is None


@pytest.mark.parametrize("shared_kv", [False, True])
def test_a_paged_cache_decodes_as_it_prefills(shared_kv: bool) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    layer = make_layer(small_config("mlp"), shared_kv=shared_kv, dtype=torch.float32, device=device)
    x = torch.randn(2, 30, 12, generator=torch.Generator().manual_seed(2)).to(device)
    cache = nsa.PagedCache(layer, num_pages=40, max_tokens=40, page_size=8)
    sequences, starts = [cache.new(), cache.new()], [19, 7]
    with torch.no_grad():
        wanted = layer(x)
        for row, start in enumerate(starts):
            layer(x[row : row + 1, :start], cache.rows(sequences[row : row + 1]).layers[0])
        rows, layer.backend = cache.rows(sequences), "triton"
        for step, size in ((0, 3), (3, 1)):
            parts = [slice(start + step, start + step + size) for start in starts]
            out = layer(torch.stack([x[row, part] for row, part in enumerate(parts)]), rows.layers[0])
            expected = torch.stack([wanted[row, part] for row, part in enumerate(parts)])
            torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)


def test_no_sequences_and_no_queries_give_nothing() -> None:
    x = draw(0, 1, 20, 2, 1, 16, 16, CONFIG)
    assert whole(x, CONFIG, "triton")[0].shape == (0, 1, 2, 16)
    x = draw(2, 0, 20, 2, 1, 16, 16, CONFIG)
    assert whole(x, CONFIG, "triton")[0].shape == (2, 0, 2, 16)


@pytest.mark.parametrize("cache", ["pages", "side by side", "of one length"])
def test_halves_of_a_batch_give_the_whole(monkeypatch: pytest.MonkeyPatch, cache: str) -> None:
    x, lengths = draw(3, 1, 40, 2, 1, 16, 16, CONFIG), [40, 9, 23]
    rows, on_device = in_pages(x, lengths, CONFIG, 8)
    if cache != "pages":
        rows = [KVView(x["k_compressed"], x["v_compressed"]), *(KVView(x["k"][i], x["v"][i]) for i in (1, 2))]
    arguments = (x["q"], *rows, 40 if cache == "of one length" else on_device, x["gates"], CONFIG, 0.25)
    together = decode_attention(*arguments)
    monkeypatch.setattr(decode, "SCRATCH", 1)
    apart = decode_attention(*arguments)
    assert torch.equal(apart.o, together.o)
    assert torch.equal(apart.lse, together.lse)
    assert torch.equal(apart.block_indices, together.block_indices)
    assert [x.sum() for x in apart.keys_read] == [x.sum() for x in together.keys_read]


@pytest.mark.parametrize(("sms", "splits", "whole"), [(132, 33, 3), (108, 27, 5)])
def test_splits_follow_the_number_of_sms(sms: int, splits: int, whole: int) -> None:
    """An H200 and an A100: two programs on each SM; 128 rows in whole waves of three programs on each."""
    assert decode._num_splits(8, 64, sms) == splits
    assert decode._in_whole_waves(128, 64, sms) == whole


@pytest.mark.gpu
@pytest.mark.parametrize(("batch", "keys"), [(1, 1000), (1, 2000), (1, 4000), (1, 8000), (8, 30000)])
def test_launches_that_begin_early_change_no_bit(monkeypatch: pytest.MonkeyPatch, batch: int, keys: int) -> None:
    """Programmatic dependent launch: each of many steps in a graph reads what its own launches have written."""
    monkeypatch.undo()  # tiles as they are
    config, x = nsa.NSAConfig(), draw(batch, 1, keys, 32, 2, 64, 64, nsa.NSAConfig())
    queries = [x["q"].roll(i, -1).bfloat16() for i in range(50)]
    x = {n: tuple(t.bfloat16() for t in v) if isinstance(v, tuple) else v.bfloat16() for n, v in x.items()}

    def steps() -> list[Tensor]:
        return [nsa.nsa_attention(**{**x, "q": q}, config=config, backend="triton") for q in queries]

    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("this GPU has no programmatic dependent launch")
    monkeypatch.setattr(decode_kernels, "HAS_PDL", False)
    wanted = steps()
    monkeypatch.setattr(decode, "FEW_BLOCKS", 0)
    assert all(map(torch.equal, steps(), wanted)), "probabilities by a launch of their own"
    monkeypatch.undo()
    steps()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = steps()
    for _ in range(20):
        graph.replay()
        assert all(map(torch.equal, found, wanted))
