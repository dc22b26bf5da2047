"""What `compare` answers for one case, and the file it is kept in: results/verdicts/<utc>-<base>-<head>.jsonl.

Every change is HEAD's time over BASE's, less 1: 0.03 is 3 % slower. None is unknown.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import ClassVar

from benchmarks.ab import signed_rank
from benchmarks.cases.key import Key
from benchmarks.cases.outcome import CaseOutcome
from harness import jsonl
from harness.fingerprint import Fingerprint


class CompareVerdict(str, Enum):
    """HEAD beside BASE on one case."""

    FASTER = "FASTER"
    SLOWER = "SLOWER"
    """Seen, and seen again in new processes."""
    SAME = "SAME"
    """No change as large as `Rules.equal_within`."""
    UNDECIDED = "UNDECIDED"
    """Too noisy for the pairs of processes that were allowed, or BASE cannot run it; the reason says which."""
    FAILED = "FAILED"
    """HEAD does not pass this case; the reason holds its outcome."""


@dataclass(frozen=True)
class Rules:
    """When `compare` answers what. `calibrate` sets the first two for a machine."""

    smallest_change: float = 0.01
    """A median change below this is never called faster or slower."""
    equal_within: float = 0.03
    """SAME where the interval lies within this on both sides."""
    plainly_same: float = 0.03
    """SAME before the last interim analysis needs the interval within this too: on a machine that cannot tell 3 % at
    once, further pairs often can."""
    interim_analyses: tuple[int, ...] = (6, 14, 22)
    """After how many pairs of processes the undecided cases are analysed; the first analysis can find no change."""
    false_discovery_rates: tuple[float, ...] = (0.0, 0.04, 0.01)
    """Of each analysis: the share of its calls FASTER and SLOWER that may be false. Together the share of all."""
    largest_p: float = 0.005
    """Of a call FASTER or SLOWER, however few cases share the false discoveries."""
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

    def __post_init__(self) -> None:
        analyses = self.interim_analyses
        if len(analyses) != len(self.false_discovery_rates) or list(analyses) != sorted(set(analyses)):
            raise ValueError(
                "rules.interim_analyses must ascend and have one false_discovery_rates each; got"
                f" {analyses} and {self.false_discovery_rates}"
            )
        if not signed_rank.enough(analyses[0], self.alpha):
            raise ValueError(
                f"rules.interim_analyses must begin with enough pairs for alpha {self.alpha}; got {analyses}"
            )

    @property
    def min_pairs(self) -> int:
        """Pairs of processes before a change can be found."""
        rates = zip(self.interim_analyses, self.false_discovery_rates, strict=True)
        return next(pairs for pairs, rate in rates if rate > 0)

    def same_within(self, pairs: int) -> float:
        """What the interval must lie within on both sides, for SAME after so many pairs of processes."""
        return self.equal_within if pairs == self.interim_analyses[-1] else min(self.equal_within, self.plainly_same)

    def up_to(self, pairs: int) -> Rules:
        """Without the analyses after so many pairs of processes. ValueError where none left can find a change."""
        if pairs < self.min_pairs:
            raise ValueError(f"pairs must be at least {self.min_pairs}, fewer can show nothing; got {pairs}")
        kept = sum(analysis <= pairs for analysis in self.interim_analyses)
        return replace(
            self,
            interim_analyses=self.interim_analyses[:kept],
            false_discovery_rates=self.false_discovery_rates[:kept],
        )


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
    """Why it is UNDECIDED or FAILED; None otherwise."""
    command: str
    """What reproduces it, typed in the repository's root."""
    change: float | None = None
    """Hodges-Lehmann estimate over the pairs of processes (`signed_rank`)."""
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
