"""One record as a compact line of JSON: two years of five GPUs are 600,000 of them.

Left out is what the run line says, and what equals a default of `RecordLine`. A default is therefore never changed: a
new field gets one, and a new usual value is written out. Figures keep seven significant digits, clocks four, errors
against the oracle three.

Lines of versions 1 and 2 stand alone, with their fingerprint, every sample and the clocks beside each. Version 2 added
fields, all optional: a line of version 1 reads as one that does not know them.
"""

from __future__ import annotations

import dataclasses
import json
from functools import cache
from typing import Any

import msgspec  # decodes and checks a line in a fifth of the time that Python's json and a checker of our own need

from benchmarks.cases.key import Key
from benchmarks.cases.outcome import CaseOutcome, Correctness, OracleCheck
from benchmarks.history.records import Anchor, Record, SharedSequence, check_figures
from benchmarks.history.samples import RawSamples, SampleSummary
from benchmarks.peak_memory import OutOfMemory
from benchmarks.timing.clocks import ClockSummary
from harness import schema
from harness.fingerprint import Fingerprint

_DIGITS, _ERROR_DIGITS, _CLOCK_DIGITS = 7, 3, 4
PAPER = "paper"
_CONFIGS: dict[str, dict[str, Any]] = {
    PAPER: {
        "l": 32, "d": 16, "l_sel": 64, "n_sel": 16, "w": 512, "phi": "avg", "init_blocks": 1, "local_blocks": 2,
    },
}  # fmt: skip
"""Configs that a line names."""


class _Check(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """The fields of `OracleCheck`, in this order."""

    name: str
    """Without what stands behind its first comma."""
    error: float | None
    budget: float

    @property
    def passed(self) -> bool:
        return self.error is not None and self.error <= self.budget


class _Correctness(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """The fields of `Correctness`, in this order."""

    rows_checked: int
    checks: dict[str, list[_Check]]
    """By what their names share behind the first comma: "", "fresh inputs", "all rows, fresh inputs"."""
    path: str
    seed: int | None = None
    rows_compared: int | None = None

    @property
    def passed(self) -> bool:
        return all(check.passed for checks in self.checks.values() for check in checks)


class _Samples(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """The fields of `SampleSummary`, in this order."""

    count: int
    min_ms: float
    p25_ms: float
    p75_ms: float
    max_ms: float
    p99_ms: float | None

    def __post_init__(self) -> None:
        SampleSummary.__post_init__(self)  # type: ignore[arg-type]


class ClockLine(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """The fields of `ClockSummary`, in this order."""

    sm_mhz_min: int
    sm_mhz_median: float
    power_w_median: float
    temperature_c_max: int
    throttled: dict[str, int]
    sm_mhz_drift: float | None = None

    def __post_init__(self) -> None:
        ClockSummary.__post_init__(self)  # type: ignore[arg-type]


class _Anchor(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """The fields of `Anchor`, in this order."""

    commit: str
    nsa_sha256: str


class _Shared(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """The fields of `SharedSequence`, in this order."""

    one_rank_ms: float | None
    exposed_ms: float
    received_gb: float
    imbalance: float
    gather_gb_per_s: float
    compared_tokens: int
    slowest_rank_ms: float | None = None
    forward_ms: float | None = None

    def __post_init__(self) -> None:
        SharedSequence.__post_init__(self)  # type: ignore[arg-type]


class RecordLine(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """A line as it stands; its values were checked when it was read."""

    key: str | dict[str, Any]
    """The key's name where that says all but backend and config; else every field."""
    backend_asked: str | None = None
    config: str | dict[str, Any] | None = None
    """One of `_CONFIGS` by name, or in full."""
    outcome: CaseOutcome = CaseOutcome.PASSED
    reason: str | None = None
    command: str | None = None
    """None where the run line says it."""
    correctness: _Correctness | None = None
    gate: _Correctness | None = None
    """The name of `correctness` in earlier lines; None once a line is read."""
    latency_ms: float | None = None
    interval_ms: tuple[float, float] | None = None
    end_to_end_ms: float | None = None
    samples: _Samples | None = None
    tokens_per_s: float | None = None
    peak_mem_mib: float | None = None
    peak_mem_source: str | None = "cuda_allocator"
    clock: str | None = "cuda_event"
    queued_ahead: bool | None = True
    compile_s: float | None = None
    warmup_calls: int | None = None
    stop_reason: str | None = "precise_enough"
    unmet: str | None = None
    clocks: ClockLine | None = None
    flops: float | None = None
    bytes_moved: float | None = None
    other_load: float | None = None
    gpu_conditions: dict[str, str] | None = None
    out_of_memory: OutOfMemory | None = None
    case_s: float | None = None
    launches_per_call: int | None = None
    anchor: _Anchor | None = None
    inputs_follow: str | None = None
    shared: _Shared | None = None

    def __post_init__(self) -> None:
        if self.gate is not None:
            if self.correctness is not None:
                raise ValueError("a line must not have 'gate' beside 'correctness'")
            self.correctness, self.gate = self.gate, None
        check_figures(self)


_SAME = (
    "outcome", "reason", "peak_mem_source", "clock", "queued_ahead", "warmup_calls", "stop_reason", "unmet",
    "gpu_conditions", "inputs_follow", "launches_per_call",
)  # fmt: skip
"""Fields that stand in a line as they are."""
_FIGURES = (
    "latency_ms", "end_to_end_ms", "tokens_per_s", "peak_mem_mib", "compile_s", "flops", "bytes_moved",
    "other_load", "case_s",
)  # fmt: skip
_DEFAULTS = {field.name: field.default for field in msgspec.structs.fields(RecordLine)}
_ENCODER = msgspec.json.Encoder()
_DECODER = msgspec.json.Decoder(RecordLine)


def encode(record: Record, *, with_command: bool) -> str:
    """One line, without a line break."""
    named = _named(record.key.name)
    line = RecordLine(
        key=dataclasses.asdict(record.key),
        command=record.command if with_command else None,
        correctness=_correctness_line(record.correctness),
        interval_ms=None if record.interval_ms is None else tuple(map(_rounded, record.interval_ms)),
        samples=_Samples(*map(_rounded, vars(record.samples).values())) if record.samples else None,
        out_of_memory=record.out_of_memory,
        anchor=_Anchor(record.anchor.commit, record.anchor.nsa_sha256) if record.anchor else None,
        shared=_Shared(*map(_rounded, vars(record.shared).values())) if record.shared else None,
        clocks=ClockLine(*(_rounded(x, _CLOCK_DIGITS) for x in vars(record.clocks).values()))
        if record.clocks
        else None,
        **{name: _usual(name, getattr(record, name)) for name in _SAME},
        **{name: _rounded(getattr(record, name)) for name in _FIGURES},
    )
    if named == dataclasses.replace(record.key, backend_asked=None, config=None):
        line.key, line.backend_asked = record.key.name, record.key.backend_asked
        line.config = next((name for name, config in _CONFIGS.items() if config == record.key.config), None)
        line.config = line.config or _plain(record.key.config)
    return _ENCODER.encode(line).decode()


def _usual(name: str, value: Any) -> Any:
    """The default itself where the value equals it: msgspec leaves out what is the same object."""
    return _DEFAULTS[name] if value == _DEFAULTS.get(name) else value


def _correctness_line(correctness: Correctness | None) -> _Correctness | None:
    if correctness is None:
        return None
    checks: dict[str, list[_Check]] = {}
    for check in correctness.checks:
        name, _, of = check.name.partition(", ")
        short = _Check(name, _rounded(check.error, _ERROR_DIGITS), _rounded(check.budget, _ERROR_DIGITS))
        checks.setdefault(of, []).append(short)
    return _Correctness(correctness.rows_checked, checks, correctness.path, correctness.seed, correctness.rows_compared)


def _rounded(value: Any, digits: int = _DIGITS) -> Any:
    """A float to so many digits, without a fraction where it has none; anything else as it is."""
    if not isinstance(value, float):
        return value
    short = float(f"{value:.{digits}g}")
    return int(short) if short.is_integer() and abs(short) < 2**53 else short


def _plain(config: Any) -> dict[str, Any] | None:
    return None if config is None else dict(config)


def decode(text: bytes) -> tuple[Key, RecordLine]:
    """A line and its key. Raises ValueError naming the field that is wrong by its path in the line ("$.latency_ms")."""
    try:
        line = _DECODER.decode(text)
    except msgspec.DecodeError as error:
        raise ValueError(str(error)) from None
    return _key(line), line


def record(line: RecordLine, key: Key, fingerprint: Fingerprint, command: str | None) -> Record:
    """The record of a line; `command` is what its run line says for the case."""
    return Record(
        key=key,
        fingerprint=fingerprint,
        command=line.command if line.command is not None else command or "",
        correctness=_correctness(line.correctness),
        interval_ms=line.interval_ms,
        samples=SampleSummary(*_values(line.samples)) if line.samples else None,
        clocks=ClockSummary(*_values(line.clocks)) if line.clocks else None,
        out_of_memory=line.out_of_memory,
        anchor=Anchor(*_values(line.anchor)) if line.anchor else None,
        shared=SharedSequence(*_values(line.shared)) if line.shared else None,
        **{name: getattr(line, name) for name in (*_SAME, *_FIGURES)},
    )


def _correctness(line: _Correctness | None) -> Correctness | None:
    if line is None:
        return None
    checks = tuple(
        OracleCheck(f"{check.name}, {of}" if of else check.name, check.error, check.budget)
        for of, group in line.checks.items()
        for check in group
    )
    return Correctness(line.rows_checked, checks, line.path, line.seed, line.rows_compared)


def _values(struct: msgspec.Struct) -> tuple[Any, ...]:
    return msgspec.structs.astuple(struct)


def _key(line: RecordLine) -> Key:
    if isinstance(line.key, dict):
        return _full_key(_ENCODER.encode(line.key))
    config = line.config if isinstance(line.config, str) else _ENCODER.encode(line.config)
    return _short_key(line.key, line.backend_asked, config)


@cache
def _full_key(text: bytes) -> Key:
    return schema.build(Key, json.loads(text), "key")


@cache
def _short_key(name: str, backend_asked: str | None, config: str | bytes) -> Key:
    """The runs of years have the same few hundred keys."""
    named = _named(name)
    if named is None:
        raise ValueError(f"key must be a case's name or an object with its fields; got {name!r}")
    if isinstance(config, str) and config not in _CONFIGS:
        raise ValueError(f"config must be one of {', '.join(_CONFIGS)}, an object or null; got {config!r}")
    known = _CONFIGS[config] if isinstance(config, str) else msgspec.json.decode(config)
    return dataclasses.replace(named, backend_asked=backend_asked, config=known)


@cache
def _named(name: str) -> Key | None:
    """`Key.from_name`; None for a name that does not say all."""
    try:
        return Key.from_name(name)
    except ValueError:
        return None


OLD_VERSIONS = (1, 2)


def decode_old(line: bytes) -> tuple[Record, RawSamples | None]:
    """The record, and its samples where it has any. Raises ValueError or TypeError saying what is wrong with it."""
    data = json.loads(line.decode())
    if not isinstance(data, dict):
        raise TypeError(f"a record must be a JSON object; got {type(data).__name__}")
    if data.pop("schema_version", None) not in OLD_VERSIONS:
        known = " or ".join(map(str, OLD_VERSIONS))
        raise ValueError(f"schema_version must be {known}, or a run line must stand before the record; got neither")
    samples_ms, clocks = data.pop("samples_ms", None), data.pop("clocks", None)
    record = schema.build(Record, data, "record")
    if samples_ms is None and clocks is None:
        return record, None
    raw = schema.build(
        RawSamples, {"name": record.key.name, "samples_ms": samples_ms or [], "clocks": clocks}, "record"
    )
    return (
        dataclasses.replace(
            record,
            samples=SampleSummary.of(raw.samples_ms) if raw.samples_ms else None,
            clocks=raw.clocks.summary if raw.clocks and raw.clocks.sm_mhz else None,
        ),
        raw,
    )
