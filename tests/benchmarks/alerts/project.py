"""A repository, nights of records of its commits, and comparisons between them, without measuring anything."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.ab import checkout, paired_run, result
from benchmarks.ab.checkout import Sources
from benchmarks.ab.result import CompareVerdict, ComparisonResult, Side
from benchmarks.alerts.update import update
from benchmarks.cases.key import Key
from benchmarks.history import accepted, alerts
from benchmarks.history.accepted import Acceptance
from benchmarks.history.alerts import Alert
from harness import fingerprint, jsonl, machines
from tests.benchmarks.comparisons import comparison_result
from tests.benchmarks.repository import Repository
from tests.benchmarks.stored import write
from tests.benchmarks.synthetic import FINGERPRINT, key, passed

DEVICE = fingerprint.device_name(machines.machine("cpu", None))
CASES = tuple(key(length=64 * (number + 1)) for number in range(19))
"""NSA's cases of these projects."""


class Project:
    """One commit a night, each of which changes nsa/, and what a machine measured of it."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.repository = Repository(folder / "repository")
        self.results = folder / "results"
        self.commits: list[str] = []
        monkeypatch.setattr(checkout, "REPOSITORY", self.repository.folder)

    def night(self, *latencies_ms: float, measured: bool = True, cases: Sequence[Key] = CASES) -> str:
        """A commit, and a run of it in which the first cases take so long; the commit's name."""
        commit = self.repository.commit(f"version {len(self.commits)}")
        self.commits.append(commit)
        if measured:
            self.run(commit, *latencies_ms, cases=cases)
        return commit

    def run(self, commit: str, *latencies_ms: float, cases: Sequence[Key] = CASES, dirty: bool = False) -> None:
        """A run of a commit, the next night."""
        nights = sum(1 for _ in (self.results / "runs" / "cpu").glob("*.jsonl"))
        utc = f"2026-{2 + nights // 28:02d}-{1 + nights % 28:02d}T00:00:00.000Z"
        where = dataclasses.replace(FINGERPRINT, utc=utc, commit=commit, device=DEVICE, cpu=DEVICE, dirty=dirty)
        records = [passed(case, ms) for case, ms in zip(cases, latencies_ms, strict=False)]
        write(self.results, *(dataclasses.replace(record, fingerprint=where) for record in records))

    def nights(self, count: int, *latencies_ms: float) -> list[str]:
        """The commits of so many nights at one level."""
        return [self.night(*latencies_ms) for _ in range(count)]

    def compared(
        self, good: str, head: str, verdict: CompareVerdict, case: Key = CASES[0], change: float = 0.1, day: int = 1
    ) -> None:
        """A comparison that was made on that day of June."""
        found = comparison(good, head, verdict, case, change, f"2026-06-{day:02d}T00:00:00.000Z")
        jsonl.append(result.path(self.results, found.utc, found.base, found.head), found)

    def accept(self, case: Key, latency_ms: float, reason: str = "keys are checked now", day: int = 1) -> None:
        """What `accept` writes, on that day of July."""
        utc, who = f"2026-07-{day:02d}T00:00:00.000Z", "A Maintainer <a@example.org>"
        entry = Acceptance(utc, who, reason, "cpu", DEVICE, case.name, latency_ms, self.commits[-1])
        jsonl.append(accepted.path(self.results), entry)

    def update(self, day: int = 1) -> list[str]:
        """The states that the alerts were brought to, on that day of August."""
        return [event.state.value for event in update(self.results, f"2026-08-{day:02d}T00:00:00.000Z")]

    @property
    def alerts(self) -> list[Alert]:
        """Every alert, the newest first; no line is damaged."""
        found, damaged = alerts.read(self.results)
        assert damaged == []
        return found

    @property
    def alert(self) -> Alert:
        """The only one."""
        (found,) = self.alerts
        return found


def comparison(
    good: str, head: str, verdict: CompareVerdict, case: Key, change: float = 0.1, utc: str = FINGERPRINT.utc
) -> ComparisonResult:
    """What `compare` says of one case, with an interval of ±1 %."""
    base, other = (Side(commit, commit, False, commit[:16]) for commit in (good, head))
    return dataclasses.replace(
        comparison_result(verdict),
        utc=utc,
        base=base,
        head=other,
        fingerprint=dataclasses.replace(FINGERPRINT, utc=utc, device=DEVICE),
        key=case,
        reason="too noisy: 2 pairs were allowed" if verdict is CompareVerdict.UNDECIDED else None,
        change=change,
        interval=(change - 0.01, change + 0.01),
    )


def answer_compare(
    monkeypatch: pytest.MonkeyPatch, slow_from: Sequence[str], otherwise: CompareVerdict = CompareVerdict.SAME
) -> list[tuple[str, tuple[str, ...]]]:
    """Replace `compare`: SLOWER for these commits, in every case. What was asked: (commit, cases), in order."""
    asked: list[tuple[str, tuple[str, ...]]] = []

    def measure(
        machine: object, keys: Sequence[Key], base: Sources, head: Sources, rules: object
    ) -> tuple[list[ComparisonResult], bool]:
        assert base.side.commit is not None
        assert head.side.commit is not None
        asked.append((head.side.commit, tuple(one.name for one in keys)))
        verdict = CompareVerdict.SLOWER if head.side.commit in slow_from else otherwise
        utc = f"2026-09-01T00:00:{len(asked):02d}.000Z"
        return [comparison(base.side.commit, head.side.commit, verdict, one, 0.12, utc) for one in keys], False

    monkeypatch.setattr(paired_run, "measure", measure)
    return asked
