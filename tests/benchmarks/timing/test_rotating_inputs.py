"""Cold calls take turns on copies of the inputs, warm ones stay on theirs; the inputs are left as they were."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from benchmarks.cases.outcome import Correctness
from benchmarks.cases.work import Call, Work
from benchmarks.correctness import anti_cheat
from benchmarks.timing import cuda_graphs, latency, rotating_inputs
from benchmarks.timing.latency import SamplingPlan, Timing
from benchmarks.timing.rotating_inputs import RotatingInputs
from tests.benchmarks.synthetic import GREEN, key


class Log:
    """What was called, on which copy."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def work(self, name: str, x: Tensor, copy: Callable[[], Work] | None = None) -> Work:
        def call() -> tuple[Tensor, ...]:
            self.calls.append(name)
            return (x * 2,)

        def recheck(call: Call, seed: int, rows_share: float = 1.0) -> Correctness:
            call()
            self.calls.append(f"rechecked {name} with {seed}, {rows_share:.0%}")
            return GREEN

        return Work(lambda _: GREEN, call, 1, inputs={"x": x}, recheck=recheck, copy=copy)


def five_calls(
    call: Callable[[], object], device: str, cache: str, plan: SamplingPlan, before: Callable[[], object]
) -> Timing:
    for _ in range(5):
        before()
        call()
    return Timing((1.0,), "cuda_event", cache, 0, "enough_samples")


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Log:
    monkeypatch.setattr(latency, "measure", five_calls)
    monkeypatch.setattr(cuda_graphs, "capture", lambda call: call)
    return Log()


@pytest.mark.parametrize("launch", ["eager", "graph"])
@pytest.mark.parametrize(("cache", "expected"), [("warm", "acdac"), ("cold", "ababa")])
def test_warm_calls_go_through_the_steps_that_follow(
    cache: str, expected: str, launch: str, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cold ones find nothing of the step before, so that a copy will do."""
    monkeypatch.setattr(rotating_inputs, "_has_room", lambda work: True)
    shared = torch.ones(4)
    work = dataclasses.replace(
        log.work("a", shared, copy=lambda: log.work("b", torch.ones(4))),
        following=lambda: [log.work(name, shared) for name in "cd"],
    )
    all_steps = RotatingInputs(work, key(cache=cache, launch=launch), "cpu")
    all_steps.time(SamplingPlan(1, 0.0, 1.0))
    assert "".join(log.calls) == expected
    assert torch.equal(shared, torch.ones(4))  # touched once by each step, and left as it was


@pytest.mark.parametrize("launch", ["eager", "graph"])
@pytest.mark.parametrize(
    ("cache", "room", "expected"),
    [("cold", True, "abab"), ("cold", False, "aaaa"), ("warm", True, "aaaa")],
)
def test_cold_calls_rotate_their_inputs_where_there_is_room(
    cache: str, room: bool, expected: str, launch: str, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rotating_inputs, "_has_room", lambda work: room)
    work = log.work("a", torch.ones(4), copy=lambda: log.work("b", torch.ones(4)))
    both = RotatingInputs(work, key(cache=cache, launch=launch), "cpu")
    both.time(SamplingPlan(1, 0.0, 1.0))
    assert "".join(log.calls) == (expected * 2)[:5]
    log.calls.clear()
    last = max(expected)
    assert both.recheck(7, 0.2) == GREEN
    assert log.calls == [last, last, last, f"rechecked {last} with 7, 20%", last, last], (
        "on the timed inputs, others, in a row"
    )


def test_the_inputs_change_between_calls_and_at_last_are_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    x, seen = torch.ones(4), []
    work = Work(lambda _: GREEN, lambda: (seen.append(x.clone()) or x,), 1, inputs={"x": x})
    before = anti_cheat.digests(work.inputs)
    timed = RotatingInputs(work, key(), "cpu").time(SamplingPlan(3, 0.0, 5.0, warmup_calls=0))
    assert len(timed.samples_ms) == 3
    assert [a.equal(b) for a, b in itertools.pairwise(seen)] == [False, False]
    anti_cheat.require_unchanged(work.inputs, before)


def test_the_inputs_are_as_they_were_when_a_call_fails() -> None:
    x = torch.ones(4)

    def call() -> tuple[Tensor, ...]:
        raise RuntimeError("boom")

    work = Work(lambda _: GREEN, call, 1, inputs={"x": x})
    with pytest.raises(RuntimeError, match="boom"):
        RotatingInputs(work, key(), "cpu").time(SamplingPlan(1, 0.0, 1.0))
    assert x.tolist() == [1.0] * 4


@pytest.mark.parametrize(("mode", "device", "timed"), [("train-loop", "cuda", "loop"), ("train-loop", "cpu", "call"),
                                                      ("train-step", "cuda", "call")])  # fmt: skip
def test_a_loop_of_a_gpu_is_timed_as_a_loop(
    mode: str, device: str, timed: str, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(latency, "of_loop", lambda *_: Timing((2.0,), "cuda_event", "warm", 0, "enough_samples"))
    rotating = RotatingInputs(log.work("a", torch.ones(4)), key(mode), device)
    found = rotating.time(SamplingPlan(1, 0.0, 1.0))
    assert found.latency_ms == {"loop": 2.0, "call": 1.0}[timed]


@pytest.mark.gpu
def test_a_graph_gives_what_the_call_gives_and_a_call_that_waits_has_none() -> None:
    x = torch.arange(4.0, device="cuda")
    replay = cuda_graphs.capture(lambda: (x * 2,))
    x += 1
    assert replay()[0].tolist() == [2.0, 4.0, 6.0, 8.0]
    with pytest.raises(cuda_graphs.CannotCaptureError, match="no CUDA graph can be made of this call"):
        cuda_graphs.capture(lambda: (x * float(x.sum()),))
    assert (x + 1).tolist() == [2.0, 3.0, 4.0, 5.0]  # the device is as well as before
    assert torch.rand_like(x).isfinite().all()
    assert cuda_graphs.capture(lambda: (torch.rand_like(x),))()[0].isfinite().all()
