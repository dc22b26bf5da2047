"""One measurement, and the file it is kept in. A number exists only where the outcome is PASSED; None is unknown."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from benchmarks import schema
from benchmarks.fingerprint import Fingerprint

SCHEMA_VERSION = 1


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
class Key:
    """Which case: records with equal keys measure the same thing."""

    mode: str
    """"prefill-forward", "prefill-forward-backward", "decode", "train-step" or "memory"."""
    implementation: str
    """"nsa", or the baseline by name ("sdpa-flash")."""
    backend_asked: str | None
    """Backend of NSA that was asked for; None for a baseline."""
    dtype: str
    """"float32", "bfloat16" or "float16"; of a train step the compute type, the weights being float32."""
    batch: int
    num_queries: int
    """Tokens computed per sequence: S, or 1 in decode."""
    num_keys: int
    """Tokens attended to per sequence: T."""
    heads: int
    kv_heads: int
    head_dim_k: int
    head_dim_v: int
    config: Mapping[str, Any] | None
    """NSA's settings; None for a baseline."""
    model: str | None = None
    """The decoder LM of a train step; None elsewhere."""
    inputs: str = "random"
    """How the inputs are drawn: "random" is standard normal, gates uniform."""
    cache: str = "warm"
    """"cold": the GPU's L2 is flushed before each sample; "warm": it is not."""

    SIZES = ("batch", "num_queries", "num_keys", "heads", "kv_heads", "head_dim_k", "head_dim_v")

    def __post_init__(self) -> None:
        for name in self.SIZES:
            if getattr(self, name) < 1:
                raise ValueError(f"key.{name} must be at least 1; got {getattr(self, name)}")

    @property
    def what(self) -> str:
        """The model, or the heads: 64x4x128, or 64x4x192:128 where Dk and Dv differ."""
        dims = f"{self.head_dim_k}" if self.head_dim_k == self.head_dim_v else f"{self.head_dim_k}:{self.head_dim_v}"
        return self.model or f"{self.heads}x{self.kv_heads}x{dims}"

    @property
    def case(self) -> str:
        """What all contenders share: decode/8x2x64/b4/s16384/float32."""
        return f"{self.mode}/{self.what}/b{self.batch}/s{self.num_keys}/{self.dtype}"

    @property
    def name(self) -> str:
        """One readable word, what `--cases` matches: the case and the implementation."""
        return f"{self.case}/{self.implementation}"


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
    """Median of the samples."""
    samples_ms: tuple[float, ...] | None = None
    """Every sample, in the order taken."""
    tokens_per_s: float | None = None
    """Query tokens of all sequences over the median latency."""
    peak_mem_mib: float | None = None
    """Peak above what stood before the call (inputs): outputs, saved tensors, scratch. MiB = 2**20 bytes."""
    peak_mem_source: str | None = None
    """How the peak was read: "cuda_allocator", or "rss_high_water" of a fresh child process."""
    clock: str | None = None
    """"cuda_event" or "perf_counter"."""
    warmup_calls: int | None = None
    stop_reason: str | None = None
    """"enough_samples" or "wall_limit"."""
    schema_version: int = SCHEMA_VERSION

    NUMBERS = ("latency_ms", "samples_ms", "tokens_per_s", "peak_mem_mib")

    def __post_init__(self) -> None:
        if self.outcome is Outcome.PASSED:
            if self.gate is None or not self.gate.passed:
                raise ValueError(f"{self.key.name}: PASSED needs a green gate; got {self.gate}")
            self._check_numbers()
            return
        if not self.reason:
            raise ValueError(f"{self.key.name}: {self.outcome.value} needs a reason")
        for name in self.NUMBERS:
            if getattr(self, name) is not None:
                raise ValueError(f"{self.key.name}: {name} must be None with outcome {self.outcome.value}")

    def _check_numbers(self) -> None:
        if all(getattr(self, name) is None for name in self.NUMBERS):
            raise ValueError(f"{self.key.name}: PASSED needs a number")
        for name in ("latency_ms", "tokens_per_s"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise ValueError(f"{self.key.name}: {name} must be finite and above 0; got {value}")
        # a sample can be shorter than the clock's step, and a call can need nothing beside its inputs
        for name, values in (("samples_ms", self.samples_ms), ("peak_mem_mib", (self.peak_mem_mib,))):
            for value in values or ():
                if value is not None and not (math.isfinite(value) and value >= 0):
                    raise ValueError(f"{self.key.name}: {name} must be finite and at least 0; got {value}")

    def to_json(self) -> str:
        """One line of JSON, without a line break."""
        return json.dumps(dataclasses.asdict(self), allow_nan=False, separators=(",", ":"))

    @classmethod
    def from_json(cls, line: str) -> Record:
        """Read one line back. Raises ValueError or TypeError saying what is wrong with it."""
        data = json.loads(line)
        if not isinstance(data, dict):
            raise TypeError(f"a record must be a JSON object; got {type(data).__name__}")
        if data.get("schema_version") != SCHEMA_VERSION:
            raise ValueError(f"schema_version must be {SCHEMA_VERSION}; got {data.get('schema_version')!r}")
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
    """Add one line, in one write, on the disk when this returns: a killed run keeps what it finished."""
    line = (record.to_json() + "\n").encode()
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(file, line)
        os.fsync(file)
    finally:
        os.close(file)


def read(paths: Iterable[Path]) -> tuple[list[Record], list[Damaged]]:
    """Every record of these files in order, and every line that is none, by name."""
    records: list[Record] = []
    damaged: list[Damaged] = []
    for path in paths:
        for number, line in enumerate(path.read_bytes().split(b"\n"), start=1):
            if not line.strip():
                continue
            try:
                records.append(Record.from_json(line.decode()))
            except (ValueError, TypeError, RecursionError) as error:  # JSON and Unicode errors are ValueErrors
                damaged.append(Damaged(path, number, f"{type(error).__name__}: {error}"))
    return records, damaged


def read_runs(results: Path) -> tuple[list[Record], list[Damaged]]:
    """All runs under results/runs, oldest file first."""
    return read(sorted((results / "runs").glob("*/*.jsonl"), key=lambda path: path.name))
