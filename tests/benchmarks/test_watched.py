"""Each case begins on a free and cool GPU; one that heat slowed down is measured once more; the record tells of it."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Sequence

import pytest

from benchmarks import watched
from benchmarks.cases.key import Key
from benchmarks.cases.outcome import CaseOutcome
from benchmarks.history.records import Record
from benchmarks.runner import Measurement
from benchmarks.timing.gpu_watch import COOLED, OTHER_PROCESS, RETRIED, GpuWatch
from tests.benchmarks.synthetic import failed, key, passed
from tests.fake_nvml import process
from tests.fake_nvml.boards import ALONE, BOARDS, Board, Course, OnGpu

A100 = BOARDS["a100-80gb-sxm"]
KEYS = [key("decode"), key("prefill-forward")]
TOO_HOT = failed(KEYS[0], CaseOutcome.THROTTLED, "6 of 6 samples throttled: thermal")


def run(board: Board | None, outcomes: Sequence[Record], monkeypatch: pytest.MonkeyPatch) -> list[Record]:
    """What becomes of two cases that end like this, one after the other."""
    left = list(outcomes)

    def measure(keys: Sequence[Key]) -> Iterator[Measurement]:
        for one in keys:
            yield Measurement(dataclasses.replace(left.pop(0), key=one))

    seen = None
    if board is not None:
        process.install(monkeypatch, board, os.getppid())
        seen = GpuWatch()
    found = [one.record for one in watched.run(KEYS, measure, seen)]
    assert not left
    assert [one.key for one in found] == KEYS
    return found


GREEN = [passed(one) for one in KEYS]


def test_without_a_watch_records_are_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(None, GREEN, monkeypatch) == GREEN


def test_where_nothing_was_noticed_the_record_says_that_somebody_looked(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [one.gpu_conditions for one in run(A100, GREEN, monkeypatch)] == [{}, {}]


def test_a_case_that_heat_slowed_down_is_measured_again_once_the_gpu_is_cool(monkeypatch: pytest.MonkeyPatch) -> None:
    hot = A100.telling(nvmlDeviceGetTemperature=Course((60, 60, 80, 80, 75, 72, 71)))
    first, second = run(hot, [TOO_HOT, *GREEN], monkeypatch)
    assert first.outcome is CaseOutcome.PASSED
    assert first.gpu_conditions is not None
    assert first.gpu_conditions[RETRIED] == "measured again after 6 of 6 samples throttled: thermal"
    assert COOLED in first.gpu_conditions
    assert second.gpu_conditions == {}


def test_it_is_measured_again_only_once(monkeypatch: pytest.MonkeyPatch) -> None:
    first, _ = run(A100, [TOO_HOT, TOO_HOT, GREEN[1]], monkeypatch)
    assert first.outcome is CaseOutcome.THROTTLED
    assert first.gpu_conditions is not None
    assert RETRIED in first.gpu_conditions


def test_a_process_that_comes_while_a_case_is_measured_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    alone_before_and_while_ready = (ALONE,) * 4
    board = A100.telling(processes=Course((*alone_before_and_while_ready, (OnGpu(),))))
    first, second = run(board, GREEN, monkeypatch)
    assert first.gpu_conditions is not None
    assert first.gpu_conditions[OTHER_PROCESS].endswith("began to compute on the GPU meanwhile")
    assert f"pid {os.getppid()}" in first.gpu_conditions[OTHER_PROCESS]
    assert second.gpu_conditions is not None
    assert second.gpu_conditions[OTHER_PROCESS].endswith("computed on the GPU too")
