"""One measurement. A number exists only where the outcome is PASSED; None is unknown."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from benchmarks.cases.key import Key
from benchmarks.cases.outcome import CaseOutcome, Correctness
from benchmarks.history.samples import SampleSummary
from benchmarks.peak_memory import CUDA, OutOfMemory
from benchmarks.timing.clocks import ClockSummary
from harness import forced
from harness.fingerprint import Fingerprint
from harness.peak import MIB

NUMBERS = (
    "latency_ms", "samples", "interval_ms", "end_to_end_ms", "tokens_per_s", "peak_mem_mib", "compile_s",
    "other_load", "launches_per_call", "shared",
)  # fmt: skip
"""What was measured: None unless PASSED."""
TIMES = ("latency_ms", "interval_ms", "end_to_end_ms", "samples", "tokens_per_s", "compile_s", "shared")
"""What tells how fast it was."""
IN_A_LOOP = "among steps that follow it"
"""How a step of a user's own loop is timed (`told_apart`)."""
_SOURCE = re.compile(r"(study|atlas) of .*?commit (\w+)")
"""In `Record.inputs_follow`."""
_ABOVE_ZERO = ("latency_ms", "end_to_end_ms", "tokens_per_s", "flops", "bytes_moved")
_NOT_NEGATIVE = (
    "peak_mem_mib",
    "compile_s",
    "other_load",
    "launches_per_call",
)  # a call can need nothing beside its inputs


def check_figures(of: Any) -> None:
    """Raises ValueError where the figures of a record, or of its line in a file, do not go with its outcome."""
    if of.out_of_memory is not None and of.outcome is not CaseOutcome.OUT_OF_MEMORY:
        raise ValueError(f"out_of_memory must be None with outcome {of.outcome.value}")
    if of.outcome is not CaseOutcome.PASSED:
        if not of.reason:
            raise ValueError(f"{of.outcome.value} needs a reason")
        for name in NUMBERS:
            if getattr(of, name) is not None:
                raise ValueError(f"{name} must be None with outcome {of.outcome.value}")
        return
    if of.correctness is None or not of.correctness.passed:
        raise ValueError(f"PASSED needs correctness checks that passed; got {of.correctness}")
    if of.latency_ms is None and of.peak_mem_mib is None:
        raise ValueError("PASSED needs a number")
    for name in _ABOVE_ZERO:
        value = getattr(of, name)
        if value is not None and not 0 < value < math.inf:
            raise ValueError(f"{name} must be finite and above 0; got {value}")
    for name in _NOT_NEGATIVE:
        value = getattr(of, name)
        if value is not None and not 0 <= value < math.inf:
            raise ValueError(f"{name} must be finite and at least 0; got {value}")
    if of.interval_ms is not None:
        low_ms, high_ms = of.interval_ms if len(of.interval_ms) == 2 else (math.inf, -math.inf)
        if of.latency_ms is None or not low_ms <= of.latency_ms <= high_ms:
            raise ValueError(f"interval_ms must be two bounds around latency_ms; got {of.interval_ms}")


def known_peak_mib(key: Key, peak_mem_mib: float | None, source: str | None) -> float | None:
    """The peak of a record; None also where what was read is none.

    Until the pool of a CUDA graph was read (`peak_memory.GRAPH`), a step that replays its own had what the replay asked
    the allocator for: 0.08 MiB, all activations lying in the pool (commits 1ac010e8be and e4fe0fa0f0). Before that it
    was of an eager step with its gradients (c8f3ca191a, d2d5cb6064). Neither can stand beside a peak.
    """
    return None if key.replays and source == CUDA else peak_mem_mib


def check_untimed(of: Any, fingerprint: Fingerprint) -> None:
    """Raises ValueError where a GPU that was forced to be another one has a time."""
    if forced.of(fingerprint.machine) is None:
        return
    for name in TIMES:
        if getattr(of, name) is not None:
            raise ValueError(f"{name} must be None on {fingerprint.machine}: it was forced, and nothing is timed there")


@dataclass(frozen=True)
class Anchor:
    """An earlier version of NSA that a run measured beside its own, to tell what other conditions do to a latency."""

    commit: str
    nsa_sha256: str
    """Hash of its nsa/, as in a fingerprint."""


@dataclass(frozen=True)
class SharedSequence:
    """What is known of a sequence that several ranks share, beside their time."""

    one_rank_ms: float | None
    """Of the fastest rank alone in the same processes, the median; None where the sequence does not fit on one."""
    exposed_ms: float
    """For how long the slowest rank's computation stood waiting for communication, the median; measured apart."""
    received_gb: float
    """Bytes that arrive at a rank / 1e9, of the rank that gets most."""
    imbalance: float
    """By which share the most loaded rank sees more compressed keys than the mean."""
    gather_gb_per_s: float
    """GB that arrive at a rank in a second where all gather the keys and values and do nothing else."""
    compared_tokens: int
    """Length of the sequence on which the ranks were compared with one of them, and that one with the oracle."""
    slowest_rank_ms: float | None = None
    """Of the slowest rank alone, where `one_rank_ms` is the fastest's: no share of ideal exceeds their ratio."""
    forward_ms: float | None = None
    """The forward pass over all ranks, without autograd, of the slowest of them, the median; None in records before
    it was measured."""

    def __post_init__(self) -> None:
        for name in ("one_rank_ms", "slowest_rank_ms", "forward_ms"):
            time_ms = getattr(self, name)
            if time_ms is not None and not 0 < time_ms < math.inf:
                raise ValueError(f"{name} must be finite and above 0; got {time_ms}")
        for name in ("exposed_ms", "received_gb", "imbalance", "gather_gb_per_s"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be finite and at least 0; got {getattr(self, name)}")


class _Timed(Protocol):
    """A record, or a line of one."""

    @property
    def inputs_follow(self) -> str | None: ...
    @property
    def clock(self) -> str | None: ...
    @property
    def queued_ahead(self) -> bool | None: ...


def told_apart(key: Key, figures: _Timed) -> str:
    """What else makes figures of one key and path another series: what recorded inputs follow, or how a step was timed.

    Since bdc61b5 a step of a user's own loop is timed on a GPU among others that follow it, at the pace of the slower
    of host and GPU. Before, it was timed alone, and queued ahead where the queue held it: the GPU's time without the
    host's.
    """
    if figures.inputs_follow:
        return figures.inputs_follow
    in_a_loop = key.mode == "train-loop" and figures.clock == "cuda_event" and figures.queued_ahead is None
    return IN_A_LOOP if in_a_loop else ""


@dataclass(frozen=True)
class Record:
    """One measurement: one implementation on one case."""

    key: Key
    outcome: CaseOutcome
    reason: str | None
    """Why it is not PASSED; None where it is."""
    fingerprint: Fingerprint
    command: str
    """What reproduces it, typed in the repository's root."""
    correctness: Correctness | None = None
    """None where the case ended before the oracle was asked."""
    latency_ms: float | None = None
    """Median of the samples: the device's time alone where `queued_ahead`."""
    interval_ms: tuple[float, float] | None = None
    """Confidence interval of that median; None where the samples are too few for one."""
    end_to_end_ms: float | None = None
    """Median wall time from the call to the end of the device's work, launch included, measured apart."""
    samples: SampleSummary | None = None
    """How the samples spread; the samples themselves lie in `raw_samples` beside the run."""
    tokens_per_s: float | None = None
    """Query tokens of all sequences over the median latency."""
    peak_mem_mib: float | None = None
    """As it was read: peak above what stood before the call (inputs): outputs, saved tensors, scratch. MiB = 2**20
    bytes. What compares or shows peaks asks `known_peak_mib`."""
    peak_mem_source: str | None = None
    """How the peak was read: "cuda_allocator", "cuda_graph_pool" where the call replays a graph of its own, or
    "rss_high_water" of a fresh child process."""
    clock: str | None = None
    """"cuda_event", "cuda_graph" (events around a replay) or "perf_counter"."""
    queued_ahead: bool | None = None
    """Whether the device's work was queued before it began, so that no sample holds launch latency; False where the
    call itself waits for the device; None on the CPU, and of a step among others that follow it."""
    compile_s: float | None = None
    """Wall time of the first call: compilation, autotuning, loading of libraries."""
    warmup_calls: int | None = None
    """Calls between the first one and the first sample."""
    stop_reason: str | None = None
    """"precise_enough" or "wall_limit"; "enough_samples" in records of version 1."""
    unmet: str | None = None
    """The condition that the sampling ended without; None where all were met."""
    other_load: float | None = None
    """Cores that other processes kept busy while the case was measured, on average; None where it is unknown."""
    clocks: ClockSummary | None = None
    """The GPU's clocks beside the samples; None without NVML."""
    gpu_conditions: Mapping[str, str] | None = None
    """What was noticed of the GPU beside the case, in words, by the names in `benchmarks.timing.gpu_watch`; empty where
    nothing was, None where nobody looked: on a CPU, and in records from before it was looked for."""
    flops: float | None = None
    """Floating-point operations that the case needs at least, a multiply-add being two; from the case, not counted."""
    bytes_moved: float | None = None
    """Bytes that the case must read and write at least; from the case, not counted."""
    out_of_memory: OutOfMemory | None = None
    """What the allocator said; None with any other outcome than OUT_OF_MEMORY, and in earlier records."""
    case_s: float | None = None
    """Wall time of the whole measurement, from inputs to the last check; what a budget is planned with. None where it
    did not answer, and in earlier records."""
    launches_per_call: int | None = None
    """What one call puts into the GPU's queue: kernels, copies and fills, counted by CUPTI; on a CPU PyTorch's
    operators stand in for them. None where they were not counted."""
    anchor: Anchor | None = None
    """What was measured in place of the NSA that the fingerprint names; None where it is that one. Such a record is no
    point of its case's series."""

    inputs_follow: str | None = None
    """Of recorded inputs: which recorded curves, of which quantile and length, the selection follows, and by which law;
    else None. Figures on inputs that follow different ones are not of one series."""
    shared: SharedSequence | None = None
    """Of several ranks; None of one, and in earlier records."""

    OLD_NAMES: ClassVar[Mapping[str, str]] = {"gate": "correctness"}

    def __post_init__(self) -> None:
        try:
            check_figures(self)
            check_untimed(self, self.fingerprint)
        except ValueError as error:
            raise ValueError(f"{self.key.name}: {error}") from None

    @property
    def identity(self) -> str:
        """What was measured, as one word that tells any two apart: the whole key, the path that ran, and what
        `told_apart` says."""
        path = self.correctness.path if self.correctness else None
        word = f'{self.key.identity[:-1]},"path":{json.dumps(path)}'
        if self.inputs_follow:
            return f'{word},"inputs_follow":{json.dumps(self.inputs_follow)}}}'
        apart = told_apart(self.key, self)
        return f'{word},"timed":{json.dumps(apart)}}}' if apart else f"{word}}}"

    @property
    def inputs_source(self) -> str | None:
        """Where recorded inputs are from, in short: "study 8d4d61e", "atlas e4fe0fa0f0"; None of other inputs."""
        found = _SOURCE.search(self.inputs_follow or "")
        return f"{found[1]} {found[2]}" if found else self.inputs_follow

    @property
    def known_peak_mib(self) -> float | None:
        """The peak, MiB; None where it is not known, or what was read is none."""
        return known_peak_mib(self.key, self.peak_mem_mib, self.peak_mem_source)

    @property
    def tflops(self) -> float | None:
        """TFLOP/s reached, by the case's own count; None where that or the latency is unknown."""
        return None if self.flops is None or self.latency_ms is None else self.flops / self.latency_ms / 1e9

    @property
    def tb_per_s(self) -> float | None:
        """TB/s reached, by the case's own count; None where that or the latency is unknown."""
        return None if self.bytes_moved is None or self.latency_ms is None else self.bytes_moved / self.latency_ms / 1e9

    @property
    def share_of_ideal(self) -> float | None:
        """One rank's time over the number of ranks, over their time; None where it was not measured."""
        if self.shared is None or self.shared.one_rank_ms is None or self.latency_ms is None:
            return None
        return self.shared.one_rank_ms / self.key.ranks / self.latency_ms

    @property
    def exposed_share(self) -> float | None:
        """The part of the time that the slowest rank waits for communication; None of one rank."""
        return None if self.shared is None or self.latency_ms is None else self.shared.exposed_ms / self.latency_ms

    @property
    def share_of_limit(self) -> float | None:
        """The nearer of the two measured peaks, as a share of it: 1.0 leaves nothing to gain. None where unknown.

        What a warm cache can hold counts as no traffic of the memory.
        """
        return share_of_limit(self.key, self.fingerprint, self.latency_ms, self.flops, self.bytes_moved)


def share_of_limit(
    key: Key, fingerprint: Fingerprint, latency_ms: float | None, flops: float | None, bytes_moved: float | None
) -> float | None:
    """`Record.share_of_limit` from what a record line says."""
    peak = fingerprint.measured_peak
    if peak is None or latency_ms is None:
        return None
    shares = []
    if flops is not None:
        shares.append(flops / latency_ms / 1e9 / peak.tflops(key.dtype))
    if bytes_moved is not None:
        cached = 0.0 if key.cache == "cold" else (peak.cache_mib or 0.0) * MIB
        shares.append(max(bytes_moved - cached, 0.0) / latency_ms / 1e9 / peak.copy_tb_per_s)
    return max(shares, default=None)
