"""The record of needle and variable tracking: how often NSA and its dense twin are right after equal training.

results/atlas/tasks/<machine>-<date>-<commit10>.json, never changed once it is written.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import scipy  # its parts take a second, see `ab/moderated.py`

from benchmarks.atlas import record
from harness.fingerprint import Fingerprint

FOLDER = Path(record.FOLDER) / "tasks"
"""Below results/."""
SCHEMA = 1
CONFIDENCE = 0.95
EVIDENCE = 0.5
"""Where neither model is right this often, nothing was learnt that could be compared."""
LESS_OFTEN = "NSA is right less often"
"""A verdict."""


@dataclass(frozen=True)
class TaskScore:
    """One model at one length."""

    right: int
    asked: int
    """Texts, of each one question."""
    loss: float
    """Of the last training steps, nats per answer."""

    def __post_init__(self) -> None:
        if not 0 <= self.right <= self.asked or self.asked < 1:
            raise ValueError(f"right must be between 0 and asked; got {self.right} of {self.asked}")

    @property
    def share(self) -> float:
        return self.right / self.asked

    @property
    def interval(self) -> tuple[float, float]:
        """Of the share, two-sided (Wilson, Journal of the American Statistical Association 22, 1927)."""
        found = scipy.stats.binomtest(self.right, self.asked).proportion_ci(CONFIDENCE, "wilson")
        return float(found.low), float(found.high)


@dataclass(frozen=True)
class TaskResult:
    """One task at one length, asked of both models."""

    task: str
    hops: int
    chains: int
    length: int
    """Tokens of a text."""
    steps: int
    """Optimiser steps of each model up to then."""
    tokens: int
    """Tokens that each was trained on."""
    seed: int
    nsa: TaskScore
    dense: TaskScore

    @property
    def is_evidence(self) -> bool:
        """Whether one of the two has learnt the task."""
        return max(self.nsa.share, self.dense.share) >= EVIDENCE

    @property
    def verdict(self) -> str:
        """In words."""
        if not self.is_evidence:
            return f"no evidence: both below {EVIDENCE:.0%}"
        (nsa_low, nsa_high), (dense_low, dense_high) = self.nsa.interval, self.dense.interval
        if nsa_low > dense_high:
            return "NSA is right more often"
        if nsa_high < dense_low:
            return LESS_OFTEN
        return "no difference seen: the intervals overlap"


@dataclass(frozen=True)
class TaskRecord:
    """One file: one call of `atlas tasks`."""

    schema: int
    fingerprint: Fingerprint
    commit: str | None
    model: Mapping[str, Any]
    """`nsa.model.ModelConfig` as a mapping, with "parameters" of NSA and "parameters_dense" of the twin."""
    chance: float
    """Share that guessing has right."""
    results: tuple[TaskResult, ...]

    def __post_init__(self) -> None:
        if self.schema != SCHEMA:
            raise ValueError(f"schema must be {SCHEMA}; got {self.schema}")
        if not self.results:
            raise ValueError("results must hold at least one")


def write(results: Path, value: TaskRecord) -> Path:
    """Write a new file. Raises OSError if there is no room."""
    return record.write_new(results / FOLDER, record.stem(value.fingerprint), value)


def read_all(results: Path) -> tuple[list[TaskRecord], list[str]]:
    """Every record of tasks below a folder of results, oldest first, and what is wrong with files that are none."""
    return record.read_folder(results / FOLDER, TaskRecord, lambda one: one.fingerprint.utc)
