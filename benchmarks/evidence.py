"""Bulky evidence in small: JUnit XML of the laws, and the heartbeats of training runs that are kept as records."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

STEPS_PER_LINE = 25
"""Of a training run that is kept."""


def of_junit(path: Path) -> dict[str, Any]:
    """What ran and how it ended: totals, counts per test file, the tests that failed, why others were skipped.

    ValueError where the file is no JUnit XML.
    """
    try:
        suites = ElementTree.parse(path).getroot().iter("testsuite")
        cases = [(suite, case) for suite in suites for case in suite.iter("testcase")]
    except ElementTree.ParseError as error:
        raise ValueError(f"{path} is no JUnit XML: {error}") from error
    if not cases:
        raise ValueError(f"{path} holds no test")
    files: dict[str, Counter[str]] = {}
    reasons: Counter[str] = Counter()
    failed = []
    for _, case in cases:
        name = case.get("classname", "")
        outcome = _outcome(case)
        files.setdefault(name, Counter())[outcome] += 1
        if outcome == "failed":
            failed.append(f"{name}::{case.get('name', '')}")
        if (skipped := case.find("skipped")) is not None:
            reasons[skipped.get("message", "")] += 1
    totals = sum(files.values(), Counter())
    first = cases[0][0]
    return {
        "utc": first.get("timestamp"),
        "seconds": round(sum(float(suite.get("time", 0)) for suite in {suite: None for suite, _ in cases}), 1),
        **{outcome: totals[outcome] for outcome in ("passed", "failed", "skipped")},
        "failures": failed,
        "skipped_because": dict(reasons.most_common()),
        "files": {name: dict(counts) for name, counts in sorted(files.items())},
    }


def _outcome(case: ElementTree.Element) -> str:
    if case.find("failure") is not None or case.find("error") is not None:
        return "failed"
    return "passed" if case.find("skipped") is None else "skipped"


def of_heartbeats(lines: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """A line of JSON for every `STEPS_PER_LINE` steps: the median of each figure that is a number."""
    block: list[Mapping[str, Any]] = []
    for line in lines:
        if "step" not in line:
            continue
        block.append(line)
        if len(block) == STEPS_PER_LINE:
            yield _medians(block)
            block = []
    if block:
        yield _medians(block)


def _medians(block: list[Mapping[str, Any]]) -> str:
    numbers: dict[str, list[float]] = {}
    for line in block:
        for name, value in line.items():
            if type(value) in (int, float) and name not in ("step", "rank"):
                numbers.setdefault(name, []).append(value)
    ends = {"first_step": block[0]["step"], "last_step": block[-1]["step"], "utc": block[-1].get("utc")}
    medians = {name: float(f"{statistics.median(values):.6g}") for name, values in numbers.items()}
    return json.dumps({**ends, **medians}, separators=(",", ":"))
