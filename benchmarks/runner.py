"""From a key to a record: prepare, ask the oracle, time; whatever goes wrong becomes an outcome with its reason."""

from __future__ import annotations

import gc
import subprocess
from collections.abc import Callable, Iterator, Sequence

import torch

from benchmarks import memory, timing
from benchmarks.baselines import sdpa
from benchmarks.cases import Work, attention, train_step
from benchmarks.fingerprint import Fingerprint
from benchmarks.gate import IncorrectError, NonFiniteError, finite
from benchmarks.records import Gate, Key, Outcome, Record

QUICK = timing.Plan(min_samples=5, min_time_s=0.1, wall_limit_s=2.0)
FULL = timing.Plan(min_samples=10, min_time_s=0.5, wall_limit_s=5.0)
MEMORY_DEADLINE_S = 300.0

Prepare = Callable[[Key, str], Work]


def prepare(key: Key, device: str) -> Work:
    """The work of any key that is timed."""
    return (train_step.prepare if key.mode == "train-step" else attention.prepare)(key, device)


def run(
    keys: Sequence[Key],
    device: str,
    plan: timing.Plan,
    fingerprint: Fingerprint,
    command: Callable[[Key], str],
    prepare: Prepare = prepare,
) -> Iterator[Record]:
    """One record per key, in order."""
    for key in keys:
        yield measure(key, device, plan, fingerprint, command(key), prepare)
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()


def measure(
    key: Key, device: str, plan: timing.Plan, fingerprint: Fingerprint, command: str, prepare: Prepare = prepare
) -> Record:
    """One measurement. Only KeyboardInterrupt and the like leave it."""
    gate: Gate | None = None
    try:
        if key.mode == "memory":
            gate, peak = memory.in_child(key, MEMORY_DEADLINE_S)
            return Record(
                key,
                Outcome.PASSED,
                None,
                fingerprint,
                command,
                gate,
                peak_mem_mib=peak.mib,
                peak_mem_source=peak.source,
            )
        work = prepare(key, device)
        gate = work.check()
        timed = timing.measure(work.call, device, key.cache, plan)
        on_gpu_peak = memory.of_cuda(work.call) if device == "cuda" else None
        _finite_outputs(work)
    except Exception as error:
        outcome, reason = classify(error)
        return Record(key, outcome, reason, fingerprint, command, getattr(error, "gate", gate))
    return Record(
        key,
        Outcome.PASSED,
        None,
        fingerprint,
        command,
        gate,
        latency_ms=timed.latency_ms,
        samples_ms=timed.samples_ms,
        tokens_per_s=work.tokens / timed.latency_ms * 1e3,
        peak_mem_mib=on_gpu_peak.mib if on_gpu_peak else None,
        peak_mem_source=on_gpu_peak.source if on_gpu_peak else None,
        clock=timed.clock,
        warmup_calls=timed.warmup_calls,
        stop_reason=timed.stop_reason,
    )


def _finite_outputs(work: Work) -> None:
    """What was timed must still be right after many calls; a train step may have diverged."""
    for i, x in enumerate(work.call()):
        finite(f"output {i} after the last sample", x)


def classify(error: Exception) -> tuple[Outcome, str]:
    """The outcome that an exception means, and one line that says why."""
    text = " ".join(f"{type(error).__name__}: {error}".split())[:500]
    if isinstance(error, IncorrectError):
        return Outcome.INCORRECT, str(error)
    if isinstance(error, NonFiniteError):
        return Outcome.NONFINITE, str(error)
    if isinstance(error, sdpa.NotPresentError):
        return Outcome.NOT_PRESENT, str(error)
    if isinstance(error, ImportError):
        return Outcome.NOT_PRESENT, text
    if isinstance(error, sdpa.UnsupportedError):
        return Outcome.UNSUPPORTED, str(error)
    if isinstance(error, subprocess.TimeoutExpired):
        return Outcome.STALLED, f"no answer within {error.timeout:.0f} s"
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "can't allocate memory" in text:
        return Outcome.OUT_OF_MEMORY, text
    if type(error).__module__.startswith("triton.") and type(error).__name__ in ("CompilationError", "OutOfResources"):
        return Outcome.COMPILE_ERROR, text
    if isinstance(error, ValueError) and "cannot serve this call" in text:
        return Outcome.UNSUPPORTED, text
    return Outcome.CRASHED, text
