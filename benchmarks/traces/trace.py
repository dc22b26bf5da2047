"""A record as flashinfer-bench's Trace, and the record that one came from.

The format has no place for most of what a record says, so that `log` holds the record itself: the two lines of a run's
file that say all of it. What the format does have is filled from it, and checked against it on the way back. Its
errors are largest elementwise ones, which the oracle does not compute: they are NaN, ours are under `extra`. It has no
number for a time that was not measured either: the reference's is left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.cases.key import NSA
from benchmarks.cases.outcome import CaseOutcome, Correctness
from benchmarks.history import run_file
from benchmarks.history.records import Record
from benchmarks.history.run_file import DamagedLine
from benchmarks.traces import definition
from benchmarks.traces.definition import Json
from harness.fingerprint import Fingerprint

STATUS = {
    CaseOutcome.PASSED: "PASSED",
    CaseOutcome.INCORRECT: "INCORRECT_NUMERICAL",
    CaseOutcome.NONFINITE: "INCORRECT_NUMERICAL",
    CaseOutcome.CRASHED: "RUNTIME_ERROR",
    CaseOutcome.OUT_OF_MEMORY: "RUNTIME_ERROR",
    CaseOutcome.COMPILE_ERROR: "COMPILE_ERROR",
    CaseOutcome.STALLED: "TIMEOUT",
}
"""Outcomes that the format knows; the others say that nothing was evaluated, or nothing that holds."""
_UNKNOWN = "NaN"
"""How the format writes an error that is not known."""
_LIBRARIES = ("torch", "triton", "cuda", "driver", "cudnn", "flash_attn", "python")


def why_left_out(record: Record) -> str | None:
    """Why a record has no Trace, in a few words; None where it has one."""
    if record.key.mode not in definition.KINDS:
        return f"mode {record.key.mode}"
    if record.outcome not in STATUS:
        return f"outcome {record.outcome.value}"
    if record.outcome is CaseOutcome.PASSED and record.latency_ms is None:
        return "no latency"
    try:
        definition.definition(record.key)
    except (ValueError, TypeError, KeyError):
        return "settings that are none of NSA's"
    return None


def encode(record: Record) -> Json:
    """The Trace of a record that has one."""
    return {
        "definition": definition.name(record.key),
        "workload": definition.workload(record.key),
        "solution": solution(record),
        "evaluation": _evaluation(record),
    }


def solution(record: Record) -> str:
    """The implementation; of NSA with the backend that was asked for."""
    key = record.key
    return f"{NSA}-{key.backend_asked}" if key.implementation == NSA else key.implementation


def decode(trace: Any) -> Record:
    """The record that a Trace came from, and nothing of the Trace but what it says. Raises ValueError or TypeError
    where there is none, or where the Trace says something else."""
    try:
        log = trace["evaluation"]["log"]
    except (TypeError, KeyError, IndexError):
        raise TypeError("is no trace: an object with evaluation.log is needed") from None
    if not isinstance(log, str) or not log.encode().startswith(run_file.RUN_PREFIX):
        raise ValueError("evaluation.log holds no record: only what `export` wrote can be brought back")
    found = list(run_file.parsed(enumerate(log.encode().splitlines(), 1), Path("evaluation.log")))
    if len(found) != 1:
        raise ValueError(f"evaluation.log must hold one record; it holds {len(found)}")
    if isinstance(found[0], DamagedLine):
        raise ValueError(f"evaluation.log:{found[0].line}: {found[0].why}")
    record = found[0].record()
    if why := why_left_out(record):
        raise ValueError(f"evaluation.log holds a record that has no trace ({why})")
    if place := _difference(encode(record), trace, "trace"):
        raise ValueError(f"{place} is not what the record in evaluation.log says: one of the two was changed")
    return record


def _difference(wanted: Any, found: Any, place: str) -> str | None:
    """Where the first value stands that `found` lacks or has otherwise; what it has beside them does not count, since
    the format's own tools write out every default."""
    if not isinstance(wanted, Mapping):
        return None if type(wanted) is type(found) and wanted == found else place
    if not isinstance(found, Mapping):
        return place
    for name, value in wanted.items():
        if differs := _difference(value, found.get(name), f"{place}.{name}"):
            return differs
    return None


def _evaluation(record: Record) -> Json:
    status = STATUS[record.outcome]
    evaluation: Json = {
        "status": status,
        "environment": _environment(record.fingerprint),
        "timestamp": record.fingerprint.utc,
        "log": "\n".join(run_file.lines_of([record])),
    }
    if status in ("PASSED", "INCORRECT_NUMERICAL"):
        evaluation["correctness"] = {
            "max_relative_error": _UNKNOWN,
            "max_absolute_error": _UNKNOWN,
            "extra": _checks(record.correctness),
        }
    if record.latency_ms is not None:
        evaluation["performance"] = {"latency_ms": record.latency_ms}
    return evaluation


def _environment(fingerprint: Fingerprint) -> Json:
    versions = {name: getattr(fingerprint, name) for name in _LIBRARIES}
    versions["nsa"] = fingerprint.commit
    return {
        "hardware": fingerprint.device or fingerprint.machine,
        "libs": {name: value for name, value in versions.items() if value is not None},
    }


def _checks(correctness: Correctness | None) -> Json:
    """Errors relative to the size of the truth (Euclidean) beside their budgets, by what was compared."""
    if correctness is None:
        return {"relative_errors": {}}
    checks = {check.name: {"error": check.error, "budget": check.budget} for check in correctness.checks}
    return {"relative_errors": checks}
