"""From a key to a record: prepare, ask the oracle, time; whatever goes wrong becomes an outcome with its reason."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from benchmarks import first_step, memory_worker
from benchmarks.cases import inputs
from benchmarks.cases.key import HOST, Key
from benchmarks.cases.outcome import CaseOutcome, Correctness
from benchmarks.cases.work import Work
from benchmarks.correctness import anti_cheat, integrity, process_state, row_sampling
from benchmarks.correctness.verify import IncorrectError, NonFiniteError, joined, require_finite
from benchmarks.errors import ThrottledError, classify
from benchmarks.first_step import FirstSteps
from benchmarks.history.records import Record
from benchmarks.history.samples import RawSamples, SampleSummary
from benchmarks.timing import l2_persistence, latency, launches, memory, peak
from benchmarks.timing.latency import Timing
from benchmarks.timing.other_load import OtherLoad
from benchmarks.timing.rotating_inputs import RotatingInputs
from benchmarks.workloads.prepare import prepare
from harness import forced
from harness.fingerprint import Fingerprint
from harness.peak import MeasuredPeak

QUICK = latency.SamplingPlan(min_samples=6, min_time_s=0.1, wall_limit_s=2.0, precision=0.02)
FULL = latency.SamplingPlan(min_samples=10, min_time_s=0.5, wall_limit_s=5.0, precision=0.01)
MEMORY_DEADLINE_S = 300.0
FIRST_STEP_DEADLINE_S = 300.0
"""Of each process."""

Prepare = Callable[[Key, str], Work]


@dataclass(frozen=True)
class Measurement:
    """A record, and the samples behind it."""

    record: Record
    raw: RawSamples | None = None
    """None where nothing was timed."""


def run(
    keys: Sequence[Key],
    device: str,
    plan: latency.SamplingPlan,
    fingerprint: Fingerprint,
    command: Callable[[Key], str],
    prepare: Prepare = prepare,
    seed: int | None = None,
) -> Iterator[Measurement]:
    """One measurement per key, in order. `seed`: of what is compared and of the inputs after the last sample; a new one
    unless given. The inputs that are timed are the same in every run."""
    seed = row_sampling.new_seed() if seed is None else seed
    for key in keys:
        yield measure(key, device, plan, fingerprint, command(key), prepare, seed)
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()


def unless_changed(measured: Measurement) -> Measurement:
    """The measurement, refused where the benches of this process are no longer what their files say."""
    try:
        integrity.require_intact()
    except IncorrectError as error:
        old = measured.record
        return Measurement(Record(old.key, CaseOutcome.INCORRECT, str(error), old.fingerprint, old.command))
    return measured


def measure(
    key: Key,
    device: str,
    plan: latency.SamplingPlan,
    fingerprint: Fingerprint,
    command: str,
    prepare: Prepare = prepare,
    seed: int | None = None,
) -> Measurement:
    """One measurement. Only KeyboardInterrupt and the like leave it."""
    correctness: Correctness | None = None
    seed = row_sampling.new_seed() if seed is None else seed
    settings = process_state.read()
    if device == "cuda":
        l2_persistence.bytes_at_first()
    try:
        if key.mode == "memory":
            correctness, peak = memory_worker.measure(key, MEMORY_DEADLINE_S, seed)
            return Measurement(
                Record(
                    key,
                    CaseOutcome.PASSED,
                    None,
                    fingerprint,
                    command,
                    correctness,
                    peak_mem_mib=peak.mib,
                    peak_mem_source=peak.source,
                )
            )
        if key.mode == "first-step":
            first = first_step.measure(key, device, plan, FIRST_STEP_DEADLINE_S, seed)
            return Measurement(
                _of_first_steps(key, fingerprint, command, first), RawSamples(key.name, first.samples_ms)
            )
        work = prepare(key, device)
        before = anti_cheat.digests(work.inputs)
        with work.refusals():
            compile_s = latency.seconds(work.call, device)
        correctness = work.check(seed)
        if forced.of(fingerprint.machine) is not None:
            return _fits(key, work, correctness, fingerprint, command, seed, device)
        rotating = RotatingInputs(work, key, device)
        other_load = OtherLoad()
        timed = rotating.time(plan)
        _require_steady(timed)
        _require_possible(timed, work, fingerprint.measured_peak, device)
        anti_cheat.require_unchanged(work.inputs, before)
        launches_per_call = launches.per_call(work.call, device) if key.mode.startswith(HOST) else None
        device_peak = memory.of_work(work) if device == "cuda" else None
        _finite_outputs(work)
        fresh = rotating.recheck(seed)
        process_state.require_unchanged(settings)
    except Exception as raised:
        error = _cause(raised, settings)
        outcome, reason = classify(error, key.implementation)
        clocks = error.clocks if isinstance(error, ThrottledError) else None
        summary = clocks.summary if clocks else None
        correctness = getattr(error, "correctness", None) or correctness
        return Measurement(
            Record(key, outcome, reason, fingerprint, command, correctness, clocks=summary),
            RawSamples(key.name, clocks=clocks) if clocks else None,
        )
    record = Record(
        key,
        CaseOutcome.PASSED,
        None,
        fingerprint,
        command,
        correctness if fresh is None else joined(correctness, fresh),
        latency_ms=timed.latency_ms,
        samples=SampleSummary.of(timed.samples_ms),
        interval_ms=timed.interval_ms,
        end_to_end_ms=timed.end_to_end_ms,
        tokens_per_s=None if key.mode.startswith(HOST) else work.tokens / timed.latency_ms * 1e3,
        peak_mem_mib=device_peak.mib if device_peak else None,
        peak_mem_source=device_peak.source if device_peak else None,
        clock="cuda_graph" if key.launch == "graph" else timed.clock,
        queued_ahead=timed.queued_ahead,
        compile_s=compile_s,
        warmup_calls=timed.warmup_calls,
        stop_reason=timed.stop_reason,
        unmet=timed.unmet,
        other_load=other_load.cores(),
        clocks=timed.clocks.summary if timed.clocks else None,
        flops=work.flops,
        bytes_moved=work.bytes_moved,
        inputs_follow=inputs.followed(key),
        launches_per_call=launches_per_call,
    )
    return Measurement(record, RawSamples(key.name, timed.samples_ms, timed.clocks))


def _fits(
    key: Key, work: Work, correctness: Correctness, fingerprint: Fingerprint, command: str, seed: int, device: str
) -> Measurement:
    """Of a GPU that is forced to be another one: right, and its peak memory. Nothing is timed.

    The inputs are not copied: what is free is judged from the GPU that is there.
    """
    forced.require_named(fingerprint.machine)
    peak = memory.of_work(work)
    if peak is None:
        raise RuntimeError(
            "the peak of its CUDA graph cannot be read from the allocator; nothing else is measured here"
        )
    _finite_outputs(work)
    fresh = RotatingInputs(replace(work, copy=None), key, device).recheck(seed)
    found = correctness if fresh is None else joined(correctness, fresh)
    passed = Record(key, CaseOutcome.PASSED, None, fingerprint, command, found, peak_mem_mib=peak.mib)
    return Measurement(replace(passed, peak_mem_source=peak.source))


def _of_first_steps(key: Key, fingerprint: Fingerprint, command: str, first: FirstSteps) -> Record:
    return Record(
        key,
        CaseOutcome.PASSED,
        None,
        fingerprint,
        command,
        first.correctness,
        latency_ms=statistics.median(first.samples_ms),
        samples=SampleSummary.of(first.samples_ms),
        interval_ms=latency.median_interval(first.samples_ms),
        clock="perf_counter",
        compile_s=first.empty_cache_s,
        stop_reason="enough_samples",
    )


def _cause(error: Exception, settings: Mapping[str, object]) -> Exception:
    """A setting of the process that the case has changed, which says more than what came of it; else the error."""
    if isinstance(error, (IncorrectError, NonFiniteError)):
        try:
            process_state.require_unchanged(settings)
        except IncorrectError as changed:
            return changed
    return error


def _require_steady(timed: Timing) -> None:
    """Raises ThrottledError where heat or a failing supply slowed most samples."""
    if timed.clocks is not None and (reason := timed.clocks.void_because):
        raise ThrottledError(reason, timed.clocks)


def _require_possible(timed: Timing, work: Work, limits: MeasuredPeak | None, device: str) -> None:
    """Raises IncorrectError for a figure above the physical limit."""
    if limits is None or limits.exceeded_by(timed.latency_ms, work.flops, work.bytes_moved) is None:
        return
    limits = peak.remeasured(limits, device)
    if reason := limits.exceeded_by(timed.latency_ms, work.flops, work.bytes_moved):
        raise IncorrectError(reason)


def _finite_outputs(work: Work) -> None:
    """What was timed must still be right after many calls; a train step may have diverged."""
    outputs = work.call()
    anti_cheat.require_plain_tensors(outputs)
    for i, x in enumerate(outputs):
        require_finite(f"output {i} after the last sample", x)
