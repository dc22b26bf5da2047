"""Whatever goes wrong becomes an outcome with its reason, and no number comes out of it."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

import nsa
from benchmarks import errors, memory_worker, runner
from benchmarks.baselines import BASELINES
from benchmarks.cases.key import Key
from benchmarks.cases.outcome import CaseOutcome, Correctness
from benchmarks.cases.work import Work
from benchmarks.history import records
from benchmarks.history.records import Record
from benchmarks.timing import memory
from benchmarks.timing.latency import SamplingPlan
from benchmarks.workloads import attention
from benchmarks.workloads.train_step import TINY
from harness.repository import ROOT
from nsa import NSAConfig
from tests.benchmarks.synthetic import FINGERPRINT, GREEN, key
from tests.harness import workers

PLAN = SamplingPlan(min_samples=3, min_time_s=0.0, wall_limit_s=5.0, warmup_calls=1)


def measure(the_key: Key, prepare: runner.Prepare = runner.prepare) -> Record:
    return runner.measure(the_key, "cpu", PLAN, FINGERPRINT, "command", prepare).record


def has_no_number(record: Record) -> bool:
    return all(getattr(record, name) is None for name in records.NUMBERS)


@pytest.mark.parametrize("implementation", ["nsa", "sdpa-flash", "sdpa-math"])
@pytest.mark.parametrize("mode", ["prefill-forward", "prefill-forward-backward", "decode"])
def test_measures_every_mode(mode: str, implementation: str) -> None:
    the_key = key(mode, implementation, batch=2)
    measured = runner.measure(the_key, "cpu", PLAN, FINGERPRINT, "command")
    record = measured.record
    assert (record.outcome, record.reason) == (CaseOutcome.PASSED, None)
    assert measured.raw is not None
    assert record.latency_ms == sorted(measured.raw.samples_ms)[1]
    assert record.samples is not None
    assert record.samples.count == 3
    assert record.tokens_per_s == pytest.approx(2 * the_key.num_queries / record.latency_ms * 1e3)
    assert record.correctness is not None
    assert record.correctness.path == ("torch" if implementation == "nsa" else implementation)
    assert (record.peak_mem_mib, record.clock) == (None, "perf_counter")


@pytest.mark.parametrize("implementation", ["nsa", "sdpa-math"])
def test_measures_a_train_step(implementation: str) -> None:
    config = dataclasses.asdict(NSAConfig(l=16, d=8, l_sel=32, n_sel=8, w=64)) if implementation == "nsa" else None
    sizes = {"heads": 8, "model": "showcase", "config": config}
    record = measure(key("train-step", implementation, length=96, **sizes))
    assert (record.outcome, record.reason) == (CaseOutcome.PASSED, None)
    assert record.correctness is not None
    assert [check.name for check in record.correctness.checks] == ["logits", "dparameters", "loss, fresh inputs"]


@pytest.mark.parametrize("implementation", ["nsa", "sdpa-math"])
def test_measures_a_loop_of_ones_own(implementation: str) -> None:
    config = dataclasses.asdict(TINY.nsa) if implementation == "nsa" else None
    sizes = {"heads": 2, "num_kv_heads": 1, "model": "tiny", "config": config}
    record = measure(key("train-loop", implementation, length=32, **sizes))
    assert (record.outcome, record.reason) == (CaseOutcome.PASSED, None)
    assert record.correctness is not None
    assert [check.name for check in record.correctness.checks] == ["logits", "dparameters", "loss, fresh inputs"]


def test_a_loop_is_compiled_as_its_launch_says(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []

    def compile_(model: torch.nn.Module, *, mode: str) -> torch.nn.Module:
        compiled.append(mode)
        return model

    monkeypatch.setattr(torch, "compile", compile_)
    sizes = {"heads": 2, "num_kv_heads": 1, "model": "tiny", "config": dataclasses.asdict(TINY.nsa)}
    for launch in ("eager", "compile", "reduce-overhead"):
        runner.prepare(key("train-loop", length=32, launch=launch, **sizes), "cpu")
    assert compiled == ["default", "reduce-overhead"]


def test_measures_the_hosts_time_and_counts_launches() -> None:
    record = measure(key("host-prefill-forward-backward"))
    assert (record.outcome, record.reason) == (CaseOutcome.PASSED, None)
    assert (record.tokens_per_s, record.flops, record.clock) == (None, None, "perf_counter")
    assert record.launches_per_call is not None
    assert record.launches_per_call > 100  # PyTorch's operators, on a CPU
    assert measure(key()).launches_per_call is None


def scaled_output(factor: float) -> Callable[..., object]:
    """NSA with its output multiplied by `factor`."""

    def attend(*arguments: Any, **options: Any) -> object:
        found = nsa.nsa_attention(*arguments, **options)
        return (found[0] * factor, found[1]) if isinstance(found, tuple) else found * factor

    return attend


def test_a_wrong_implementation_gets_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "nsa_attention", scaled_output(1.001))
    record = measure(key())
    assert record.outcome is CaseOutcome.INCORRECT
    assert record.reason is not None
    assert record.reason.startswith("o: error 1.00e-03 > budget ")
    assert record.correctness is not None
    assert has_no_number(record)


def test_nan_gets_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "nsa_attention", scaled_output(float("nan")))
    record = measure(key())
    assert record.outcome is CaseOutcome.NONFINITE
    assert has_no_number(record)


def test_what_turns_nan_after_the_check_gets_no_number() -> None:
    outputs = iter([torch.zeros(1)] * 4 + [torch.full((1,), torch.nan)])  # the first call, 3 samples, and the last look

    def prepare(the_key: Key, device: str) -> Work:
        return Work(lambda _: GREEN, lambda: (next(outputs),), 1)

    plan = dataclasses.replace(PLAN, warmup_calls=0)
    record = runner.measure(key(), "cpu", plan, FINGERPRINT, "command", prepare).record
    assert record.outcome is CaseOutcome.NONFINITE
    assert record.correctness == GREEN
    assert has_no_number(record)


class OutOfResources(Exception):  # noqa: N818 - named as in Triton
    __module__ = "triton.runtime.errors"


ERRORS = [
    (torch.OutOfMemoryError("CUDA out of memory."), CaseOutcome.OUT_OF_MEMORY),
    (MemoryError(), CaseOutcome.OUT_OF_MEMORY),
    (RuntimeError("DefaultCPUAllocator: can't allocate memory"), CaseOutcome.OUT_OF_MEMORY),
    (OutOfResources("shared memory"), CaseOutcome.COMPILE_ERROR),
    (ValueError("backend 'triton' cannot serve this call: no GPU"), CaseOutcome.UNSUPPORTED),
    (ImportError("cannot import name 'choose' from 'nsa.backends'"), CaseOutcome.CRASHED),
    (subprocess.TimeoutExpired("child", 3.0), CaseOutcome.STALLED),
    (RuntimeError("CUDA error: an illegal\nmemory access"), CaseOutcome.CRASHED),
    (ValueError("k must have shape"), CaseOutcome.CRASHED),
]


@pytest.mark.parametrize(("error", "outcome"), ERRORS, ids=lambda value: getattr(value, "name", type(value).__name__))
def test_errors_become_outcomes(error: Exception, outcome: CaseOutcome) -> None:
    def check(_: int) -> Correctness:
        raise error

    record = measure(key(), lambda the_key, device: Work(check, tuple, 1))
    assert record.outcome is outcome
    assert record.reason
    assert "\n" not in record.reason
    assert has_no_number(record)


def test_a_reason_holds_nothing_that_steers_a_terminal() -> None:
    error = RuntimeError("\x1b[31merror:\x1b[0m at \u202ehere\x07")
    assert errors.classify(error, "nsa") == (CaseOutcome.CRASHED, "RuntimeError: error: at here")


def test_an_absent_baseline_says_why() -> None:
    absent = measure(key(implementation="sdpa-cudnn"))
    assert (absent.outcome, absent.reason) == (CaseOutcome.NOT_PRESENT, "sdpa-cudnn exists on CUDA devices only")
    refused = measure(key(implementation="sdpa-flash", head_dim_v=8))
    assert refused.outcome is CaseOutcome.UNSUPPORTED
    assert refused.reason is not None
    assert "same last dimension" in refused.reason


def test_a_package_that_a_baseline_cannot_import_is_not_present() -> None:
    def check(_: int) -> Correctness:
        raise ModuleNotFoundError("No module named 'flash_attn'")

    record = measure(key(implementation="flash-attn"), lambda the_key, device: Work(check, tuple, 1))
    assert (record.outcome, has_no_number(record)) == (CaseOutcome.NOT_PRESENT, True)


def test_a_refusal_of_another_kind_is_a_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: object) -> Tensor:
        raise RuntimeError("something else")

    monkeypatch.setitem(BASELINES, "sdpa-math", dataclasses.replace(BASELINES["sdpa-math"], attend=broken))
    assert measure(key(implementation="sdpa-math")).outcome is CaseOutcome.CRASHED


def test_peak_of_this_process_is_what_the_call_needs() -> None:
    size_mib = 64

    def call() -> None:
        torch.ones(size_mib * memory.MIB // 4)

    peak = memory.of_this_process(call)
    assert peak.mib == pytest.approx(size_mib, abs=4)  # the kernel counts pages in batches
    assert peak.source == "rss_high_water"


PEAK_AFTER = """
import gc, torch
from benchmarks.timing import memory
{before}
print(memory.of_this_process(lambda: (gc.collect(), torch.ones(64 * memory.MIB // 4))).mib)
"""
BEFORE = {
    "freed": "torch.ones(100 * memory.MIB // 4)",
    "a dead cycle": "cycle = [torch.ones(100 * memory.MIB // 4)]; cycle.append(cycle); del cycle",
}


@pytest.mark.parametrize("before", BEFORE)
def test_peak_counts_memory_that_the_process_had_used_before(before: str) -> None:
    """In a child whose glibc keeps freed memory resident, as in any process that used much memory before."""
    keeps = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**34)}
    command = [sys.executable, "-c", PEAK_AFTER.format(before=BEFORE[before])]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, env={**os.environ, **keeps})
    assert float(done.stdout) == pytest.approx(64, abs=4)


def test_a_memory_case_runs_in_a_child() -> None:
    record = measure(key("memory", length=256))
    assert (record.outcome, record.reason) == (CaseOutcome.PASSED, None)
    assert record.peak_mem_source == "rss_high_water"
    assert record.latency_ms is None


def test_a_child_that_fails_says_its_last_words() -> None:
    record = measure(key("memory", heads=3))
    assert record.outcome is CaseOutcome.CRASHED
    assert record.reason is not None
    assert "heads of k must divide the 3 heads of q" in record.reason


def in_this_process(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The child's main runs here, so that a fault can be put into it."""

    def run(task: Mapping[str, Any], deadline_s: float) -> tuple[int, str, str]:
        with monkeypatch.context() as patch:
            patch.setattr(sys, "argv", ["memory_worker", json.dumps(task)])
            status = memory_worker.main()
        return status, *capsys.readouterr()

    monkeypatch.setattr(memory_worker, "_run_child", run)
    monkeypatch.setattr(memory_worker.integrity, "require_intact", lambda: None)  # which would name the faults


def test_what_is_wrong_in_a_child_is_told_apart(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    in_this_process(monkeypatch, capsys)
    assert measure(key("memory")).outcome is CaseOutcome.PASSED
    monkeypatch.setattr(attention, "nsa_attention", scaled_output(1.001))
    wrong = measure(key("memory"))
    assert (wrong.outcome, has_no_number(wrong)) == (CaseOutcome.INCORRECT, True)
    assert (wrong.reason or "").startswith("o: error 1.00e-03 > budget ")
    assert wrong.correctness is not None
    assert not wrong.correctness.passed
    monkeypatch.setattr(attention, "nsa_attention", scaled_output(float("nan")))
    assert measure(key("memory")).outcome is CaseOutcome.NONFINITE


@pytest.mark.parametrize(("signal_number", "outcome"), [(9, CaseOutcome.OUT_OF_MEMORY), (11, CaseOutcome.CRASHED)])
def test_a_child_that_the_kernel_kills_was_out_of_memory(
    signal_number: int, outcome: CaseOutcome, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_worker, "_CHILD", workers.__name__)
    monkeypatch.setenv(workers.SIGNAL, str(signal_number))
    record = measure(key("memory"))
    assert (record.outcome, has_no_number(record)) == (outcome, True)
    assert record.reason
