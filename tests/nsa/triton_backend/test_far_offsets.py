"""Offsets beyond 2³¹ elements: on a CPU through strides over memory that is never touched, on a GPU at real size."""

from __future__ import annotations

import math
import mmap
import multiprocessing
from collections.abc import Callable
from unittest import mock

import pytest
import torch
from torch import Tensor

import nsa
from harness import forced
from nsa.config import BRANCHES
from nsa.kv import KVView

pytest.importorskip("triton")

from nsa.triton_backend import decode, decode_attention, dispatch, launch, write_cache

pytestmark = pytest.mark.usefixtures("device")  # on a GPU, where there is one
CONFIG = nsa.NSAConfig(l=2, d=2, l_sel=4, n_sel=3, w=6)
BY_TOKEN = nsa.NSAConfig(l=1, d=1, l_sel=4, n_sel=3, w=6, init_blocks=0, local_blocks=1)
"""A compressed key per token, so that these reach as far."""
TOKENS = 300
NOT_RESERVED = 0x4000  # MAP_NORESERVE: pages exist once they are touched
NAMES = ("q", "k", "v", "gates")

interpreted = pytest.mark.interpreter  # a GPU has no memory that is not there


def far(x: Tensor, axis: int, stride: int) -> Tensor:
    """The same numbers in float16, `stride` elements apart along one axis."""
    strides = [s * (1 if i != axis else 0) for i, s in enumerate(x.contiguous().stride())]
    strides[axis] = stride
    elements = 1 + sum((n - 1) * s for n, s in zip(x.shape, strides, strict=True))
    memory = mmap.mmap(-1, 2 * elements, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NOT_RESERVED)
    there = torch.frombuffer(memory, dtype=torch.float16).as_strided(x.shape, strides)
    return there.copy_(x)


def draw(batch: int, queries: int, keys: int, num_kv_heads: int = 1, group: int = 2) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(keys)
    heads = num_kv_heads * group
    shapes = (queries, heads, 16), (keys, num_kv_heads, 16), (keys, num_kv_heads, 16), (queries, heads, 3)
    return {n: torch.randn(batch, *s, generator=generator).half() for n, s in zip(NAMES, shapes, strict=True)}


def results(x: dict[str, Tensor], config: nsa.NSAConfig, compressed: tuple[Tensor, Tensor]) -> list[Tensor]:
    """Output, choice and gradients of a call, and of its last queries as one fused step."""
    leaves = {name: t.detach().requires_grad_() for name, t in x.items()}
    given = [t.detach().requires_grad_() for t in compressed]
    o, aux = nsa.nsa_attention(
        **leaves, config=config, k_compressed=given[0], v_compressed=given[1], backend="triton", return_aux=True
    )
    gradients = torch.autograd.grad(o.float().square().sum(), [*leaves.values(), *given])
    with torch.no_grad():
        last = {name: t[:, -1:] if name in ("q", "gates") else t for name, t in x.items()}
        step = nsa.nsa_attention(
            **last, config=config, k_compressed=compressed[0], v_compressed=compressed[1], backend="triton"
        )
    return [o.detach(), aux.block_indices, *aux.lse.values(), *gradients, step]


def same(found: list[Tensor], wanted: list[Tensor]) -> None:
    for number, (a, b) in enumerate(zip(found, wanted, strict=True)):
        assert torch.equal(a, b), f"result {number}"


def go_by_block() -> None:
    """From here on in this process, the selected branch loops over blocks of keys wherever it can."""
    mock.patch.object(dispatch, "sooner_by_block", return_value=True).start()


def batch_rows_far_apart() -> None:
    """Row 2 begins 2.4·10⁹ elements behind row 0, though its stride has 32 bits."""
    go_by_block()
    x = draw(3, 9, 12)
    k_cmp, v_cmp = (nsa.compress(x[name], CONFIG, backend="torch") for name in "kv")
    wanted = results(x, CONFIG, (k_cmp, v_cmp))
    apart = {name: far(t, 0, 1_200_000_000) if name != "gates" else t for name, t in x.items()}
    same(results(apart, CONFIG, (far(k_cmp, 0, 1_200_000_000), far(v_cmp, 0, 1_200_000_000))), wanted)


def tokens_far_apart() -> None:
    """Key 269 is the first behind 2³¹ elements; a tile of 256 tokens still spans fewer."""
    go_by_block()
    x = draw(1, 9, TOKENS)
    k_cmp, v_cmp = x["k"].clone(), x["v"].clone()
    wanted = results(x, BY_TOKEN, (k_cmp, v_cmp))
    stride = launch.MAX_OFFSET // 268
    assert launch.unit_stride(far(x["k"], 1, stride)).stride(1) == stride  # read where it lies
    apart = {**x, "k": far(x["k"], 1, stride), "v": far(x["v"], 1, stride)}
    same(results(apart, BY_TOKEN, (far(k_cmp, 1, stride), far(v_cmp, 1, stride))), wanted)


def tokens_far_apart_kv_major() -> None:
    """The selected branch, forward, where the loop goes over blocks of keys."""
    dispatch.KV_MAJOR_MIN_QUERIES = 1
    go_by_block()
    x, stride = draw(1, 6, TOKENS), launch.MAX_OFFSET // 268
    blocks = torch.tensor([1, 30, 73], dtype=torch.int32).expand(1, 6, 1, 3)
    k, v = (far(x[name], 1, stride) for name in "kv")
    found, wanted = (
        nsa.selected_attention(x["q"], *keys, blocks, CONFIG, backend="triton") for keys in ((k, v), (x["k"], x["v"]))
    )
    same(list(found), list(wanted))


def pages_far_apart() -> None:
    """Pages of a cache in a pool of more than 2³¹ elements; a tile of keys lies in one page, or in several."""
    decode.KEYS = 16
    for size, stride in ((8, 400_000_000), (16, 800_000_000)):
        config, x = nsa.NSAConfig(l=2, d=2, l_sel=size, n_sel=3, w=6), draw(2, 1, 16)
        blank = torch.zeros(2, 8, 1, 16, dtype=torch.float16)
        k, v = (
            torch.cat([torch.cat([nsa.compress(x[name], config, backend="torch"), blank], 1), x[name]])
            .reshape(-1, size, 1, 16)
            for name in "kv"
        )  # fmt: skip
        blocks, tokens = torch.arange(len(k), dtype=torch.int32).view(2, 2, -1)
        lengths = torch.tensor([16, 13], dtype=torch.int32)
        found = []
        for pages in ((far(k, 0, stride), far(v, 0, stride)), (k, v)):
            rows = [KVView(*pages, table) for table in (blocks, tokens, tokens)]
            decoded = decode_attention(x["q"], *rows, lengths, x["gates"], config, 0.25)
            found.append([decoded.o, decoded.block_indices, decoded.lse])
        same(*found)


def written_pages_far_apart() -> None:
    """A cache's write: from the page 8,388,608 on, rows of 256 elements lie behind 2³¹ of them."""
    size, far_page = 16, 2**31 // 256 + 3
    memory = mmap.mmap(-1, 2 * 256 * (far_page + 1), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NOT_RESERVED)
    pages = torch.frombuffer(memory, dtype=torch.float16).view(-1, size, 1, 16)
    tables = torch.tensor([[far_page], [far_page - 1]], dtype=torch.int32)[:, None]
    new = draw(1, 1, 6)["k"]
    config = nsa.NSAConfig(l=2, d=2, l_sel=16, n_sel=3, w=6)
    tokens, blocks = (KVView(pages, pages, table) for table in tables)
    write_cache((new,), (new,), (tokens,), blocks, torch.zeros(1, dtype=torch.int32), config)
    same([pages[far_page, :6], pages[far_page - 1, :3]], [new[0], nsa.compress(new, config, backend="triton")[0]])


@interpreted
@pytest.mark.parametrize(
    "check",
    [batch_rows_far_apart, tokens_far_apart, tokens_far_apart_kv_major, pages_far_apart, written_pages_far_apart],
    ids=lambda f: f.__name__,
)
def test_what_lies_beyond_32_bits_is_found(check: Callable[[], None]) -> None:
    """In a process of its own, which reads memory that is not its own where an offset has wrapped around."""
    child = multiprocessing.get_context("fork").Process(target=check)
    child.start()
    child.join(120)
    alive = child.is_alive()
    child.kill()
    assert not alive
    assert child.exitcode == 0


def test_tensors_whose_tiles_pass_32_bits_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the bound lowered, so that any stride passes it: what a call gives stays the same."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    x = {name: t.float().to(device) for name, t in draw(1, 9, 12).items()}
    spread = {name: torch.stack([t, t.new_full(t.shape, torch.nan)], 2).flatten(1, 2)[:, ::2] for name, t in x.items()}
    wanted = nsa.nsa_attention(**x, config=CONFIG, backend="triton")
    assert launch.unit_stride(spread["k"]) is spread["k"]
    monkeypatch.setattr(launch, "MAX_OFFSET", 16)
    assert launch.unit_stride(spread["k"]).is_contiguous()
    assert torch.equal(nsa.nsa_attention(**spread, config=CONFIG, backend="triton"), wanted)


HEADS, CHANNELS = 128, 256
LONG = math.ceil(2**31 / (HEADS * CHANNELS)) + 1024  # tokens: the last 1024 lie behind 2³¹ elements of q and of o
PAPER = nsa.NSAConfig(w=128, n_sel=4)


@pytest.mark.gpu
@pytest.mark.parametrize("branch", BRANCHES)
def test_queries_behind_32_bits_are_as_those_before_them(branch: str) -> None:
    """q, o, their gradients of 4.4 GiB each, in about 30 GiB: the last rows, and what they give to the keys, are what
    they are in a call that has no other rows."""
    if dispatch.interpreted() or forced.memory_bytes()[1] < 60 * 2**30:
        pytest.skip("needs 60 GiB of GPU memory")
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(1, *shape, generator=generator, device="cuda", dtype=torch.bfloat16)

    q, k, v, last = normal(LONG, HEADS, CHANNELS), normal(LONG, 1, CHANNELS), normal(LONG, 1, CHANNELS), 512
    k_cmp, v_cmp = (nsa.compress(x, PAPER) for x in (k, v))
    chosen = nsa.select_blocks(q[:, -last:], k_cmp, PAPER, LONG, backend="triton")
    early = torch.zeros(1, LONG - last, 1, PAPER.n_sel, dtype=torch.int32, device="cuda")

    def run(rows: Tensor) -> tuple[Tensor, ...]:
        leaves = [x.detach().requires_grad_() for x in (rows, *((k_cmp, v_cmp) if branch == "compressed" else (k, v)))]
        if branch == "compressed":
            o, lse = nsa.compressed_attention(*leaves, PAPER, LONG, backend="triton")
        elif branch == "window":
            o, lse = nsa.window_attention(*leaves, PAPER, backend="triton")
        else:
            indices = chosen if rows.shape[1] == last else torch.cat([early, chosen], 1)
            o, lse = nsa.selected_attention(*leaves, indices, PAPER, backend="triton")
        upstream = torch.zeros_like(o)
        upstream[:, -last:] = normal_upstream
        dq, dk, dv = torch.autograd.grad(o, leaves, upstream)
        return o[:, -last:].clone(), lse[:, -last:].clone(), dq[:, -last:].clone(), dk, dv

    normal_upstream = normal(last, HEADS, CHANNELS)
    wanted = run(q[:, -last:].clone())
    torch.cuda.empty_cache()
    for name, found, true in zip(("o", "lse", "dq", "dk", "dv"), run(q), wanted, strict=True):
        error = (found.float() - true.float()).abs().max() / true.float().abs().max()
        assert error <= 0.02, f"{name}: {error:.3g}"  # two roundings to bfloat16 in another order


@pytest.mark.gpu
def test_choices_behind_32_bits_are_as_those_before_them() -> None:
    if dispatch.interpreted() or forced.memory_bytes()[1] < 60 * 2**30:
        pytest.skip("needs 60 GiB of GPU memory")
    generator = torch.Generator("cuda").manual_seed(0)
    q = torch.randn(1, LONG, HEADS, CHANNELS, generator=generator, device="cuda", dtype=torch.bfloat16)
    k = torch.randn(1, LONG, 1, CHANNELS, generator=generator, device="cuda", dtype=torch.bfloat16)
    k_cmp = nsa.compress(k, PAPER)
    whole = nsa.select_blocks(q, k_cmp, PAPER, backend="triton")[:, -512:]
    same_rows = (whole == nsa.select_blocks(q[:, -512:].clone(), k_cmp, PAPER, LONG, backend="triton")).all(-1)
    assert same_rows.float().mean() >= 0.99  # lse may be added up in another order, and a near tie go the other way
