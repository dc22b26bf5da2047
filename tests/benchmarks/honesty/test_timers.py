"""Timers, clocks and caches that are not what they say: each is refused by name, and passes where its guard is gone."""

from __future__ import annotations

import ctypes
import dataclasses
import sys
import time
from collections import deque
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import worker
from benchmarks.cases.outcome import CaseOutcome
from benchmarks.correctness.verify import IncorrectError
from benchmarks.history.samples import RawSamples
from benchmarks.runner import Measurement
from benchmarks.timing import clock_check, cross_check, host_clock, l2_persistence, latency
from benchmarks.timing.cross_check import Observation, Observer
from benchmarks.timing.latency import SamplingPlan
from nsa import nsa_attention
from tests.benchmarks.honesty.cheats import accepted, measured, refused
from tests.benchmarks.synthetic import key, passed


def test_a_replaced_perf_counter(monkeypatch: pytest.MonkeyPatch) -> None:
    true = time.perf_counter
    with monkeypatch.context() as patch:
        patch.setattr(time, "perf_counter", lambda: true() / 10)
        refused(measured(patch, nsa_attention), "the system's raw clock")
        patch.setattr(host_clock, "require_same_time", lambda *_: None)
        patch.setattr(host_clock, "_recent", deque())  # or false samples would be held against the next measurement
        accepted(measured(patch, nsa_attention))


def test_a_process_that_is_held_up_between_two_readings_is_no_cheat() -> None:
    told = [10.0] * 5
    host_clock.require_same_time(told, [10.01, 10.01, 10.01, 25.0, 25.0])
    host_clock.require_same_time([10.0, 10.0], [10.0, 16.0])
    with pytest.raises(IncorrectError, match="as of 3 of 5 samples: the timer was replaced"):
        host_clock.require_same_time(told, [10.01, 10.01, 25.0, 25.0, 25.0])
    with pytest.raises(IncorrectError, match=r"time\.perf_counter says 1 ms"):
        host_clock.require_same_time([1.0], [1.08])


def test_samples_of_one_call_are_judged_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `compare` takes them on a CPU, where one of ten is held up between two readings."""
    monkeypatch.setattr(host_clock, "_recent", deque(maxlen=1000))

    def take(told_ms: float, raw_ms: float) -> None:
        sampler = host_clock.WallSampler(tuple, tuple)
        sampler._raw_ms = [raw_ms]
        sampler.require_same_time([told_ms])

    for raw_ms in (45.7, 41.6, 41.6, 45.7, 41.6, 41.6):
        take(41.6, raw_ms)
    take(41.6, 416.0)
    with pytest.raises(IncorrectError, match="as of 3 of 5 samples: the timer was replaced"):
        take(41.6, 416.0)
    take(41.6, 45.7)  # what was refused is not held against the next one


def test_the_raw_clock_goes_as_fast_as_python_s() -> None:
    raw, told = host_clock.raw_s(), time.perf_counter()
    time.sleep(0.05)
    assert host_clock.raw_s() - raw == pytest.approx(time.perf_counter() - told, rel=0.2)


class Watched(Observer):
    """A call whose observations are given."""

    def __init__(self, *seen: Observation) -> None:
        super().__init__(tuple, "cpu", tuple)
        self._given = list(seen)

    def observe(self) -> tuple[torch.Tensor, ...]:
        self.seen.append(self._given.pop(0) if len(self._given) > 1 else self._given[0])
        return ()


@pytest.mark.parametrize("host_ms", [0.3, 9.0])
def test_events_that_tell_what_a_caller_waits_for(host_ms: float) -> None:
    cross_check.require_events(10.0, Watched(Observation(host_ms + 10.0, host_ms, 0.0)))
    cross_check.require_events(10.0, Watched(Observation(40.0, 0.3, 0.0), Observation(10.3, 0.3, 0.0)))  # held up once


def test_replaced_cuda_events() -> None:
    tenth = Watched(Observation(10.3, 0.3, 0.0))
    with pytest.raises(IncorrectError, match="the GPU worked for 10 ms after the launch: the timer was replaced"):
        cross_check.require_events(1.0, tenth)
    assert len(tenth.seen) == cross_check._TRIES


def test_a_synchronize_that_does_not_wait() -> None:
    with pytest.raises(IncorrectError, match=r"nothing to wait for: torch\.cuda\.synchronize or the events"):
        cross_check.require_events(10.0, Watched(Observation(0.3, 0.3, 0.0)))


@pytest.mark.gpu
@pytest.mark.parametrize("share", [0.1, 10.0])
def test_replaced_cuda_events_on_a_gpu(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    x, true = torch.randn(8192, 8192, device="cuda").bfloat16(), torch.cuda.Event.elapsed_time

    def call() -> tuple[torch.Tensor, ...]:
        return (x @ x,)

    def measured_ms() -> float:
        return latency.measure(call, "cuda", "warm", SamplingPlan(5, 0.0, 5.0)).latency_ms

    cross_check.require_events(measured_ms(), Observer(call, "cuda", tuple))
    monkeypatch.setattr(torch.cuda.Event, "elapsed_time", lambda self, end: share * true(self, end))
    with pytest.raises(IncorrectError, match="the timer was" if share < 1 else "there was nothing to wait for"):
        cross_check.require_events(measured_ms(), Observer(call, "cuda", tuple))


def test_samples_that_cover_more_than_the_time_that_passed() -> None:
    slowed = Measurement(passed(key(), 400.0), RawSamples(key().name, (400.0,) * 6))
    reason = worker.impossible(slowed, key(), 2.0)
    assert reason == "its samples cover 2.4 s of the 2 s that it took: its timer was replaced"
    assert worker.impossible(slowed, key(), 2.5) is None
    other = worker.impossible(slowed, key(length=128), 9.0)
    assert other == f"the process that measured it sent a record of {key().name}"


def test_the_parent_refuses_what_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    child = object.__new__(worker._Worker)
    child._fingerprint, child._started = passed(key()).fingerprint, True
    slowed = Measurement(passed(key(), 4e5), RawSamples(key().name, (4e5,) * 6))
    child._pipe = SimpleNamespace(send=lambda _: None, poll=lambda _: True, recv=lambda: slowed)  # type: ignore[assignment]
    refused(child.measure(key(), "command", 1.0).record, "its timer was replaced")
    monkeypatch.setattr(worker, "impossible", lambda *_: None)
    accepted(child.measure(key(), "command", 1.0).record)


def test_an_nvml_that_tells_another_clock() -> None:
    clock_check.require_agreement(iter([(1200.0, 1980), (1975.0, 1980)]), 1980)  # it was changing
    clock_check.require_agreement(iter([(2080.0, 1980)]), 1980)  # an H100 after kernels that L2 bounds
    with pytest.raises(IncorrectError, match="NVML tells an SM clock of 1980 MHz where the GPU counts 1200 MHz"):
        clock_check.require_agreement(iter([(1200.0, 1980)] * 4), 1980)
    with pytest.raises(IncorrectError, match="above the highest SM clock of the fingerprint, 1500 MHz"):
        clock_check.require_agreement(iter([(1975.0, 1980)]), 1500)


def test_a_module_in_the_place_of_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    pynvml = pytest.importorskip("pynvml")
    clock_check.require_installed(pynvml)
    fake = ModuleType("pynvml")
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    with pytest.raises(IncorrectError, match="which is not the pynvml that is installed"):
        clock_check.require_installed(fake)


def test_the_clock_is_counted_while_nvml_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    spun: list[int] = []
    event = SimpleNamespace(record=lambda: None, synchronize=lambda: None, elapsed_time=lambda _: 10.0)
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: event)
    monkeypatch.setattr(torch.cuda, "_sleep", spun.append)
    assert clock_check.counted_and_told(20_000_000, lambda: 1980) == (2000.0, 1980)
    assert spun == [20_000_000]


@pytest.mark.gpu
def test_nvml_tells_the_clock_that_this_gpu_counts() -> None:
    clock_check.require_told_clock()


class Driver:
    """The one function of libcuda that is asked."""

    def __init__(self, set_aside: int, status: int = 0) -> None:
        self._set_aside, self._status = set_aside, status

    def cuCtxGetLimit(self, value: Any, limit: int) -> int:  # noqa: N802 - CUDA's own name
        assert limit == 6
        value._obj.value = self._set_aside
        return self._status


def test_l2_that_is_kept_by_a_persistence_window(monkeypatch: pytest.MonkeyPatch) -> None:
    for driver, found in ((Driver(0), 0), (Driver(2**20), 2**20), (Driver(2**20, status=801), None)):
        monkeypatch.setattr(ctypes, "CDLL", lambda _, driver=driver: driver)
        assert l2_persistence.persisting_bytes() == found
    monkeypatch.setattr(l2_persistence, "bytes_at_first", lambda: 11 * 2**20)  # an H200's driver sets so much aside
    monkeypatch.setattr(ctypes, "CDLL", lambda _: Driver(30 * 2**20))
    with pytest.raises(IncorrectError, match=r"31457280 bytes of L2 are set aside .* where it were 11534336 at first"):
        l2_persistence.require_unchanged()
    refused(_cold(monkeypatch), "the call was not cold")
    monkeypatch.setattr(ctypes, "CDLL", lambda _: Driver(11 * 2**20))
    accepted(_cold(monkeypatch))


def _cold(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A case whose calls are said to be cold, timed as warm ones are."""
    warm = latency.measure
    with monkeypatch.context() as patch:
        patch.setattr(
            latency,
            "measure",
            lambda call, device, _, *rest: dataclasses.replace(warm(call, device, "warm", *rest), cache="cold"),
        )
        return measured(patch, nsa_attention)


@pytest.mark.gpu
def test_l2_set_aside_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    before = l2_persistence.bytes_at_first()
    accepted(measured(monkeypatch, nsa_attention, length=512, cache="cold", device="cuda"))
    driver = ctypes.CDLL(l2_persistence._DRIVER)
    assert driver.cuCtxSetLimit(l2_persistence._LIMIT, ctypes.c_size_t(2**20)) == 0
    try:
        refused(measured(monkeypatch, nsa_attention, length=512, cache="cold", device="cuda"), "the call was not cold")
    finally:
        driver.cuCtxSetLimit(l2_persistence._LIMIT, ctypes.c_size_t(before or 0))


def test_a_call_that_sleeps_so_that_the_gpu_raises_its_clocks() -> None:
    launches = [Observation(1.0, 0.5, 0.01), Observation(60.0, 50.0, 49.0)]
    cross_check.require_awake(launches)  # held up once
    with pytest.raises(IncorrectError, match="sleeps on the host for 30 ms or more"):
        cross_check.require_awake([Observation(60.0, 50.0, 49.0), Observation(41.0, 31.0, 30.0)])


def test_a_sleep_is_told_from_work() -> None:
    for call, asleep in ((lambda: (time.sleep(0.02), ())[1], True), (_busy, False)):
        observer = Observer(call, "cpu", tuple)
        for _ in range(3):
            observer.observe()
        assert (min(one.asleep_ms for one in observer.seen) > 10) == asleep


def _busy() -> tuple[torch.Tensor, ...]:
    end = time.thread_time() + 0.02
    while time.thread_time() < end:
        pass
    return ()


def test_what_is_timed_is_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """The guards leave an honest sample as it is."""
    timed = latency.measure(lambda: time.sleep(0.005), "cpu", "warm", SamplingPlan(3, 0.0, 5.0))
    assert timed.latency_ms >= 5
    assert measured(monkeypatch, nsa_attention).outcome is CaseOutcome.PASSED
