"""What `compare` answers for one case, and the file it is kept in: results/verdicts/<utc>-<base>-<head>.jsonl.

Every change is HEAD's time over BASE's, less 1: 0.03 is 3 % slower. None is unknown.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import ClassVar

from benchmarks import peak_memory
from benchmarks.ab.moderated import UNKNOWN, NoisePrior
from benchmarks.cases.key import Key
from benchmarks.cases.outcome import CaseOutcome
from benchmarks.peak_memory import MemoryVerdict
from harness import jsonl
from harness.fingerprint import Fingerprint


class CompareVerdict(str, Enum):
    """HEAD beside BASE on one case."""

    FASTER = "FASTER"
    SLOWER = "SLOWER"
    """Seen, and seen again by other pairs of processes."""
    SAME = "SAME"
    """No change as large as `Rules.equal_within`, or the same instructions on the device."""
    UNDECIDED = "UNDECIDED"
    """Too noisy for the pairs of processes that were allowed, or BASE cannot run it; the reason says which."""
    FAILED = "FAILED"
    """HEAD does not pass this case; the reason holds its outcome."""


@dataclass(frozen=True)
class Rules:
    """When `compare` answers what of one case. `calibrate` sets the first three for a class of cases on a machine."""

    smallest_change: float = 0.01
    """A mean change below this is never called faster or slower."""
    equal_within: float = 0.03
    """SAME where the interval lies within this on both sides."""
    noise: NoisePrior = UNKNOWN
    """Between pairs of processes of identical code."""
    interim_analyses: tuple[int, ...] = (3, 6, 12)
    """After how many pairs of processes the undecided cases are analysed."""
    largest_p: float = 0.0005
    """Of a call FASTER or SLOWER at one analysis: 100 cases give one false call in seven comparisons at most."""
    alpha: float = 0.05
    """Two-sided error of an interval."""
    min_samples: int = 6
    """Of each process of a pair on a case, interleaved; an even number."""
    max_samples: int = 40
    target_standard_error: float = 0.015
    """Of a pair's log-ratio: at this one the sampling stops before `max_samples`."""

    OLD_NAMES: ClassVar[Mapping[str, str]] = {
        "looks": "interim_analyses",
        "turns": "min_samples",
        "most_turns": "max_samples",
        "turn_precision": "target_standard_error",
    }
    FORMER_FIELDS: ClassVar[frozenset[str]] = frozenset({"plainly_same", "false_discovery_rates"})

    def __post_init__(self) -> None:
        if not (0 < self.alpha < 1 and 0 < self.largest_p < 1):
            raise ValueError(f"rules.alpha and largest_p must be between 0 and 1; got {self.alpha}, {self.largest_p}")
        if self.smallest_change < 0 or self.equal_within <= 0:
            raise ValueError(
                "rules.smallest_change must be 0 or more and equal_within above 0; got"
                f" {self.smallest_change}, {self.equal_within}"
            )
        analyses = self.interim_analyses
        if not analyses or list(analyses) != sorted(set(analyses)) or analyses[0] < 2:
            raise ValueError(f"rules.interim_analyses must ascend from two pairs or more; got {analyses}")

    @classmethod
    def of_device(cls, device: str) -> Rules:
        """The defaults; on a GPU fewer samples tell as much."""
        return cls(min_samples=4) if device == "cuda" else cls()

    def up_to(self, pairs: int) -> Rules:
        """Without the analyses after so many pairs of processes. ValueError where none is left."""
        kept = tuple(analysis for analysis in self.interim_analyses if analysis <= pairs)
        if not kept:
            raise ValueError(
                f"--pairs must be at least {self.interim_analyses[0]}, fewer can show nothing; got {pairs}"
            )
        return replace(self, interim_analyses=kept)


@dataclass(frozen=True)
class Side:
    """One of the two versions of nsa/."""

    ref: str
    """As asked for: "main", "HEAD~3", "working tree"."""
    commit: str | None
    """None of a working tree without git."""
    dirty: bool | None
    """Whether nsa/ differs from the commit."""
    nsa_sha256: str


@dataclass(frozen=True)
class ComparisonResult:
    """What `compare` says of one case."""

    utc: str
    """When the comparison began: what its results have in common."""
    base: Side
    head: Side
    fingerprint: Fingerprint
    key: Key
    rules: Rules
    verdict: CompareVerdict
    reason: str | None
    """Why it is UNDECIDED or FAILED, or needed no measuring; None otherwise."""
    command: str
    """What reproduces it, typed in the repository's root."""
    change: float | None = None
    """Mean over the pairs of processes (`moderated`)."""
    interval: tuple[float, float] | None = None
    """Where it lies with `1 - rules.alpha`."""
    detectable: float | None = None
    """The smallest change that could have been seen in these pairs."""
    p_value: float | None = None
    """The probability that identical code seems as changed as this."""
    base_ms: float | None = None
    """Median over the processes."""
    head_ms: float | None = None
    changes: tuple[float, ...] = ()
    """Each pair of processes, in the order measured."""
    base_outcome: CaseOutcome | None = None
    head_outcome: CaseOutcome | None = None
    peaks_mib: tuple[float, float] | None = None
    """Peak memory of a call of BASE and of HEAD; None on a CPU, and in earlier results."""
    same_device_code: bool = False
    """Whether it was not measured, because both versions launch the same instructions (`device_code`)."""

    @property
    def memory(self) -> MemoryVerdict | None:
        """Whether HEAD needs more memory, or less; None where it is not known."""
        source = peak_memory.GRAPH if self.key.replays else peak_memory.CUDA
        return None if self.peaks_mib is None else peak_memory.judge(*self.peaks_mib, source)


def path(results: Path, utc: str, base: Side, head: Side) -> Path:
    """The file of one comparison."""
    names = (side.commit[:10] if side.commit and not side.dirty else side.nsa_sha256[:10] for side in (base, head))
    return results / "verdicts" / ("-".join([jsonl.compact_utc(utc), *names]) + ".jsonl")


def read(results: Path) -> tuple[list[ComparisonResult], list[str]]:
    """Every result, oldest comparison first, and every line that is none."""
    found: list[ComparisonResult] = []
    damaged: list[str] = []
    for file in sorted((results / "verdicts").glob("*.jsonl")):
        results_of_file, wrong = jsonl.read(file, ComparisonResult)
        found += results_of_file
        damaged += wrong
    return found, damaged
