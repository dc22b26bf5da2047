"""Lanes of a call that a CUDA graph captures itself, without a plan: streams that wait for one another."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from unittest import mock

import pytest
import torch
from torch import Tensor

import nsa
from nsa.geometry import Layout

pytest.importorskip("triton")

from nsa.triton_backend import attention, compressed_window, scores, selected, selected_masked
from nsa.triton_backend import launch as launch_module
from nsa.triton_backend.launching import lanes
from tests.nsa.triton_backend import masking


class Stream:
    """Notes in `order` what is launched on it, and whom it waits for."""

    order: list[str]

    def __init__(self, name: str) -> None:
        self.name, self.cuda_stream = name, 0

    def wait_stream(self, other: Stream) -> None:
        self.order.append(f"{self.name} waits for {other.name}")


@pytest.fixture
def order(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What streams do, in a capture; `launch` adds to it."""
    main, sides = Stream("0"), [Stream(str(lane)) for lane in range(4)]
    Stream.order, current = [], [main]

    @contextlib.contextmanager
    def on(stream: Stream) -> Iterator[None]:
        current.append(stream)
        try:
            yield
        finally:
            current.pop()

    monkeypatch.setattr(lanes, "_has_lanes", lambda queries: True)
    monkeypatch.setattr(lanes, "side_stream", lambda device, beside, lane: sides[lane])
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: current[-1])
    monkeypatch.setattr(torch.cuda, "stream", on)
    return Stream.order


def launch(what: str) -> None:
    stream = torch.cuda.current_stream()
    assert isinstance(stream, Stream)
    stream.order.append(f"{stream.name}: {what}")


def test_lanes_of_a_capture_are_streams(order: list[str]) -> None:
    with lanes.beside(2, torch.zeros(1)):
        with lanes.lane(1):
            launch("a")
            with lanes.lane(2):
                launch("b")
            launch("c")
        launch("d")
        lanes.join(2)
        launch("e")
    launch("f")
    with lanes.lane(1):
        launch("of no lane")
    assert order == [
        "1 waits for 0", "2 waits for 0", "1: a", "2: b", "1: c", "0: d", "0 waits for 2", "0: e", "0 waits for 1",
        "0 waits for 2", "0: f", "0: of no lane",
    ]  # fmt: skip


def test_what_lanes_read_is_held_until_they_are_joined(order: list[str]) -> None:
    x = torch.zeros(1)
    gone = weakref.ref(x)
    with lanes.beside(1, torch.zeros(1)):
        lanes.hold(x)
        del x
        assert gone() is not None
    assert gone() is None


def test_an_error_leaves_no_lanes(order: list[str]) -> None:
    with pytest.raises(ValueError, match="no"), lanes.beside(1, torch.zeros(1)):
        raise ValueError("no")
    assert lanes.thread.lanes is None
    assert order[-1] == "0 waits for 1"


def test_a_large_call_has_no_lanes(monkeypatch: pytest.MonkeyPatch) -> None:
    """They hold more memory."""
    monkeypatch.setattr(lanes, "MOST_BYTES", 16)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    for numbers, found in ((4, True), (5, False)):
        queries = mock.Mock(is_cuda=True, itemsize=4, **{"get_device.return_value": 0, "numel.return_value": numbers})
        assert lanes._has_lanes(queries) is found
    assert not lanes._has_lanes(torch.zeros(1))


class Block:
    """Whether a call is in a block of `beside`, and what it holds."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.inside = False
        self.held = list[Tensor]()
        beside = attention.beside

        @contextlib.contextmanager
        def noted(last: int, queries: Tensor) -> Iterator[None]:
            with beside(last, queries):
                self.inside = True
                yield
            self.inside = False

        monkeypatch.setattr(attention, "beside", noted)
        monkeypatch.setattr(attention, "hold", lambda *tensors: self.held.extend(tensors))


def strided(*shape: int) -> Tensor:
    """A leaf whose channels do not lie side by side."""
    return torch.randn(*shape[:-2], shape[-1], shape[-2]).transpose(-1, -2).requires_grad_()


@pytest.mark.interpreter
@pytest.mark.parametrize("given", ["window", "compressed"])
def test_nothing_that_two_lanes_read_is_made_in_one_of_them(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Contiguous copies of keys and masks that are not known yet are made before; what lanes read is held."""
    config, block = nsa.NSAConfig(l=8, d=4, l_sel=16, n_sel=3, w=13), Block(monkeypatch)
    masking.serve(monkeypatch)
    copied, bits_of, unit_stride = list[bool](), selected_masked._bits, launch_module.unit_stride

    def noted(x: Tensor) -> Tensor:
        if (found := unit_stride(x)) is not x:
            copied.append(block.inside)
        return found

    def noted_bits(blocks: Tensor) -> Tensor:
        copied.append(block.inside)
        return bits_of(blocks)

    for module in (attention, compressed_window, selected, scores):
        monkeypatch.setattr(module, "unit_stride", noted)
    monkeypatch.setattr(selected_masked, "_bits", noted_bits)
    q, gates = torch.randn(1, 40, 4, 16).requires_grad_(), torch.rand(1, 40, 4, 3)
    layout = Layout(40, 40, config, q.device)
    pairs = {"selected": (strided(1, 40, 2, 16), strided(1, 40, 2, 16)), "window": None, "compressed": None}
    tokens = 40 if given == "window" else layout.num_slots
    pairs[given] = strided(1, tokens, 2, 16), strided(1, tokens, 2, 16)
    inputs = attention.Inputs(pairs["selected"], pairs["window"], None, pairs["compressed"])
    with torch.no_grad():
        output = attention.forward(q, inputs, gates, layout, 0.25)
        assert len(copied) >= 4
        saved = attention.Saved.of(output)._replace(bits=q.new_empty(0))
        of_branches = [*saved]
        attention.backward((output.o, None, None, None), q, inputs, gates, of_branches, layout, 0.25)
    assert len(copied) >= 9
    assert not any(copied)
    assert len(block.held) == 9, "do, lse and delta of three branches"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("batch", "tokens", "heads", "num_kv_heads", "channels"),
    [(2, 4096, 12, 2, 64), (1, 3000, 16, 1, 128), (1, 8192, 4, 1, 128), (1, 2048, 32, 2, 128)],
)
def test_a_graph_of_a_call_without_a_plan_gives_the_bits_of_an_eager_one(
    batch: int, tokens: int, heads: int, num_kv_heads: int, channels: int, dtype: torch.dtype
) -> None:
    """Replayed for other inputs, several times."""
    generator = torch.Generator("cuda").manual_seed(tokens)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device="cuda", dtype=dtype)

    def step() -> list[Tensor]:
        k, v = (x.chunk(3, 2) for x in (keys, values))
        o = nsa.nsa_attention(q, (k[0], k[1], k[2]), (v[0], v[1], v[2]), gates, nsa.NSAConfig(), backend="triton")
        return [o, *torch.autograd.grad(o, (q, keys, values, gates), do)]

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):  # leaves too, or autograd warns that their gradients come from another stream
        q = draw(batch, tokens, heads, channels).requires_grad_()
        keys, values = (draw(batch, tokens, 3 * num_kv_heads, channels).requires_grad_() for _ in range(2))
        gates, do = draw(batch, tokens, heads, 3).requires_grad_(), draw(batch, tokens, heads, channels)
        step()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            found = step()
        for _ in range(5):
            with torch.no_grad():
                for x in (q, keys, values, gates, do):
                    x.normal_()
            graph.replay()
            for one, true in zip(found, step(), strict=True):
                assert torch.equal(one, true)
