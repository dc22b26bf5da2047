"""The selected forward that loops over blocks of keys, which real sizes take and small ones only when told to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import nsa

pytest.importorskip("triton")

from nsa.triton_backend import compressed_window, dispatch, selected, selected_kv_major, tuning

CONFIG = nsa.NSAConfig(l=4, d=2, l_sel=8, n_sel=4, w=13)
Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several chunks, and several tiles of one block, in a short text."""
    monkeypatch.setattr(dispatch, "KV_MAJOR_MIN_QUERIES", 1)
    monkeypatch.setattr(dispatch, "sooner_by_block", lambda call, **_: call.group <= 16)
    monkeypatch.setattr(selected_kv_major, "CHUNK", 24)
    monkeypatch.setattr(selected_kv_major, "FORWARD_PAIRS", 8)
    monkeypatch.setattr(selected_kv_major, "INDEXED", 48)
    monkeypatch.setattr(
        selected_kv_major, "BACKWARD_SCRATCH", 24 * 4 * 4 * 16
    )  # 24 queries of 4 heads, 4 blocks, 16 channels
    monkeypatch.setattr(selected_kv_major, "BACKWARD_PAIRS", 8)


@pytest.fixture(params=["keys first", "rows first"])
def order(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Tiles of 16 rows, of which one warp has all, or four warps have too few; several of them to a partial sum."""
    launch = tuning.LaunchConfig(16, 64, 1 if request.param == "rows first" else 4, 1)
    table = tuning.Table("", dict.fromkeys(tuning.table(86).narrow, launch), {})
    monkeypatch.setattr(tuning, "table", lambda _: table)
    shape = tuning.fit("selected_backward_kv", 0, 5, 16, 16, torch.float32)
    assert (shape.rows_first, shape.group) == ((True, 5) if request.param == "rows first" else (False, 8))
    return str(request.param)


class Launched:
    """A kernel, and by name what its launches were given."""

    def __init__(self, kernel: Any) -> None:
        self.kernel, self.arguments = kernel, list[dict[str, Any]]()

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        def launch(*arguments: Any, **options: Any) -> Any:
            self.arguments.append(dict(zip(self.kernel.arg_names, arguments, strict=False)))
            return self.kernel[grid](*arguments, **options)

        return launch


def draw(device: torch.device, queries: int, keys: int, heads: int, num_kv_heads: int, dv: int) -> Inputs:
    generator = torch.Generator().manual_seed(queries)
    q, k, v = (
        torch.randn(1, *size, generator=generator).to(device).requires_grad_()
        for size in ((queries, heads, 16), (keys, num_kv_heads, 16), (keys, num_kv_heads, dv))
    )
    with torch.no_grad():
        k_cmp = nsa.compress(k, CONFIG)
        blocks = nsa.select_blocks(q, k_cmp, CONFIG, num_keys=keys, backend="reference")
    return q, k, v, blocks


def run(backend: str, inputs: Inputs, cu_seqlens: torch.Tensor | None = None) -> list[torch.Tensor]:
    q, k, v, blocks = inputs
    o, lse = nsa.selected_attention(q, k, v, blocks, CONFIG, cu_seqlens=cu_seqlens, backend=backend)
    return [o, lse, *torch.autograd.grad(o.nan_to_num().sum(), (q, k, v))]


def agree(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=2e-5, equal_nan=True)


@pytest.mark.parametrize(
    ("queries", "keys", "heads", "num_kv_heads", "dv"), [(70, 70, 4, 2, 24), (33, 90, 3, 1, 16), (1, 40, 2, 2, 16)]
)
def test_it_agrees_with_the_oracle(
    device: torch.device, queries: int, keys: int, heads: int, num_kv_heads: int, dv: int
) -> None:
    inputs = draw(device, queries, keys, heads, num_kv_heads, dv)
    agree(run("triton", inputs), run("reference", inputs))


@pytest.mark.usefixtures("order")
@pytest.mark.parametrize("heads", [2, 3, 5])
def test_several_tiles_of_a_block_agree_with_the_oracle(device: torch.device, heads: int) -> None:
    """Of 8 queries that chose it; 3 and 5 heads are padded only with keys first."""
    inputs = draw(device, 70, 70, heads, 1, 24)
    agree(run("triton", inputs), run("reference", inputs))


def test_kernels_that_write_dk_and_dv_are_told_the_order(
    monkeypatch: pytest.MonkeyPatch, device: torch.device, order: str
) -> None:
    """In both orders they give the same, so that nothing else would notice."""
    if device.type == "cuda":
        pytest.skip("float32 has no rows first on a GPU")
    kernels = {"_backward": selected_kv_major, "_backward_kv": compressed_window}
    launched = {name: Launched(getattr(module, name)) for name, module in kernels.items()}
    for name, module in kernels.items():
        monkeypatch.setattr(module, name, launched[name])
    q, k, v, blocks = draw(device, 40, 40, 5, 1, 16)
    run("triton", (q, k, v, blocks))
    nsa.window_attention(q, k, v, CONFIG, backend="triton")[0].sum().backward()
    wanted = (True, 5) if order == "rows first" else (False, 8)
    for one in launched.values():
        assert {(given["ROWS_FIRST"], given["GP"]) for given in one.arguments} == {wanted}


@pytest.mark.usefixtures("order")
def test_a_query_that_is_not_finite_gives_nothing_to_keys_it_does_not_see(device: torch.device) -> None:
    """Keys 22 and 23 are of the block that query 21 stands in."""
    inputs = draw(device, 40, 40, 3, 1, 16)
    with torch.no_grad():
        inputs[0][0, 21, 0, 3] = float("nan")
    *_, dk, dv = run("triton", inputs)
    assert dk[0, 22:].isfinite().all()
    assert dv[0, 22:].isfinite().all()


@pytest.mark.usefixtures("order")
@pytest.mark.parametrize("of_values", [False, True])
def test_a_key_that_is_not_finite_and_that_no_query_sees_has_no_gradient(device: torch.device, of_values: bool) -> None:
    """Query 16 alone chose the block of key 20, which stands behind it; the other rows of its tile are idle."""
    q, k, v, _ = draw(device, 40, 40, 1, 1, 16)
    blocks = torch.full((1, 40, 1, 1), -1, dtype=torch.int32, device=device)
    blocks[0, :8], blocks[0, 16] = 0, 2
    with torch.no_grad():
        (v if of_values else k)[0, 20] = float("nan")
    *_, dk, dv = run("triton", (q, k, v, blocks))
    assert dk.isfinite().all()
    assert dv.isfinite().all()


@pytest.mark.usefixtures("order")
def test_a_gradient_of_lse_that_is_not_finite_reaches_all_keys_of_its_query(device: torch.device) -> None:
    """Those too whose probability is 0, since one key has it all."""
    q, k, v, blocks = draw(device, 40, 40, 1, 1, 16)
    with torch.no_grad():
        k[0, 20] = 1000 * q[0, 21]
    rows = []
    for backend in ("triton", "reference"):
        outputs = nsa.selected_attention(q, k, v, blocks, CONFIG, backend=backend)
        upstream = [torch.zeros_like(x) for x in outputs]
        upstream[1][0, 21] = float("nan")
        (dk,) = torch.autograd.grad(outputs, (k,), upstream)
        rows.append((~dk.isfinite()).any(-1).nonzero()[:, 1].tolist())
    assert rows[0] == rows[1]
    assert len(rows[0]) > 8


@pytest.mark.parametrize("size", [12, 16, 32])
def test_blocks_as_wide_as_a_tile_and_others_agree_with_the_oracle(device: torch.device, size: int) -> None:
    q, k, v, _ = draw(device, 100, 100, 3, 1, 16)
    config = nsa.NSAConfig(l=4, d=2, l_sel=size, n_sel=3, w=13)
    blocks = nsa.select_blocks(q, nsa.compress(k, config), config, backend="reference")
    outputs = [nsa.selected_attention(q, k, v, blocks, config, backend=b) for b in ("triton", "reference")]
    for one, other in zip(*outputs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=2e-5)


def test_groups_of_16_may_go_by_block(device: torch.device) -> None:
    """As they do where L2 holds no head: the oracle's numbers, and the same bits each time."""
    inputs = draw(device, 18, 26, 16, 1, 16)
    calls = [
        dispatch.variant(f"selected_{name}", *inputs[:3], dispatch.SelectionBlocks(8))
        for name in ("forward", "backward_q")
    ]
    assert calls == [dispatch.Variant.KV_MAJOR] * 2
    found = run("triton", inputs)
    agree(found, run("reference", inputs))
    for one, other in zip(found, run("triton", inputs), strict=True):
        assert torch.equal(one, other)


def test_scratch_bounds_a_chunk(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    monkeypatch.setattr(
        selected_kv_major, "FORWARD_SCRATCH", 7 * 4 * 4 * 24
    )  # seven queries of 4 heads, 4 blocks, 24 channels
    inputs = draw(device, 70, 70, 4, 2, 24)
    agree(run("triton", inputs), run("reference", inputs))


def test_chunks_of_the_backward_pass_share_one_scratch(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    """It may hold a GiB at real sizes: two of them at a time were the peak of long texts in small groups."""
    chunk, seen = selected_kv_major._backward_chunk, list[tuple[int, int]]()

    def noted(*arguments: Any) -> None:
        dq_part = arguments[-2]
        seen.append((dq_part.data_ptr(), dq_part.numel()))
        chunk(*arguments)

    monkeypatch.setattr(selected_kv_major, "_backward_chunk", noted)
    inputs = draw(device, 70, 70, 4, 2, 24)
    agree(run("triton", inputs), run("reference", inputs))
    assert len(seen) == 3
    assert len(set(seen)) == 1
    assert seen[0][1] == selected_kv_major.BACKWARD_SCRATCH


def test_no_sequences_give_nothing(device: torch.device) -> None:
    q, k = torch.randn(0, 9, 2, 16, device=device), torch.randn(0, 9, 1, 16, device=device)
    blocks = torch.zeros(0, 9, 1, 2, dtype=torch.int32, device=device)
    assert nsa.selected_attention(q, k, k, blocks, CONFIG, backend="triton")[0].shape == (0, 9, 2, 16)


def test_documents_stay_apart(device: torch.device) -> None:
    q, k, v, _ = draw(device, 80, 80, 4, 1, 16)
    documents = torch.tensor([0, 17, 50, 80], dtype=torch.int32, device=device)
    whole = nsa.NSAConfig(l=4, d=2, l_sel=8, n_sel=8, w=13)  # every block of the longest document
    blocks = torch.arange(8, dtype=torch.int32, device=device).expand(1, 80, 1, 8)
    outputs = [
        nsa.selected_attention(q, k, v, blocks, whole, cu_seqlens=documents, backend=b)[0]
        for b in ("triton", "reference")
    ]
    torch.testing.assert_close(*outputs, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("operand", ["q", "k", "v"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_reaches_the_rows_that_see_it_and_no_others(
    device: torch.device, operand: str, value: float
) -> None:
    inputs = draw(device, 40, 40, 2, 1, 16)
    with torch.no_grad():
        inputs["qkv".index(operand)][0, 21, 0, 3] = value
    found, true = (~run(backend, inputs)[0].isfinite().all(-1) for backend in ("triton", "reference"))
    t = torch.arange(40, device=device)[:, None]
    sees = (t == 21) if operand == "q" else (inputs[3] == 21 // CONFIG.l_sel).any(-1)[0] & (t >= 21)
    assert true.any()
    assert not (true & ~found).any()
    assert not (found & ~sees).any()  # the oracle ignores a score of -inf, which makes a row nonfinite here


@pytest.mark.usefixtures("order")
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("by_query", [False, True])
@pytest.mark.parametrize("operand", ["k", "v"])
def test_gradients_beside_what_is_not_finite_are_the_oracles(
    monkeypatch: pytest.MonkeyPatch, device: torch.device, operand: str, by_query: bool, value: float
) -> None:
    """Of the forward pass by query too, whose lse such a value leaves finite."""
    if by_query:
        monkeypatch.setattr(dispatch, "KV_MAJOR_MIN_QUERIES", 2**20)
    inputs = draw(device, 40, 40, 2, 1, 16)
    with torch.no_grad():
        inputs["qkv".index(operand)][0, 21, 0, 3] = value
    found, true = (run(backend, inputs)[2:] for backend in ("triton", "reference"))
    sees = (inputs[3] == 21 // CONFIG.l_sel).any(-1)[0, :, 0] & (torch.arange(40, device=device) >= 21)
    assert found[0][0, ~sees].isfinite().all(), "dq of a query that does not see it"
    both = found[2].isfinite() & true[2].isfinite()
    torch.testing.assert_close(found[2][both], true[2][both], rtol=1e-5, atol=2e-5)


@pytest.mark.usefixtures("order")
@pytest.mark.parametrize("size", [12, 16])
def test_scores_far_below_zero_leave_the_gradients_finite(device: torch.device, size: int) -> None:
    """Places beyond a block of 12 have a score of 0, so that their p overflows where every true score is below -88."""
    generator = torch.Generator().manual_seed(0)
    along = torch.nn.functional.normalize(torch.randn(16, generator=generator), dim=0)
    q, k, v = (
        (sign * 25 * along + 0.1 * torch.randn(1, 90, heads, 16, generator=generator)).to(device).requires_grad_()
        for sign, heads in ((1, 2), (-1, 1), (0, 1))
    )
    config = nsa.NSAConfig(l=4, d=2, l_sel=size, n_sel=3, w=13)
    blocks = nsa.select_blocks(q.detach(), nsa.compress(k.detach(), config), config, backend="reference")
    found, true = (
        torch.autograd.grad(nsa.selected_attention(q, k, v, blocks, config, backend=b)[0].sin().sum(), (q, k, v))
        for b in ("triton", "reference")
    )
    for one, other in zip(found, true, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_one_block_of_all_queries_is_shared_by_tiles(device: torch.device) -> None:
    q, k, v, _ = draw(device, 40, 40, 2, 1, 16)
    inputs = q, k, v, torch.zeros(1, 40, 1, 1, dtype=torch.int32, device=device)
    agree(run("triton", inputs), run("reference", inputs))


@pytest.mark.parametrize(("heads", "longest", "taken"), [(8, 128, True), (32, 128, False), (8, 512, False)])
def test_it_serves_small_groups_and_blocks(
    monkeypatch: pytest.MonkeyPatch, device: torch.device, heads: int, longest: int, taken: bool
) -> None:
    calls: list[str] = []
    real: Callable[..., None] = selected_kv_major.forward

    def noted(*arguments: object) -> None:
        calls.append("selected_kv_major")
        real(*arguments)

    monkeypatch.setattr(selected.selected_kv_major, "forward", noted)
    config = nsa.NSAConfig(l=4, d=2, l_sel=longest, n_sel=3, w=13)
    q, k = torch.randn(1, 4, heads, 16, device=device), torch.randn(1, 4, 1, 16, device=device)
    nsa.selected_attention(q, k, k, torch.zeros(1, 4, 1, 1, dtype=torch.int32, device=device), config, backend="triton")
    assert bool(calls) is taken
