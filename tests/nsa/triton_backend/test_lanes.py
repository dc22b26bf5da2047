"""Lanes of a call that a CUDA graph captures itself, without a plan: streams that wait for one another."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import nsa

pytest.importorskip("triton")

from nsa.triton_backend import lanes


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

    monkeypatch.setattr(lanes, "_captured", lambda x: True)
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


def test_a_large_call_has_no_lanes(order: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """What lanes read is held longer."""
    monkeypatch.setattr(lanes, "MOST_BYTES", 16)
    with lanes.beside(1, torch.zeros(4)):
        assert lanes.thread.lanes is not None
    order.clear()
    with lanes.beside(1, torch.zeros(5)), lanes.lane(1):
        launch("all")
    assert order == ["0: all"]


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
