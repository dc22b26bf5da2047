"""A group-sequential test of BASE against HEAD on many cases: how many pairs of processes, and what they say of each.

After a few pairs a first interim analysis ends what is plainly the same and what is plainly changed. Everything else is
measured again, in new processes. A change is called where it is far larger than the noise (`moderated`: what these
pairs show of it, what a calibration knows, and how noisy all cases are today), large enough to matter, and seen again
by the later pairs alone. What no analysis has decided stays UNDECIDED, and says so.

`extend` knows no clocks and no processes: `compare` gives it pairs that are measured, `calibrate` pairs of its samples.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from benchmarks.ab import moderated
from benchmarks.ab.result import CompareVerdict, Rules
from benchmarks.cases.outcome import FAULTS, CaseOutcome


@dataclass(frozen=True)
class PairTiming:
    """One case in one pair of processes."""

    base_ms: float
    head_ms: float
    log_ratio: float
    """log(head / base)."""
    peaks_mib: tuple[float, float] | None = None
    """Peak memory of BASE and of HEAD; None of a pair that was not asked for it."""

    @property
    def change(self) -> float:
        return math.expm1(self.log_ratio)


@dataclass(frozen=True)
class PairFailure:
    """One case that a side could not run; the outcome of the other side is PASSED or also a failure."""

    base: CaseOutcome
    head: CaseOutcome
    reason: str

    @property
    def verdict(self) -> CompareVerdict:
        """FAILED where HEAD is at fault, or cannot do what BASE can."""
        failed = self.head in FAULTS or (self.base is CaseOutcome.PASSED and self.head is not CaseOutcome.PASSED)
        return CompareVerdict.FAILED if failed else CompareVerdict.UNDECIDED


_LEAST_DF = 3.0
"""Of a call FASTER or SLOWER: three pairs of a machine whose noise is not known, which have 2, can agree by chance, as
where a process finds itself in one of two states. With a calibration that knows little they have 3.5 to 4: of 700
overlapping triples of identical code below 1 ms on an H200 none would be called so, nor of 70 on an H100."""

MeasurePair = Callable[[Sequence[str]], Mapping[str, PairTiming | PairFailure]]
"""Measures these cases in one new pair of processes."""
RulesOf = Callable[[str, float], Rules]
"""The rules of a case that takes so many ms on BASE. Their interim analyses are those of all cases."""


@dataclass(frozen=True)
class Effect:
    """HEAD's time over BASE's, less 1, over all pairs."""

    change: float
    interval: tuple[float, float]
    detectable: float
    """The smallest change that would have been called one with this noise."""
    p_value: float
    """The probability that identical code seems as changed as this."""
    df: float
    """Degrees of freedom of that noise: of the pairs, and of the calibration unless they contradict it."""
    base_ms: float
    head_ms: float


@dataclass
class CaseResult:
    """What is known of one case; grows while the test goes on."""

    case: str
    pairs: list[PairTiming] = field(default_factory=list)
    stopped: PairFailure | None = None
    verdict: CompareVerdict = CompareVerdict.UNDECIDED
    reason: str | None = None
    rules: Rules | None = None
    """Of its last analysis, with the noise as it was then; None before the first one."""

    @property
    def base_ms(self) -> float:
        return statistics.median(pair.base_ms for pair in self.pairs)

    @property
    def peaks_mib(self) -> tuple[float, float] | None:
        """Peak memory of BASE and of HEAD: one pair tells it."""
        return next((pair.peaks_mib for pair in self.pairs if pair.peaks_mib is not None), None)

    def effect(self, rules: Rules) -> Effect | None:
        """What is measured of HEAD beside BASE; None where the pairs are too few."""
        return effect(self.pairs, rules) if len(self.pairs) > 1 else None


def effect(pairs: Sequence[PairTiming], rules: Rules) -> Effect:
    """What at least two pairs say of one case."""
    found = moderated.estimate([pair.log_ratio for pair in pairs], rules.noise)
    half = found.half_width(rules.alpha)
    return Effect(
        math.expm1(found.value),
        (math.expm1(found.value - half), math.expm1(found.value + half)),
        max(rules.smallest_change, math.expm1(found.half_width(rules.largest_p))),
        found.p_value,
        found.df,
        statistics.median(pair.base_ms for pair in pairs),
        statistics.median(pair.head_ms for pair in pairs),
    )


def extend(results: Sequence[CaseResult], measure: MeasurePair, rules_of: RulesOf, analyses: Sequence[int]) -> None:
    """Test cases that the caller holds, so that an exception out of `measure` leaves what was found until then."""
    for pairs in analyses:
        while waiting := [one for one in results if _is_open(one) and len(one.pairs) < pairs]:
            _measure(waiting, measure)
        judged = [(one, rules_of(one.case, one.base_ms)) for one in results if one.pairs]
        noise = moderated.inflation([([pair.log_ratio for pair in one.pairs], rules.noise) for one, rules in judged])
        for one, rules in judged:
            if _is_open(one):
                one.rules = replace(rules, noise=noise.of(rules.noise))
                one.verdict, one.reason = analyse(one.pairs, one.rules)


def _is_open(one: CaseResult) -> bool:
    return one.verdict is CompareVerdict.UNDECIDED and one.stopped is None


def _measure(results: Sequence[CaseResult], measure: MeasurePair) -> None:
    """One new pair for these cases."""
    found = measure([one.case for one in results])
    for one in results:
        measured = found[one.case]
        if isinstance(measured, PairTiming):
            one.pairs.append(measured)
        else:
            one.stopped, one.verdict, one.reason = measured, measured.verdict, measured.reason


def analyse(pairs: Sequence[PairTiming], rules: Rules) -> tuple[CompareVerdict, str | None]:
    """One interim analysis of one case: (verdict, why it is UNDECIDED)."""
    found = effect(pairs, rules)
    low, high = found.interval
    seems_changed = abs(found.change) >= rules.smallest_change and low * high > 0
    enough = found.df >= _LEAST_DF
    if found.p_value <= rules.largest_p and seems_changed and enough and _seen_again(pairs, found.change, rules):
        return (CompareVerdict.SLOWER if found.change > 0 else CompareVerdict.FASTER), None
    if -rules.equal_within <= low and high <= rules.equal_within and not seems_changed:
        return CompareVerdict.SAME, None
    return CompareVerdict.UNDECIDED, (
        f"{len(pairs)} pairs of processes leave it between {low:+.1%} and {high:+.1%} (p = {found.p_value:.2g})"
    )


def _seen_again(pairs: Sequence[PairTiming], change: float, rules: Rules) -> bool:
    """Whether the later half of the pairs alone shows a change to the same side."""
    later = statistics.median(pair.log_ratio for pair in pairs[len(pairs) // 2 :])
    return math.copysign(1, change) * math.expm1(later) >= rules.smallest_change
