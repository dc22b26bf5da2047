"""One measurement, and the file it is kept in. A number exists only where the outcome is PASSED; None is unknown."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from benchmarks import jsonl, schema
from benchmarks.clocks import Clocks
from benchmarks.fingerprint import Fingerprint
from benchmarks.key import Key as Key

SCHEMA_VERSION = 2
READABLE_VERSIONS = (1, 2)
"""Version 2 added fields, all optional: a line of version 1 reads as one that does not know them."""


class Outcome(str, Enum):
    """How a measurement ended."""

    PASSED = "PASSED"
    """Green against the oracle, then measured."""
    INCORRECT = "INCORRECT"
    """Further from the oracle than the error budget."""
    NONFINITE = "NONFINITE"
    """NaN or infinity in an output or a gradient."""
    STALLED = "STALLED"
    """No answer before the deadline."""
    CRASHED = "CRASHED"
    """Any other error; the reason holds its type and message."""
    OUT_OF_MEMORY = "OUT_OF_MEMORY"
    COMPILE_ERROR = "COMPILE_ERROR"
    """A kernel could not be compiled or does not fit the device."""
    UNSUPPORTED = "UNSUPPORTED"
    """The implementation is there and refuses this case."""
    THROTTLED = "THROTTLED"
    """The device lowered its clocks while it was measured."""
    NOT_PRESENT = "NOT_PRESENT"
    """The implementation is not on this machine."""


@dataclass(frozen=True)
class Check:
    """One comparison with the oracle."""

    name: str
    """What was compared: "o", "block_indices", "dq", ..."""
    error: float | None
    """Relative to the size of the truth: Euclidean, or for blocks of their best score; None where it is not finite."""
    budget: float
    """What is allowed: a multiple of the error of PyTorch in the same dtype, both against float64."""

    @property
    def passed(self) -> bool:
        return self.error is not None and self.error <= self.budget


@dataclass(frozen=True)
class Gate:
    """What was compared with the oracle, on the inputs that are timed, in the same process."""

    rows_checked: int
    """Query rows compared, over all sequences."""
    checks: tuple[Check, ...]
    path: str
    """What ran, as the implementation recorded it: the backend of NSA, or the baseline's name."""
    seed: int | None = None
    """Of the rows that were drawn and of the inputs after the last sample; None in records that drew none."""
    rows_compared: int | None = None
    """Query rows of those inputs that were compared with the oracle or with a second implementation, over all
    sequences; None in records from before there was one, and where a loss stands for all rows."""

    @property
    def passed(self) -> bool:
        return all(check.passed for check in self.checks)


@dataclass(frozen=True)
class Record:
    """One measurement: one implementation on one case."""

    key: Key
    outcome: Outcome
    reason: str | None
    """Why it is not PASSED; None where it is."""
    fingerprint: Fingerprint
    command: str
    """What reproduces it, typed in the repository's root."""
    gate: Gate | None = None
    """None where the case ended before the oracle was asked."""
    latency_ms: float | None = None
    """Median of the samples: the device's time alone where `queued_ahead`."""
    interval_ms: tuple[float, float] | None = None
    """Confidence interval of that median; None where the samples are too few for one."""
    end_to_end_ms: float | None = None
    """Median wall time from the call to the end of the device's work, launch included, measured apart."""
    samples_ms: tuple[float, ...] | None = None
    """Every sample, in the order taken."""
    tokens_per_s: float | None = None
    """Query tokens of all sequences over the median latency."""
    peak_mem_mib: float | None = None
    """Peak above what stood before the call (inputs): outputs, saved tensors, scratch. MiB = 2**20 bytes."""
    peak_mem_source: str | None = None
    """How the peak was read: "cuda_allocator", or "rss_high_water" of a fresh child process."""
    clock: str | None = None
    """"cuda_event", "cuda_graph" (events around a replay) or "perf_counter"."""
    queued_ahead: bool | None = None
    """Whether the device's work was queued before it began, so that no sample holds launch latency; False where the
    call itself waits for the device; None on the CPU."""
    compile_s: float | None = None
    """Wall time of the first call: compilation, autotuning, loading of libraries."""
    warmup_calls: int | None = None
    """Calls between the first one and the first sample."""
    stop_reason: str | None = None
    """"precise_enough" or "wall_limit"; "enough_samples" in records of version 1."""
    unmet: str | None = None
    """The condition that the sampling ended without; None where all were met."""
    clocks: Clocks | None = None
    """The GPU's clocks beside the samples; None without NVML."""
    flops: float | None = None
    """Floating-point operations that the case needs at least, a multiply-add being two; from the case, not counted."""
    bytes_moved: float | None = None
    """Bytes that the case must read and write at least; from the case, not counted."""
    schema_version: int = SCHEMA_VERSION

    NUMBERS = (
        "latency_ms", "samples_ms", "interval_ms", "end_to_end_ms", "tokens_per_s", "peak_mem_mib", "compile_s",
    )  # fmt: skip
    """What was measured: None unless PASSED."""

    def __post_init__(self) -> None:
        if self.outcome is Outcome.PASSED:
            if self.gate is None or not self.gate.passed:
                raise ValueError(f"{self.key.name}: PASSED needs a green gate; got {self.gate}")
            self._check_numbers()
            self._check_clocks()
            return
        if not self.reason:
            raise ValueError(f"{self.key.name}: {self.outcome.value} needs a reason")
        for name in self.NUMBERS:
            if getattr(self, name) is not None:
                raise ValueError(f"{self.key.name}: {name} must be None with outcome {self.outcome.value}")

    def _check_numbers(self) -> None:
        if self.latency_ms is None and self.peak_mem_mib is None:
            raise ValueError(f"{self.key.name}: PASSED needs a number")
        for name in ("latency_ms", "end_to_end_ms", "tokens_per_s", "flops", "bytes_moved"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise ValueError(f"{self.key.name}: {name} must be finite and above 0; got {value}")
        if self.interval_ms is not None and not (len(self.interval_ms) == 2 and self._interval_holds_latency()):
            raise ValueError(
                f"{self.key.name}: interval_ms must be two bounds around latency_ms; got {self.interval_ms}"
            )
        # a sample can be shorter than the clock's step, and a call can need nothing beside its inputs
        singles = (("peak_mem_mib", (self.peak_mem_mib,)), ("compile_s", (self.compile_s,)))
        for name, values in (("samples_ms", self.samples_ms), *singles):
            for value in values or ():
                if value is not None and not (math.isfinite(value) and value >= 0):
                    raise ValueError(f"{self.key.name}: {name} must be finite and at least 0; got {value}")

    def _check_clocks(self) -> None:
        if self.clocks is None or self.samples_ms is None:
            return
        for name in ("sm_mhz", "power_w", "temperature_c"):
            readings = len(getattr(self.clocks, name))
            if readings != len(self.samples_ms):
                raise ValueError(
                    f"{self.key.name}: clocks.{name} must be beside each of the {len(self.samples_ms)} samples; got"
                    f" {readings}"
                )

    def _interval_holds_latency(self) -> bool:
        assert self.interval_ms is not None
        low, high = self.interval_ms
        return self.latency_ms is not None and low <= self.latency_ms <= high

    @property
    def identity(self) -> str:
        """What was measured, as one word that tells any two apart: the whole key, and the path that ran."""
        path = self.gate.path if self.gate else None
        return json.dumps({**vars(self.key), "path": path}, sort_keys=True, separators=(",", ":"))

    @property
    def p99_ms(self) -> float | None:
        """What 99 of 100 samples do not exceed; None for fewer than 100 samples, whose greatest says less."""
        if self.samples_ms is None or len(self.samples_ms) < 100:
            return None
        return sorted(self.samples_ms)[math.ceil(0.99 * len(self.samples_ms)) - 1]

    @property
    def tflops(self) -> float | None:
        """TFLOP/s reached, by the case's own count; None where that or the latency is unknown."""
        return None if self.flops is None or self.latency_ms is None else self.flops / self.latency_ms / 1e9

    @property
    def tb_per_s(self) -> float | None:
        """TB/s reached, by the case's own count; None where that or the latency is unknown."""
        return None if self.bytes_moved is None or self.latency_ms is None else self.bytes_moved / self.latency_ms / 1e9

    @property
    def share_of_limit(self) -> float | None:
        """The nearer of the two measured ceilings, as a share of it: 1.0 leaves nothing to gain. None where unknown.

        What a warm cache can hold counts as no traffic of the memory.
        """
        ceilings = self.fingerprint.ceilings
        if ceilings is None or self.latency_ms is None:
            return None
        shares = []
        if self.tflops is not None:
            shares.append(self.tflops / ceilings.tflops(self.key.dtype))
        if self.bytes_moved is not None:
            cached = 0.0 if self.key.cache == "cold" else (ceilings.cache_mib or 0.0) * 2**20
            shares.append(max(self.bytes_moved - cached, 0.0) / self.latency_ms / 1e9 / ceilings.copy_tb_per_s)
        return max(shares, default=None)

    def to_json(self) -> str:
        """One line of JSON, without a line break."""
        return json.dumps(dataclasses.asdict(self), allow_nan=False, separators=(",", ":"))

    @classmethod
    def from_json(cls, line: str) -> Record:
        """Read one line back. Raises ValueError or TypeError saying what is wrong with it."""
        data = json.loads(line)
        if not isinstance(data, dict):
            raise TypeError(f"a record must be a JSON object; got {type(data).__name__}")
        if data.get("schema_version") not in READABLE_VERSIONS:
            known = " or ".join(map(str, READABLE_VERSIONS))
            raise ValueError(f"schema_version must be {known}; got {data.get('schema_version')!r}")
        return schema.build(cls, data, "record")


@dataclass(frozen=True)
class Damaged:
    """A line that is no record."""

    path: Path
    line: int
    """Counted from 1."""
    why: str


def create_run(results: Path, fingerprint: Fingerprint) -> Path:
    """A new, empty file results/runs/<machine>/<utc>-<commit>.jsonl; -2, -3, ... where another run has the name."""
    first = _run_path(results, fingerprint)
    first.parent.mkdir(parents=True, exist_ok=True)
    path, number = first, 1
    while True:
        try:
            path.touch(exist_ok=False)  # atomic: two processes cannot both make it
        except FileExistsError:
            number += 1
            path = first.with_name(f"{first.stem}-{number}.jsonl")
        else:
            return path


def _run_path(results: Path, fingerprint: Fingerprint) -> Path:
    utc = fingerprint.utc.replace("-", "").replace(":", "")
    commit = (fingerprint.commit or "nocommit")[:10]
    return results / "runs" / fingerprint.machine / f"{utc}-{commit}.jsonl"


def append(path: Path, record: Record) -> None:
    """Add one line, on the disk when this returns: a killed run keeps what it finished. Raises jsonl.DiskFullError."""
    jsonl.append(path, record.to_json())


def read(paths: Iterable[Path]) -> tuple[list[Record], list[Damaged]]:
    """Every record of these files in order, and every line that is none, by name."""
    records: list[Record] = []
    damaged: list[Damaged] = []
    for path in paths:
        try:
            found = list(jsonl.lines(path))
        except OSError as error:
            damaged.append(Damaged(path, 1, unreadable(error)))
            continue
        for number, line in found:
            try:
                records.append(Record.from_json(line.decode()))
            except (ValueError, TypeError, RecursionError) as error:  # JSON and Unicode errors are ValueErrors
                damaged.append(Damaged(path, number, f"{type(error).__name__}: {error}"))
    return records, damaged


def unreadable(error: OSError) -> str:
    """Why a whole file is damaged: it is a folder, say."""
    return f"{type(error).__name__}: cannot be read: {error.strerror}"


def read_runs(results: Path) -> tuple[list[Record], list[Damaged]]:
    """All runs under results/runs, oldest file first."""
    return read(sorted((results / "runs").glob("*/*.jsonl"), key=lambda path: path.name))
