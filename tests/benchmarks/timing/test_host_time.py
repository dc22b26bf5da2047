"""The host's time of a call ends where the call returns, and launches are counted, also those of a backward pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks.timing import device_clock, latency, launches
from benchmarks.timing.latency import SamplingPlan

PLAN = SamplingPlan(min_samples=3, min_time_s=0.0, wall_limit_s=5.0, warmup_calls=1)


def test_a_gpus_earlier_work_is_waited_for_and_the_calls_own_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    trace: list[str] = []
    monkeypatch.setattr(device_clock, "wait", lambda: trace.append("wait"))
    taken = latency.of_host(lambda: trace.append("call"), "cuda", PLAN, lambda: trace.append("before"))
    assert trace == ["before", "wait", "call"] * (taken.warmup_calls + len(taken.samples_ms))
    assert (taken.clock, taken.cache, taken.queued_ahead, taken.end_to_end_ms) == ("perf_counter", "warm", None, None)


def test_on_a_cpu_nobody_waits_for_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_clock, "wait", lambda: pytest.fail("there is no GPU"))
    assert len(latency.of_host(lambda: None, "cpu", PLAN, lambda: None).samples_ms) == 3


def test_operators_stand_in_for_launches_on_a_cpu() -> None:
    x = torch.ones(3, requires_grad=True)
    assert launches.per_call(lambda: x.detach() * 2, "cpu") == 2
    forward = launches.per_call(lambda: (x * 2).sum(), "cpu")
    both = launches.per_call(lambda: (x * 2).sum().backward(), "cpu")
    assert forward == 2
    assert both is not None
    assert both > forward


def test_what_cupti_could_not_count_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    class Profiled:
        def __enter__(self) -> Profiled:
            return self

        def __exit__(self, *_: object) -> None: ...

        def events(self) -> list[Any]:
            return []

    monkeypatch.setattr(launches, "profile", lambda **_: Profiled())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    assert launches.per_call(lambda: None, "cuda") is None
