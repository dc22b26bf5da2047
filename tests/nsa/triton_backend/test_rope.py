"""RoPE by one kernel has the bits of `nsa.rope` in PyTorch's operations, forward and backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from nsa.rope import _FREQUENCIES, _kept_frequencies, rotate_both

pytest.importorskip("triton")

from nsa.triton_backend import rope

POSITIONS = {
    "the first": None,
    "one row for all": torch.arange(9) + 65_000,
    "a row for each": torch.arange(18).view(2, 9) * 7919,
    "of 32 bits": torch.arange(9, dtype=torch.int32),
    "every second of a row": torch.arange(18)[::2],
}


def drawn(device: torch.device, channels: int, dtype: torch.dtype) -> list[Tensor]:
    """q [2, 9, 11, channels] and k [2, 9, 3, channels], the latter a part of a wider tensor; gradients of both."""
    generator = torch.Generator().manual_seed(channels)

    def draw(heads: int) -> Tensor:
        return torch.randn(2, 9, heads, channels, generator=generator).to(device, dtype)

    return [draw(11), draw(5)[:, :, 1:4], draw(11), draw(5)[:, :, :3]]


def outcome(backend: str, drawn: list[Tensor], positions: Tensor | None) -> list[Tensor]:
    q, k, *upstream = drawn
    q, k = q.detach().requires_grad_(), k.detach().requires_grad_()
    rotated = rotate_both(q, k, None if positions is None else positions.to(q.device), 10000.0, backend)
    return [*(x.detach() for x in rotated), *torch.autograd.grad(rotated, (q, k), upstream)]


@pytest.mark.parametrize("positions", POSITIONS.values(), ids=POSITIONS)
@pytest.mark.parametrize("channels", [1, 7, 48, 64])
def test_it_has_the_bits_of_pytorchs_operations(device: torch.device, channels: int, positions: Tensor | None) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        given = drawn(device, channels, dtype)
        for one, true in zip(outcome("triton", given, positions), outcome("torch", given, positions), strict=True):
            assert one.dtype == dtype
            assert torch.equal(one, true)


def test_no_token_is_no_launch(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rope, "_rotate", None)
    q, k = (torch.empty(1, 0, heads, 16, device=device) for heads in (4, 2))
    assert [x.shape for x in rotate_both(q, k, None, 10000.0, "triton")] == [q.shape, k.shape]


def test_a_gradient_of_one_of_the_two(device: torch.device) -> None:
    q, k, dq, _ = drawn(device, 16, torch.float32)
    q, k = q.detach().requires_grad_(), k.detach().requires_grad_()
    found, wanted = (
        torch.autograd.grad(rotate_both(q, k, None, 10000.0, backend)[0], q, dq)[0] for backend in ("triton", "torch")
    )
    assert torch.equal(found, wanted)


WRONG = {
    "too few": torch.arange(5),
    "one row of two": torch.arange(9)[None],
    "no integers": torch.arange(9.0),
    "three dimensions": torch.arange(18).view(1, 2, 9),
    "no tensor": [*range(9)],
}


@pytest.mark.parametrize("backend", ["triton", "torch"])
@pytest.mark.parametrize("positions", WRONG.values(), ids=WRONG)
def test_wrong_positions_are_refused(device: torch.device, positions: Any, backend: str) -> None:
    """A kernel would read what lies behind them."""
    q, k, *_ = drawn(device, 16, torch.float32)
    if isinstance(positions, Tensor):
        positions = positions.to(device)
    with pytest.raises(ValueError, match="positions must"):
        rotate_both(q, k, positions, 10000.0, backend)


@pytest.mark.parametrize("shape", [(2, 9, 3, 8), (2, 8, 3, 16), (1, 9, 3, 16)])
def test_keys_of_another_size_are_refused(device: torch.device, shape: tuple[int, ...]) -> None:
    q = torch.zeros(2, 9, 4, 16, device=device)
    with pytest.raises(ValueError, match="k must have shape"):
        rotate_both(q, torch.zeros(shape, device=device), None, 10000.0, "triton")


def test_a_fake_tensor_is_not_kept() -> None:
    with FakeTensorMode():
        _kept_frequencies(3, 77.0, torch.device("cpu"))
    assert type(_kept_frequencies(3, 77.0, torch.device("cpu"))) is Tensor


@pytest.mark.gpu
def test_frequencies_that_a_graph_made_are_not_kept() -> None:
    """Another graph's, or an eager call's, would read memory that is the first graph's."""
    q, k, *_ = drawn(torch.device("cuda"), 16, torch.float32)
    key = 8, 123.0, q.device
    wanted = rotate_both(q, k, None, 123.0, "torch")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = rotate_both(q, k, None, 123.0, "triton")
    assert key not in _FREQUENCIES
    graph.replay()
    for one, true in zip(found, wanted, strict=True):
        assert torch.equal(one, true)
    rotate_both(q, k, None, 123.0, "triton")
    assert key in _FREQUENCIES


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")  # of the one that Inductor begins with
def test_the_first_call_of_a_process_may_be_in_a_graph_of_the_compiler() -> None:
    """Whose memory nothing may keep."""
    _FREQUENCIES.clear()
    torch.compiler.reset()
    q, k, *_ = (x.bfloat16() for x in drawn(torch.device("cuda"), 64, torch.float32))
    wanted = rotate_both(q, k, None, 321.0, "torch")
    compiled = torch.compile(lambda q, k: rotate_both(q, k, None, 321.0), mode="reduce-overhead", fullgraph=True)
    for _ in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        found = [x.clone() for x in compiled(q, k)]
        for one, true in zip(found, wanted, strict=True):
            assert torch.equal(one, true)
