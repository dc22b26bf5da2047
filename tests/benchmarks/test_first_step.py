"""Time to the first step: a process for each figure, the first with empty caches and told apart."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from benchmarks import first_step, runner
from benchmarks.cases.outcome import CaseOutcome, Correctness
from benchmarks.errors import MemoryChildError
from benchmarks.timing.latency import SamplingPlan
from benchmarks.workloads.train_step import TINY
from tests.benchmarks.synthetic import FINGERPRINT, GREEN, key

PLAN = SamplingPlan(min_samples=7, min_time_s=0.0, wall_limit_s=5.0)
SIZES = {"heads": 2, "model": "tiny", "config": dataclasses.asdict(TINY.nsa)}


def test_the_first_process_finds_empty_caches_and_the_others_what_it_left(monkeypatch: pytest.MonkeyPatch) -> None:
    caches: list[tuple[bool, str]] = []
    taken = iter([9.0, 4.0, 3.0, 5.0])

    def one(task: Mapping[str, Any], environment: Mapping[str, str], _: float) -> tuple[float, Correctness]:
        folder = Path(environment["TRITON_CACHE_DIR"])
        caches.append((folder.exists(), environment["TORCHINDUCTOR_CACHE_DIR"]))
        folder.mkdir(parents=True, exist_ok=True)
        return next(taken), GREEN

    monkeypatch.setattr(first_step, "_one", one)
    record = runner.measure(key("first-step", length=64, **SIZES), "cpu", PLAN, FINGERPRINT, "command").record
    assert (record.outcome, record.latency_ms, record.compile_s) == (CaseOutcome.PASSED, 4000.0, 9.0)
    assert record.samples is not None
    assert record.samples.count == 3
    assert [there for there, _ in caches] == [False, True, True, True]
    assert len({folder for _, folder in caches}) == 1
    assert not Path(caches[0][1]).parent.exists()


def test_a_process_makes_its_step_and_is_compared_with_the_oracle(tmp_path: Path) -> None:
    own = key("first-step", length=32, **SIZES)
    task = {"key": dataclasses.asdict(own), "device": "cpu", "seed": 1}
    seconds, correctness = first_step._one(task, {"TRITON_CACHE_DIR": str(tmp_path)}, 600.0)
    assert seconds > 0
    assert correctness.passed
    assert correctness.path == "torch"


def test_a_process_that_fails_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def one(*_: object) -> tuple[float, Correctness]:
        raise MemoryChildError(CaseOutcome.INCORRECT, "logits: too far")

    monkeypatch.setattr(first_step, "_one", one)
    record = runner.measure(key("first-step", length=64, **SIZES), "cpu", PLAN, FINGERPRINT, "command").record
    assert (record.outcome, record.reason, record.latency_ms) == (CaseOutcome.INCORRECT, "logits: too far", None)
