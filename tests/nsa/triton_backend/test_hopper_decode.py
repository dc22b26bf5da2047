"""A decode step in one launch, `hopper/decode.py`: what the oracle says, in pages and side by side."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import nsa
from nsa.kv import DecodeOutput, KVView

pytest.importorskip("triton")

from nsa.triton_backend import architecture, decode, dispatch, hopper
from tests.nsa.triton_backend.gluon_on_cpu import ORDERS, emulated
from tests.nsa.triton_backend.test_decode import Inputs, draw, in_pages, split, whole

pytestmark = pytest.mark.usefixtures("device")  # on a GPU, where there is one
CONFIG = nsa.NSAConfig(l=8, d=4, l_sel=64, n_sel=5, w=200)
SCALE = 0.125


@pytest.fixture(autouse=True)
def _however_few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hopper.decode, "MAX_IDLE_SHARE", 1)


@pytest.fixture(params=ORDERS)
def _emulation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if torch.cuda.is_available():
        yield
        return
    monkeypatch.setattr(architecture, "of_gpu", lambda _: 90)
    with emulated(request.param):
        yield


of_this_machine = pytest.mark.usefixtures("_emulation")


def step(x: Inputs, rows: list[KVView], lengths: Any, config: nsa.NSAConfig) -> DecodeOutput:
    """The step by this kernel alone."""
    assert hopper.decode.serves(x["q"], tuple(rows), config, 1)  # type: ignore[arg-type]
    return hopper.decode.attend(x["q"], tuple(rows), lengths, x["gates"], config, SCALE)  # type: ignore[arg-type]


def drawn(batch: int, keys: int, heads: int, config: nsa.NSAConfig, dtype: torch.dtype = torch.bfloat16) -> Inputs:
    """Of one query, and heads of 128."""
    x = draw(batch, 1, keys, heads, 1 if heads < 17 else 2, 128, 128, config)
    return {n: tuple(t.to(dtype) for t in v) if isinstance(v, tuple) else v.to(dtype) for n, v in x.items()}


def side_by_side(x: Inputs) -> list[KVView]:
    return [KVView(x["k_compressed"], x["v_compressed"]), *(KVView(x["k"][i], x["v"][i]) for i in (1, 2))]


def require_within_budget(found: tuple[torch.Tensor, nsa.Aux], x: Inputs, config: nsa.NSAConfig) -> None:
    """The oracle's choice and counts, and twice the error of PyTorch's own operations of the same type."""
    wide = {n: tuple(t.double() for t in v) if isinstance(v, tuple) else v.double() for n, v in x.items()}
    truth, aux = whole(wide, config, "reference", scale=SCALE)
    o, of_kernel = found
    assert torch.equal(of_kernel.block_indices, aux.block_indices)
    assert {name: of_kernel.keys_read[name] for name in aux.keys_read} == dict(aux.keys_read)
    for branch in aux.lse:
        torch.testing.assert_close(of_kernel.lse[branch].double(), aux.lse[branch].double(), rtol=1e-5, atol=1e-5)
    parts = whole(x, config, "torch", scale=SCALE)[0].double()
    assert (o.double() - truth).abs().max() <= 2 * (parts - truth).abs().max()


@of_this_machine
@pytest.mark.parametrize(
    ("keys", "heads", "changes"),
    [
        (700, 16, {}),
        (8000, 16, {}),  # 32 tiles of compressed blocks
        (65, 6, {"n_sel": 1, "init_blocks": 0, "local_blocks": 1}),
        (300, 26, {"w": 1, "l_sel": 128}),
        (1500, 4, {"n_sel": 16}),
        (700, 16, {"n_sel": 3}),  # all of them forced
        (300, 5, {"n_sel": 12}),  # more than there are
        (700, 16, {"l_sel": 192, "n_sel": 3}),
        (2500, 16, {}),
    ],
)
@pytest.mark.parametrize(("kept", "held"), [(38, 26), (28, 26), (6, 4)])
def test_it_agrees_with_the_oracle(
    monkeypatch: pytest.MonkeyPatch, keys: int, heads: int, changes: dict[str, int], kept: int, held: int
) -> None:
    """With all scores in shared memory, and with those of the first tiles in registers."""
    if keys > (kept + held) * 256:
        return
    monkeypatch.setattr(hopper.decode, "SHARED_SCORE_TILES", kept)
    monkeypatch.setattr(hopper.decode, "REGISTER_SCORE_TILES", held)
    monkeypatch.setattr(hopper.decode, "MAX_TILES", kept + held)
    config = nsa.NSAConfig(**{"l": 8, "d": 4, "l_sel": 64, "n_sel": 5, "w": 200, **changes})
    x = drawn(2, keys, heads, config)
    for b, found in enumerate(split(step(x, side_by_side(x), keys, config))):
        require_within_budget(found, of_row(x, b), config)


@of_this_machine
@pytest.mark.parametrize("lengths", [[25, 700], [31, 2]])
def test_few_blocks_in_a_long_cache(monkeypatch: pytest.MonkeyPatch, lengths: list[int]) -> None:
    """Fewer tiles than the selector's registers wait for, and no compressed block at all."""
    monkeypatch.setattr(hopper.decode, "SHARED_SCORE_TILES", 6)
    monkeypatch.setattr(hopper.decode, "REGISTER_SCORE_TILES", 4)
    x = drawn(2, 2000, 16, CONFIG)
    x["q"][1, 0, 2, 7] = float("nan")
    rows, on_device = in_pages(x, lengths, CONFIG, 64)
    found = split(step(x, rows, on_device, CONFIG))
    require_within_budget(found[0], of_row(x, 0, lengths[0]), CONFIG)
    sees_blocks = nsa.geometry.num_compressed_blocks(lengths[1], CONFIG) > 0
    of_head = {branch: bool(lse[0, 0, 2].isnan()) for branch, lse in found[1][1].lse.items()}
    assert of_head == {"compressed": sees_blocks, "selected": True, "window": True}


@of_this_machine
def test_queries_gates_and_keys_need_not_be_contiguous() -> None:
    x = drawn(2, 300, 16, CONFIG)
    spread: Inputs = {"q": x["q"].transpose(1, 2).contiguous().transpose(1, 2)}
    spread["gates"] = x["gates"].transpose(0, 3).contiguous().transpose(0, 3)
    for name in "kv":
        spread[name] = tuple(one.transpose(1, 2).contiguous().transpose(1, 2) for one in x[name])
    wanted = step(x, side_by_side(x), 300, CONFIG)
    found = step(x | spread, side_by_side(x | spread), 300, CONFIG)
    assert torch.equal(found.o, wanted.o)


@of_this_machine
def test_each_branch_has_pages_of_its_own() -> None:
    x, lengths = drawn(2, 700, 16, CONFIG), [700, 257]
    (compressed, _, _), on_device = in_pages(x, lengths, CONFIG, 64)
    _, selected, _ = in_pages(x, lengths, CONFIG, 192)[0]
    _, _, window = in_pages(x, lengths, CONFIG, 128)[0]
    for b, found in enumerate(split(step(x, [compressed, selected, window], on_device, CONFIG))):
        require_within_budget(found, of_row(x, b, lengths[b]), CONFIG)


def of_row(x: Inputs, b: int, length: int | None = None) -> Inputs:
    """A sequence by itself, and the first keys of it."""
    blocks = None if length is None else nsa.geometry.num_compressed_blocks(length, CONFIG)
    own: Inputs = {name: value[b : b + 1] for name, value in x.items() if name in ("q", "gates")}
    own |= {name: tuple(one[b : b + 1, :length] for one in x[name]) for name in "kv"}
    return own | {name: x[name][b : b + 1, :blocks] for name in ("k_compressed", "v_compressed")}


@of_this_machine
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [64, 128])
def test_sequences_in_pages_differ_in_length(dtype: torch.dtype, size: int) -> None:
    lengths = [700, 1, 64, 257]
    x = drawn(len(lengths), 700, 16, CONFIG, dtype)
    rows, on_device = in_pages(x, lengths, CONFIG, size)
    for b, found in enumerate(split(step(x, rows, on_device, CONFIG))):
        require_within_budget(found, of_row(x, b, lengths[b]), CONFIG)


@of_this_machine
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_reaches_the_heads_that_see_it_and_no_others(value: float) -> None:
    """Behind the last key, in the blocks that are not complete, and before the window."""
    x = drawn(1, 600, 16, CONFIG)
    clean = step(x, side_by_side(x), 500, CONFIG)
    for name, first in (("k", 500), ("v", 500), ("k_compressed", 124), ("v_compressed", 124)):
        for one in x[name] if isinstance(x[name], tuple) else (x[name],):
            one[:, first:] = value
    for name in "kv":
        x[name][2][:, : 500 - CONFIG.w] = value
    found = step(x, side_by_side(x), 500, CONFIG)
    assert torch.equal(found.block_indices, clean.block_indices)
    assert torch.equal(found.o, clean.o)
    assert torch.equal(found.lse, clean.lse)
    x["q"][0, 0, 3, 5] = value
    for one in (*x["k"], x["k_compressed"]):
        one[..., 5] = -1.0  # its scores are all -inf: as if it saw no key
    found = step(x, side_by_side(x), 500, CONFIG)
    other = torch.arange(16, device=found.o.device) != 3
    assert found.o[0, 0, 3].isnan().all()
    assert found.lse[:, 0, 0, 3].isnan().all()
    assert found.o[:, :, other].isfinite().all()
    assert 0 in found.block_indices, "forced, whatever the scores"


@of_this_machine
def test_a_key_that_is_seen_and_not_finite_makes_its_rows_nan() -> None:
    for name, row in (("k", 499), ("v", 499), ("k_compressed", 3), ("v_compressed", 3)):
        x = drawn(1, 500, 16, CONFIG)
        (x[name][2] if isinstance(x[name], tuple) else x[name])[0, row] = float("nan")
        assert step(x, side_by_side(x), 500, CONFIG).o.isnan().all(), name


def test_which_steps_go_in_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    x = drawn(2, 300, 16, CONFIG)
    rows = side_by_side(x)

    def serves(
        q: torch.Tensor = x["q"], config: nsa.NSAConfig = CONFIG, rows: list[KVView] = rows, sms: int = 2
    ) -> bool:
        return hopper.decode.serves(q, tuple(rows), config, sms)  # type: ignore[arg-type]

    assert [sms for sms in range(1, 9) if serves(sms=sms)] == [1, 2, 3, 4, 5]  # of two programs
    assert not serves(x["q"].repeat(1, 2, 1, 1)), "two queries"
    assert not serves(x["q"].repeat(1, 1, 2, 1)), "a group of 32"
    assert not serves(x["q"][..., :64]), "heads of 64"
    narrow = [KVView(view.k, view.v[..., :64]) for view in rows]
    assert not serves(rows=narrow), "values of 64"
    assert not serves(x["q"].half()), "another type than the keys'"
    assert not serves(config=nsa.NSAConfig(l=8, d=4, l_sel=64, n_sel=129, w=200)), "more chosen blocks than fit"
    assert not serves(config=nsa.NSAConfig(l=8, d=4, l_sel=32, n_sel=5, w=200)), "a tile is more than a block"
    for branch in range(3):
        mixed = [*rows]
        mixed[branch] = in_pages(x, [300, 300], CONFIG, 32)[0][branch]
        assert not serves(rows=mixed), "a tile is more than a page"
    blocks_of_192 = nsa.NSAConfig(l=8, d=4, l_sel=192, n_sel=5, w=200)
    assert not serves(rows=in_pages(x, [300, 300], CONFIG, 64)[0], config=blocks_of_192), "a block is more than a page"
    most = hopper.decode.MAX_TILES * hopper.decode.TILE
    long = [KVView(*(t[:, :1].expand(-1, most + 1, -1, -1) for t in (rows[0].k, rows[0].v))), *rows[1:]]
    assert not serves(rows=long), "too many scores for a multiprocessor"


def test_a_step_that_is_served_is_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the GPU has such kernels and TMA can read the keys; the five launches do the others."""
    x, calls = drawn(2, 300, 16, CONFIG), list[str]()
    decoded = decode.attend(x["q"], *side_by_side(x), 300, x["gates"], CONFIG, SCALE)

    def noted(q: torch.Tensor, *_: Any) -> DecodeOutput:
        assert q.stride(3) == 1
        calls.append("one")
        return decoded

    def launches(rows: list[KVView]) -> list[str]:
        calls.clear()
        decode.attend(x["q"], *rows, 300, x["gates"], CONFIG, SCALE)
        return list(calls)

    monkeypatch.setattr(hopper.decode, "attend", noted)
    monkeypatch.setattr(dispatch, "has_hopper_kernels", lambda _: False)
    assert launches(side_by_side(x)) == []
    monkeypatch.setattr(dispatch, "has_hopper_kernels", lambda _: True)
    assert launches(side_by_side(x)) == ["one"]
    x["q"] = torch.stack([x["q"], x["q"]], -1)[..., 0]  # channels that lie apart
    assert launches(side_by_side(x)) == ["one"]
    for branch in range(3):
        for part in "kv":
            rows = side_by_side(x)
            apart = getattr(rows[branch], part).transpose(1, 3).contiguous().transpose(1, 3)
            rows[branch] = dataclasses.replace(rows[branch], **{part: apart})
            assert launches(rows) == [], "TMA reads no channels that lie apart"
    monkeypatch.setattr(hopper.decode, "MAX_IDLE_SHARE", -1)
    assert launches(side_by_side(x)) == []


@pytest.mark.parametrize(
    ("keys", "page"),
    [(65536, 64), *(pytest.param(*one, marks=pytest.mark.nightly) for one in [(65536, 0), (8192, 64)])],
)
def test_it_compiles_fits_in_shared_memory_and_spills_next_to_nothing(keys: int, page: int) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.nsa.triton_backend.compile_hopper_decode", str(keys), str(page)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (need,) = json.loads(done.stdout.splitlines()[-1])
    assert need["shared_bytes"] <= 227 * 1024
    assert need["spilled_bytes"] <= 16


@pytest.mark.gpu
@pytest.mark.parametrize(("batch", "keys"), [(33, 65536), (40, 20000)])
def test_many_runs_of_a_full_gpu_give_the_same_bits(batch: int, keys: int) -> None:
    """A tile that TMA overwrote before all of it was read showed in one of thirty programs, and only in a full GPU."""
    if not dispatch.has_hopper_kernels(torch.device("cuda")):
        pytest.skip("this GPU has no kernels of hopper/")
    config, device = nsa.NSAConfig(), "cuda"
    generator = torch.Generator(device).manual_seed(1)

    def rows(count: int) -> KVView:
        shape = (batch, count, 4, 128)
        k, v = (torch.randn(*shape, generator=generator, device=device, dtype=torch.bfloat16) for _ in range(2))
        return KVView(k, v)

    q = torch.randn(batch, 1, 64, 128, generator=generator, device=device, dtype=torch.bfloat16)
    gates = torch.rand(batch, 1, 64, 3, generator=generator, device=device, dtype=torch.bfloat16)
    tokens = rows(keys)
    views = (rows(nsa.geometry.num_compressed_blocks(keys, config)), tokens, tokens)
    wanted = hopper.decode.attend(q, views, keys, gates, config, SCALE)
    for _ in range(50):
        found = hopper.decode.attend(q, views, keys, gates, config, SCALE)
        assert torch.equal(found.o, wanted.o)
        assert torch.equal(found.lse, wanted.lse)
        assert torch.equal(found.block_indices, wanted.block_indices)
