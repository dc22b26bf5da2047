"""Summaries of tests, results/laws/*.json, as `conversion.summarize_junit` makes them: held to their types and read.

A summary may come from another machine, so that a count that is none is refused here and reaches no page.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from harness import schema

FOLDER = "laws"
NAME = re.compile(
    r"(?P<machine>[a-z0-9][a-z0-9-]*?)-(?P<day>\d{8})-(?P<commit>[0-9a-f]{7,40})-(?P<what>.+?)"
    r"(-forced-sm(?P<forced>\d+)(-(?P<memory_gb>\d+)gb)?)?",
    re.ASCII,
)
"""What a summary's name says, without .json: where and when it ran, of which commit, and what."""
MOST_TESTS = 1_000_000
"""Of one summary; a larger count is no count of tests."""


@dataclass(frozen=True)
class OutcomeCounts:
    """How many tests ended how."""

    passed: int = 0
    failed: int = 0
    skipped: int = 0

    def __post_init__(self) -> None:
        for name, count in vars(self).items():
            if not 0 <= count <= MOST_TESTS:
                raise ValueError(f"{name} must be from 0 to {MOST_TESTS}; got {count}")

    @property
    def tried(self) -> int:
        """Without those that were skipped."""
        return self.passed + self.failed


@dataclass(frozen=True)
class LawSummary:
    """What is read of one summary."""

    counts: OutcomeCounts
    """Of all tests."""
    utc: str
    """When they ran, ISO 8601; "" where the file does not say."""
    architectures: Mapping[str, OutcomeCounts]
    """What the compiler accepted, by architecture: "86"."""
    failures: Sequence[str] = ()
    """The tests that failed, "FILE::TEST"."""
    files: Mapping[str, OutcomeCounts] = field(default_factory=dict)
    """Of each file of tests."""

    @property
    def compile_only(self) -> bool:
        """Whether most of its tests compiled for an architecture that need not be there: nothing ran."""
        return 2 * sum(counts.tried for counts in self.architectures.values()) > self.counts.tried

    def shows_passed(self, test: str, failed: LawSummary) -> bool:
        """Whether a test passed here that an earlier summary names among its failures.

        Names of tests that pass are not kept. So it is held to have passed where it is none of the failures, and its
        file ran at least as many tests and left out no more.
        """
        file, _, name = test.partition("::")
        file = file or name  # a file that could not be imported
        ran, before = self.files.get(file), failed.files.get(file)
        if test in self.failures or ran is None or not ran.passed:
            return False
        return before is None or (ran.tried >= before.tried and ran.skipped <= before.skipped)


_COUNTED = ("passed", "failed", "skipped")


def decode(content: bytes) -> LawSummary:
    """A summary from its file's bytes. Raises ValueError saying what is wrong with it."""
    try:
        data = json.loads(content.decode())
        if not isinstance(data, dict):
            raise TypeError(f"a summary must be a JSON object; got {type(data).__name__}")
        if missing := [name for name in ("passed", "failed") if name not in data]:
            raise ValueError(f"a summary must have {missing[0]!r}")
        counts = schema.build(OutcomeCounts, {name: data[name] for name in _COUNTED if name in data}, "summary")
        return LawSummary(
            counts,
            _utc(data.get("utc")),
            _counts(data, "architectures"),
            _failures(data.get("failures", [])),
            _counts(data, "files"),
        )
    except (TypeError, RecursionError) as error:
        raise ValueError(str(error)) from error


def require_sound(content: bytes) -> None:
    """Raises ValueError for what is no summary, or names other failures than it counts."""
    failed, failures = decode(content).counts.failed, json.loads(content).get("failures", [])
    if not isinstance(failures, list) or len(failures) != failed:
        raise ValueError(f"failures must name each of the {failed} tests that failed; got {failures!a:.80}")


def read_all(results: Path) -> dict[str, LawSummary]:
    """Every summary under results/laws by its file's name; a file that is none is left out."""
    found = {}
    for path in sorted((results / "laws").glob("*.json")):
        try:
            found[path.name] = decode(path.read_bytes())
        except (OSError, ValueError):
            continue
    return found


def own(summaries: Mapping[str, LawSummary]) -> dict[str, LawSummary]:
    """Those of GPUs that ran their own kernels."""
    names = {name: NAME.fullmatch(Path(name).stem) for name in summaries}
    return {name: one for name, one in summaries.items() if not ((found := names[name]) and found["forced"])}


def newest(summaries: Mapping[str, LawSummary]) -> str | None:
    """The name of the newest of those with at least half of the tests of the largest: a few prove little.

    Those that only compiled are left out; None where no other is there.
    """
    ran = _ran(summaries)
    most = max((one.counts.tried for one in ran.values()), default=0)
    enough = [name for name, one in ran.items() if 2 * one.counts.tried >= most]
    return max(enough, key=lambda name: (ran[name].utc, name), default=None)


def not_passed_since(summaries: Mapping[str, LawSummary]) -> list[tuple[str, str]]:
    """(test, name of the newest summary in which it failed) of each that no later one of its machine shows passed.

    Of however few tests a summary is, its failures count. Those that only compiled are left out, as in `newest`.
    """
    ran, failing = _ran(summaries), dict[tuple[Any, str], str]()
    for name in sorted(ran, key=lambda name: (ran[name].utc, name)):
        here = _machine(name)
        for machine, test in list(failing):
            if machine == here and ran[name].shows_passed(test, ran[failing[machine, test]]):
                del failing[machine, test]
        failing |= {(here, test): name for test in ran[name].failures}
    return [(test, name) for (_, test), name in failing.items()]


def _ran(summaries: Mapping[str, LawSummary]) -> dict[str, LawSummary]:
    return {name: one for name, one in summaries.items() if not one.compile_only}


def _machine(name: str) -> tuple[str | Any, ...]:
    """Of a summary's file, and what it was forced to."""
    found = NAME.fullmatch(Path(name).stem)
    return found.group("machine", "forced", "memory_gb") if found else ()


def _utc(value: Any) -> str:
    if value is None:
        return ""
    if not isinstance(value, str):
        raise TypeError(f"utc must be a str; got {type(value).__name__}")
    datetime.fromisoformat(value.replace("Z", "+00:00"))
    return value


def _counts(data: Mapping[str, Any], name: str) -> dict[str, OutcomeCounts]:
    value = data.get(name, {})
    if not isinstance(value, dict):
        raise TypeError(f"{name} must be a JSON object; got {type(value).__name__}")
    return {key: schema.build(OutcomeCounts, counts, f"{name}.{key}") for key, counts in value.items()}


def _failures(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(test, str) for test in value):
        raise TypeError(f"failures must be a list of names; got {value!a:.80}")
    return tuple(value)
