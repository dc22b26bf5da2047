"""A group-sequential test of BASE against HEAD on many cases: how many pairs of processes, and what they say of each.

After a few pairs a first interim analysis ends what is plainly the same. Everything else is measured again, in new
processes: what seems changed, which the new pairs alone must show again, and what is too noisy to tell. Only the last
analysis calls the same what this machine cannot tell apart. At each later analysis the signed-rank p-values of all
cases go through Benjamini and Hochberg's procedure, so that the share of false calls is bounded however many cases
there are; stopping early where nothing is found makes it smaller only. Each later analysis has its own share of that
bound. What none has decided stays UNDECIDED, and says so.

`run` knows no clocks and no processes: `compare` gives it pairs that are measured, `calibrate` pairs of its samples.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from benchmarks.ab import signed_rank
from benchmarks.ab.result import CompareVerdict, Rules
from benchmarks.cases.outcome import FAULTS, CaseOutcome


@dataclass(frozen=True)
class PairTiming:
    """One case in one pair of processes."""

    base_ms: float
    head_ms: float
    log_ratio: float
    """log(head / base)."""

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


MeasurePair = Callable[[Sequence[str]], Mapping[str, PairTiming | PairFailure]]
"""Measures these cases in one new pair of processes."""


@dataclass(frozen=True)
class Effect:
    """HEAD's time over BASE's, less 1, over all pairs."""

    change: float
    interval: tuple[float, float]
    detectable: float
    """The smallest change that would have moved such an interval off 0, and that is called one."""
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

    @property
    def p_value(self) -> float:
        return signed_rank.p_value([pair.log_ratio for pair in self.pairs])

    def effect(self, rules: Rules) -> Effect | None:
        """What is measured of HEAD beside BASE; None where the pairs are too few."""
        if not signed_rank.enough(len(self.pairs), rules.alpha):
            return None
        found = signed_rank.hodges_lehmann([pair.log_ratio for pair in self.pairs], rules.alpha)
        return Effect(
            math.expm1(found.value),
            (math.expm1(found.low), math.expm1(found.high)),
            max(rules.smallest_change, math.expm1(max(found.high - found.value, found.value - found.low))),
            statistics.median(pair.base_ms for pair in self.pairs),
            statistics.median(pair.head_ms for pair in self.pairs),
        )


def run(cases: Sequence[str], measure: MeasurePair, rules: Rules) -> list[CaseResult]:
    """One result per case, in order."""
    results = [CaseResult(case) for case in cases]
    extend(results, measure, rules)
    return results


def extend(results: Sequence[CaseResult], measure: MeasurePair, rules: Rules) -> None:
    """Test cases that the caller holds, so that an exception out of `measure` leaves what was found until then."""
    for pairs, rate in zip(rules.interim_analyses, rules.false_discovery_rates, strict=True):
        while waiting := [one for one in results if _is_open(one) and len(one.pairs) < pairs]:
            _measure(waiting, measure)
        discoveries = signed_rank.benjamini_hochberg([one.p_value for one in results], rate)
        for one, discovered in zip(results, discoveries, strict=True):
            if _is_open(one):
                _interim_analysis(one, discovered, rules)


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


def _interim_analysis(one: CaseResult, discovered: bool, rules: Rules) -> None:
    effect = one.effect(rules)
    assert effect is not None, "Rules holds each interim analysis to enough pairs"
    low, high = effect.interval
    within = rules.same_within(len(one.pairs))
    seems_changed = abs(effect.change) >= rules.smallest_change and low * high > 0
    if discovered and one.p_value <= rules.largest_p and _seen_again(one, effect, rules):
        one.verdict, one.reason = CompareVerdict.SLOWER if effect.change > 0 else CompareVerdict.FASTER, None
    elif -within <= low and high <= within and not seems_changed:
        one.verdict, one.reason = CompareVerdict.SAME, None
    else:
        one.reason = (
            f"{len(one.pairs)} pairs of processes leave it between {low:+.1%} and {high:+.1%} (p = {one.p_value:.2g})"
        )


def _seen_again(one: CaseResult, effect: Effect, rules: Rules) -> bool:
    """Whether the pairs since the first interim analysis alone show a change to the same side."""
    new = signed_rank.pseudomedian([pair.log_ratio for pair in one.pairs[rules.interim_analyses[0] :]])
    return math.copysign(1, effect.change) * math.expm1(new) >= rules.smallest_change
