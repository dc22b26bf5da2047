"""The device clock on a simulated GPU: one in-order stream, a host that launches slower than kernels run."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch

from benchmarks.timing import device_clock, latency
from benchmarks.timing.device_clock import EventSampler, UnjoinedWorkError
from benchmarks.timing.latency import SamplingPlan

_CYCLES_PER_S = 2e9
_LAUNCH_S = 5e-6


class SimulatedGPU:
    """Two times that only move forward: the host's, and the one until which the stream is busy."""

    def __init__(self) -> None:
        self.host_s, self.busy_until_s, self.side_until_s = 0.0, 0.0, 0.0
        self.cold_wait_s = 0.0
        """What the first wait after a launch takes longer than the next ones."""
        self._launched = False

    def read_clock(self) -> float:
        """What time.perf_counter does: it takes a moment too, or a host that waits by it would wait for ever."""
        self.host_s += 1e-7
        return self.host_s

    def kernel(self, seconds: float) -> None:
        """Launch one; it runs when all before it are done."""
        self.host_s += _LAUNCH_S
        self._launched = True
        self.busy_until_s = max(self.host_s, self.busy_until_s) + seconds

    def elsewhere(self, seconds: float) -> None:
        """Launch one on another stream."""
        self.host_s += _LAUNCH_S
        self._launched = True
        self.side_until_s = max(self.host_s, self.side_until_s) + seconds

    def wait(self) -> None:
        """What torch.cuda.synchronize does."""
        self.host_s = max(self.host_s, self.busy_until_s, self.side_until_s) + 1e-6
        self.host_s += self.cold_wait_s * self._launched
        self._launched = False


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimulatedGPU]:
    device = SimulatedGPU()

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            self.at_s = 0.0

        def record(self) -> None:
            self.at_s = max(device.host_s, device.busy_until_s)

        def query(self) -> bool:
            return device.host_s >= self.at_s

        def synchronize(self) -> None:
            device.host_s = max(device.host_s, self.at_s)

        def elapsed_time(self, end: Event) -> float:
            return (end.at_s - self.at_s) * 1e3

    def sleep(cycles: int) -> None:
        device.kernel(cycles / _CYCLES_PER_S)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", sleep)
    monkeypatch.setattr(torch.cuda, "synchronize", device.wait)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(L2_cache_size=1000))
    monkeypatch.setattr(device_clock, "time", SimpleNamespace(perf_counter=device.read_clock))
    yield device
    assert device.host_s > 0, "the fixture simulated nothing"


def sampler(gpu: SimulatedGPU, call: Callable[[], object]) -> EventSampler:
    """One that has warmed up and looked for its spin."""
    made = EventSampler(call, lambda: None, cold=False)
    for _ in range(3):
        made.plain_sample()
    made.queue_ahead()
    return made


def test_launch_latency_stays_outside(gpu: SimulatedGPU) -> None:
    def call() -> None:
        for _ in range(100):
            gpu.kernel(1e-6)

    clock = sampler(gpu, call)
    assert clock.queued_ahead
    assert clock.sample() == pytest.approx(0.1)
    assert clock.plain_sample() == pytest.approx(0.5, rel=0.05)  # the host's pace: what the spin keeps out
    assert clock.end_to_end_sample() == pytest.approx(0.5, rel=0.05)


def test_a_device_that_is_slower_than_the_host_is_measured_the_same(gpu: SimulatedGPU) -> None:
    clock = sampler(gpu, lambda: gpu.kernel(3e-3))
    assert clock.queued_ahead
    assert clock.sample() == pytest.approx(3.0)


def test_a_call_that_waits_for_the_device_is_said_to(gpu: SimulatedGPU) -> None:
    def call() -> None:
        gpu.kernel(1e-3)
        gpu.wait()
        gpu.kernel(1e-3)

    clock = sampler(gpu, call)
    assert not clock.queued_ahead
    begin_s = gpu.host_s
    assert clock.sample() == pytest.approx(2.0, rel=0.05)
    assert gpu.host_s - begin_s < 2.5e-3  # nothing is gained by a spin


def test_a_host_that_is_held_up_once_is_asked_again(gpu: SimulatedGPU) -> None:
    held_up = iter([0.0] * 6 + [0.05] + [0.0] * 20)

    def call() -> None:
        gpu.kernel(1e-5)
        gpu.host_s += next(held_up)
        gpu.kernel(1e-5)

    clock = sampler(gpu, call)
    samples = [clock.sample() for _ in range(8)]
    assert clock.queued_ahead
    assert max(samples) == pytest.approx(0.02)


def test_a_host_that_is_held_up_for_good_is_no_longer_said_to_be_ahead(gpu: SimulatedGPU) -> None:
    calls = 0

    def call() -> None:
        nonlocal calls
        calls += 1
        gpu.kernel(1e-5)
        gpu.host_s += 0.05 if calls > 4 else 0.0
        gpu.kernel(1e-5)

    clock = sampler(gpu, call)
    assert clock.queued_ahead
    clock.sample()
    clock.sample()
    assert not clock.queued_ahead


def test_work_after_the_call_s_end_is_refused(gpu: SimulatedGPU) -> None:
    def call() -> None:
        gpu.kernel(1e-6)
        gpu.elsewhere(1e-3)

    clock = sampler(gpu, call)
    taken = [clock.sample() for _ in range(5)]
    with pytest.raises(UnjoinedWorkError, match="work on another stream is not waited for"):
        clock.require_joined(statistics.median(taken))


@pytest.mark.parametrize(("cold_wait_s", "later_calls"), [(0.0, 0), (1e-4, 12)])
def test_a_host_that_waits_slowly_is_no_unjoined_work(gpu: SimulatedGPU, cold_wait_s: float, later_calls: int) -> None:
    """And how many calls came after the samples is told, for whoever counts them."""
    gpu.cold_wait_s = cold_wait_s
    timed = latency.measure(lambda: gpu.kernel(1e-6), "cuda", "warm", SamplingPlan(5, 0.0, 5.0, clocks=False))
    assert timed.later_calls == later_calls


@pytest.mark.parametrize("samples", [5, 6, 7, 8])
@pytest.mark.parametrize(
    "side_ms",
    [lambda number: 0.1, lambda number: 1.0, lambda number: 0.15 * (number % 2), lambda number: 0.06 * 1.1**number],
    ids=["short", "long", "every second call", "grows"],
)
def test_unjoined_work_is_found_by_a_host_that_waits_slowly(
    gpu: SimulatedGPU, side_ms: Callable[[int], float], samples: int
) -> None:
    calls = 0

    def call() -> None:
        nonlocal calls
        calls += 1
        gpu.kernel(1e-6)
        gpu.busy_until_s = max(gpu.busy_until_s, gpu.host_s)
        gpu.side_until_s = gpu.busy_until_s + side_ms(calls) / 1e3

    gpu.cold_wait_s = 1e-4
    clock = sampler(gpu, call)
    taken = statistics.median(clock.sample() for _ in range(samples))
    with pytest.raises(UnjoinedWorkError, match=r"worked for \d+(\.\d+)? ms"):
        clock.require_joined(taken)


def test_what_takes_longer_than_a_slow_host_is_refused_at_once(gpu: SimulatedGPU) -> None:
    def call() -> None:
        gpu.kernel(1e-6)
        gpu.elsewhere(1.0)

    clock = sampler(gpu, call)
    taken = statistics.median(clock.sample() for _ in range(5))
    calls = clock.calls
    with pytest.raises(UnjoinedWorkError):
        clock.require_joined(taken)
    assert clock.calls == calls


def test_honest_work_is_not_refused(gpu: SimulatedGPU) -> None:
    clock = sampler(gpu, lambda: gpu.kernel(1e-6))
    clock.require_joined(statistics.median(clock.sample() for _ in range(5)))


@pytest.mark.parametrize(("kernel_s", "alone_ms", "step_ms"), [(1e-6, 0.01, 0.05), (2e-5, 0.2, 0.2)])
def test_a_loop_goes_at_the_pace_of_the_slower_of_host_and_gpu(
    gpu: SimulatedGPU, kernel_s: float, alone_ms: float, step_ms: float
) -> None:
    """Ten kernels a step, each of which takes the host 5 us to launch."""

    def call() -> None:
        for _ in range(10):
            gpu.kernel(kernel_s)

    plan = SamplingPlan(5, 0.0, 5.0, clocks=False)
    alone = latency.measure(call, "cuda", "warm", plan)
    assert alone.latency_ms == pytest.approx(alone_ms)
    assert alone.queued_ahead
    loop = latency.of_loop(call, plan, lambda: None)
    assert loop.latency_ms == pytest.approx(step_ms, rel=0.03)
    assert loop.queued_ahead is None
    assert loop.end_to_end_ms is not None
    assert loop.end_to_end_ms > loop.latency_ms


@pytest.mark.parametrize(("side_ms", "refused"), [(0.1, False), (0.3, True)])
def test_what_runs_after_the_end_of_a_loop_is_held_against_one_step(
    gpu: SimulatedGPU, side_ms: float, refused: bool
) -> None:
    def call() -> None:
        gpu.kernel(1e-3)
        gpu.side_until_s = gpu.busy_until_s + side_ms / 1e3

    plan = SamplingPlan(5, 0.0, 5.0, clocks=False)
    with pytest.raises(UnjoinedWorkError) if refused else contextlib.nullcontext():
        latency.of_loop(call, plan, lambda: None)
