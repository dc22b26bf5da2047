"""What is measured is the call's own: its peak memory, a flushed L2, the clocks beside it, no compilation."""

from __future__ import annotations

import pytest
import torch

from benchmarks import runner
from benchmarks.cases.work import Work
from benchmarks.timing import device_clock, latency, memory
from benchmarks.timing.clocks import Clocks
from benchmarks.timing.device_clock import EventSampler
from benchmarks.timing.latency import SamplingPlan
from tests.benchmarks.synthetic import FINGERPRINT, GREEN, key


def test_the_peak_is_the_call_s_not_that_of_the_process() -> None:
    before = torch.ones(500 * memory.MIB // 4)
    del before
    needed = memory.of_this_process(lambda: torch.ones(400 * memory.MIB // 4))
    assert needed.mib == pytest.approx(400, abs=5)  # in units of 1000 KiB it would read as 410


def test_a_gpu_s_peak_is_the_call_s_above_what_stood_before(monkeypatch: pytest.MonkeyPatch) -> None:
    state = {"now": 100 * memory.MIB, "peak": 900 * memory.MIB}
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: state["now"])
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: state["peak"])
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: state.update(peak=state["now"]))
    found = memory.of_cuda(lambda: state.update(peak=max(state["peak"], state["now"] + 69 * memory.MIB)))
    assert (found.mib, found.source) == (69.0, "cuda_allocator")


class L2:
    """A cache of a simulated GPU: who has been in it since."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.bytes, self.flushed = 1000, 0
        l2 = self

        class Buffer:
            def __init__(self, size: int) -> None:
                self.size = size

            def zero_(self) -> None:
                l2.flushed += self.size > l2.bytes

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                pass

            def record(self) -> None: ...
            def synchronize(self) -> None: ...
            def query(self) -> bool:
                return False

            def elapsed_time(self, other: object) -> float:
                return 1.0

        properties = type("Properties", (), {"L2_cache_size": self.bytes})()
        monkeypatch.setattr(torch, "empty", lambda size, **_: Buffer(size))
        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "_sleep", lambda _: None)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)


@pytest.mark.parametrize("cache", ["cold", "warm"])
def test_every_cold_call_finds_a_flushed_l2_and_no_warm_one_does(cache: str, monkeypatch: pytest.MonkeyPatch) -> None:
    l2 = L2(monkeypatch)
    found: list[int] = []

    def call() -> None:
        found.append(l2.flushed)
        l2.flushed = 0

    timed = latency.measure(call, "cuda", cache, SamplingPlan(3, 0.0, 10.0))
    assert (timed.cache, len(timed.samples_ms)) == (cache, 3)
    assert set(found) == {1 if cache == "cold" else 0}
    assert len(found) >= 3 + 2 + 3  # samples, warm-ups, end to end


def test_the_clocks_are_read_beside_the_samples_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    L2(monkeypatch)
    looks: list[int] = []

    class Watch:
        def observe(self) -> None:
            looks.append(1)

        def clocks(self) -> Clocks:
            return Clocks((1,) * len(looks), (1.0,) * len(looks), (1,) * len(looks))

    monkeypatch.setattr(latency.clocks, "monitor", Watch)
    timed = latency.measure(lambda: None, "cuda", "warm", SamplingPlan(4, 0.0, 10.0))
    assert timed.clocks is not None
    assert len(timed.clocks.sm_mhz) == len(timed.samples_ms) == 4
    looks.clear()
    unwatched = latency.measure(lambda: None, "cuda", "warm", SamplingPlan(4, 0.0, 10.0, clocks=False))
    assert (unwatched.clocks, looks) == (None, []), "no time is spent on what a pair of `compare` does not use"
    assert timed.queued_ahead, "the samples hold launch latency"


class UnjoinedError(device_clock.UnjoinedWorkError):
    pass


def test_a_gpu_s_work_that_nobody_waits_for_is_refused_by_the_timer(monkeypatch: pytest.MonkeyPatch) -> None:
    L2(monkeypatch)
    monkeypatch.setattr(EventSampler, "require_joined", lambda self, ms: (_ for _ in ()).throw(UnjoinedError(ms)))
    with pytest.raises(UnjoinedError, match=r"1\.0"):
        latency.measure(lambda: None, "cuda", "warm", SamplingPlan(3, 0.0, 10.0))


def test_the_first_call_counts_as_compilation_and_not_as_latency() -> None:
    made: list[int] = []

    def call() -> tuple[torch.Tensor, ...]:
        if not made:
            torch.rand(1500, 1500) @ torch.rand(1500, 1500)
        made.append(1)
        return (torch.zeros(1),)

    work = Work(lambda _: GREEN, call, 1)
    record = runner.measure(key(), "cpu", SamplingPlan(3, 0.0, 5.0), FINGERPRINT, "command", lambda *_: work).record
    assert record.compile_s is not None
    assert record.latency_ms is not None
    assert record.compile_s * 1e3 > 10 * record.latency_ms
    assert record.warmup_calls is not None
    assert record.warmup_calls >= 2
