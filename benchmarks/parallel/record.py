"""A measurement of several ranks as a record, like any other."""

from __future__ import annotations

import shlex
import statistics

from benchmarks.cases import inputs
from benchmarks.cases.key import Key
from benchmarks.cases.outcome import CaseOutcome
from benchmarks.correctness.verify import IncorrectError
from benchmarks.history.records import Record
from benchmarks.history.samples import SampleSummary
from benchmarks.parallel.measure import WARM_UP, ParallelTime
from benchmarks.timing.latency import median_interval
from harness.fingerprint import Fingerprint


def passed(key: Key, found: ParallelTime, fingerprint: Fingerprint, command: str, case_s: float) -> Record:
    """The record of a time. The host launches and waits, so that the samples hold launches."""
    latency_ms = statistics.median(found.samples_ms)
    on_gpu = found.peak_mem_mib is not None
    return Record(
        key,
        CaseOutcome.PASSED,
        None,
        fingerprint,
        command,
        found.correctness,
        latency_ms=latency_ms,
        interval_ms=median_interval(found.samples_ms),
        samples=SampleSummary.of(found.samples_ms),
        tokens_per_s=key.num_queries / latency_ms * 1e3,
        peak_mem_mib=found.peak_mem_mib,
        peak_mem_source="cuda_allocator" if on_gpu else None,
        clock="perf_counter",
        queued_ahead=False if on_gpu else None,
        warmup_calls=WARM_UP,
        stop_reason="enough_samples",
        case_s=case_s,
        inputs_follow=inputs.followed(key),
        shared=found.shared,
    )


def incorrect(key: Key, error: IncorrectError, fingerprint: Fingerprint, command: str) -> Record:
    """The record of ranks that do not agree."""
    return Record(key, CaseOutcome.INCORRECT, str(error), fingerprint, command, error.correctness)


def command(key: Key, device: str, samples: int, seed: int, *, alone: bool, check_tokens: int | None) -> str:
    """What measures the case again."""
    words = ["torchrun", f"--nproc_per_node={key.ranks}", "-m", "benchmarks.parallel", "--tokens", str(key.num_keys)]
    words += ["--heads", str(key.heads), str(key.num_kv_heads)]
    words += ["--head-dims", str(key.head_dim_k), str(key.head_dim_v), "--dtype", key.dtype, "--inputs", key.inputs]
    if key.documents is not None:
        words += ["--documents", *map(str, key.documents)]
    words += ["--backend", str(key.backend_asked), "--device", device, "--samples", str(samples), "--seed", str(seed)]
    words += [] if alone else ["--no-alone"]
    words += [] if check_tokens is None else ["--check-tokens", str(check_tokens)]
    return shlex.join(words)
