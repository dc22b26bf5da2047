"""What earlier versions stored, in the current compact form.

Run files of versions 1 and 2: their records, with the samples compressed beside them. JUnit XML of test runs and the
heartbeats of training runs that are kept as records: their summaries.
"""

from __future__ import annotations

import json
import re
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from benchmarks.history import record_line, run_file, samples
from benchmarks.history.records import Record
from benchmarks.history.run_file import DamagedLine
from nsa.io import atomic_write, read_lines


@dataclass(frozen=True)
class Conversion:
    """What came of a file."""

    records: int
    damaged: list[DamagedLine]
    """Lines that could not be read; their numbers are those in the new file."""


def is_old(path: Path) -> bool:
    """Whether the file has records of version 1 or 2 and no run line before them. OSError where it cannot be read."""
    for _, line in read_lines(path):
        if line.startswith(run_file.RUN_PREFIX):
            return False
        if _old(line) is not None:
            return True
    return False


def _old(line: bytes) -> tuple[Record, bytes] | None:
    """The record of a line and its samples in their file's format; None where the line is no such record."""
    try:
        record, raw = record_line.decode_old(line)
    except (ValueError, TypeError, RecursionError):
        return None
    return record, b"" if raw is None else samples.encode_raw(raw)


def convert(path: Path) -> Conversion:
    """Replace an old file by what it holds: first its samples, then the file, each in one step.

    Lines that cannot be read come behind the records, as they stood, and lines of the current format last. OSError
    where the folder cannot be written.
    """
    records: list[Record] = []
    raw: list[bytes] = []
    unread: list[bytes] = []
    current: list[bytes] = []
    for _, line in read_lines(path):
        if current or line.startswith(run_file.RUN_PREFIX):
            current.append(line)
        elif (found := _old(line)) is not None:
            records.append(found[0])
            raw.append(found[1])
        else:
            unread.append(line)
    if any(raw):
        atomic_write(samples.raw_path(path), b"".join(raw))
    lines = [*(line.encode() for line in run_file.lines_of(records)), *unread, *current]
    atomic_write(path, b"".join(line + b"\n" for line in lines))
    return Conversion(len(records), [found for found in run_file.entries(path) if isinstance(found, DamagedLine)])


_COMPILED = re.compile(r"compile::\w+\[(\d{2,3})-", re.ASCII)
"""A test of a file such as test_compile.py whose first parameter is the architecture that it compiles for: 86."""
STEPS_PER_LINE = 25
"""Of a training run that is kept."""
COUNTS = ("tokens_seen", "non_finite_steps", "fallbacks", "attempt", "life")
"""Figures of a heartbeat that only grow; "life" is the attempt in earlier ones."""


def summarize_junit(path: Path) -> dict[str, Any]:
    """What ran and how it ended: totals, counts per test file and per architecture that was compiled for, the tests
    that failed, why others were skipped.

    Where a run was interrupted, pytest writes a case without a name for a test that had not ended: it is not counted.

    ValueError where the file is no JUnit XML.
    """
    try:
        return _junit(ElementTree.parse(path).getroot())
    except (ElementTree.ParseError, LookupError, ValueError) as error:
        raise ValueError(f"{path} is no JUnit XML: {error}") from error


def _junit(root: ElementTree.Element) -> dict[str, Any]:
    suites = list(root.iter("testsuite"))
    cases = [case for suite in suites for case in suite.iter("testcase") if case.get("name")]
    if not cases:
        raise ValueError("it holds no test")
    files: dict[str, Counter[str]] = {}
    architectures: dict[str, Counter[str]] = {}
    reasons: Counter[str] = Counter()
    failed = []
    for case in cases:
        name = case.get("classname", "")
        outcome = _outcome(case)
        files.setdefault(name, Counter())[outcome] += 1
        if compiled := _COMPILED.search(f"{name}::{case.get('name', '')}"):
            architectures.setdefault(compiled[1], Counter())[outcome] += 1
        if outcome == "failed":
            failed.append(f"{name}::{case.get('name', '')}")
        if (skipped := case.find("skipped")) is not None:
            reasons[skipped.get("message", "")] += 1
    totals = sum(files.values(), Counter())
    return {
        "utc": suites[0].get("timestamp"),
        "seconds": round(sum(float(suite.get("time", 0)) for suite in suites), 1),
        **{outcome: totals[outcome] for outcome in ("passed", "failed", "skipped")},
        "failures": failed,
        "skipped_because": dict(reasons.most_common()),
        "architectures": {name: dict(counts) for name, counts in architectures.items()},
        "files": {name: dict(counts) for name, counts in sorted(files.items())},
    }


def _outcome(case: ElementTree.Element) -> str:
    if case.find("failure") is not None or case.find("error") is not None:
        return "failed"
    return "passed" if case.find("skipped") is None else "skipped"


def summarize_heartbeats(lines: Iterable[Mapping[str, Any]]) -> list[str]:
    """Lines of JSON: every event as it was, and for every `STEPS_PER_LINE` steps the median of each measured figure.

    Of a step that was taken again after a resume the last time counts; of what is counted or is no number, the last.
    """
    events: list[str] = []
    steps: dict[int, Mapping[str, Any]] = {}
    for line in lines:
        if "event" in line:
            events.append(json.dumps(line, allow_nan=False, separators=(",", ":")))
        elif "step" in line:
            steps[line["step"]] = line
    taken = [steps[number] for number in sorted(steps)]
    blocks = [taken[first : first + STEPS_PER_LINE] for first in range(0, len(taken), STEPS_PER_LINE)]
    return [*map(_medians, blocks), *events]


def _medians(block: Sequence[Mapping[str, Any]]) -> str:
    found: dict[str, list[Any]] = {}
    for line in block:
        for name, value in line.items():
            if value is not None and name not in ("step", "rank"):
                found.setdefault(name, []).append(value)
    ends = {"first_step": block[0]["step"], "last_step": block[-1]["step"]}
    figures = {name: _median(values) if _measured(name, values) else values[-1] for name, values in found.items()}
    return json.dumps({**ends, **figures}, allow_nan=False, separators=(",", ":"))


def _measured(name: str, values: Sequence[Any]) -> bool:
    return name not in COUNTS and all(type(value) in (int, float) for value in values)


def _median(values: Sequence[float]) -> float:
    return float(f"{statistics.median(values):.6g}")
