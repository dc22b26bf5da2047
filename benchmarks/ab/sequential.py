"""BASE against HEAD on many cases: how many pairs of processes are asked for, and what is answered for each case.

After a few pairs a first look ends what is plainly the same. Everything else is measured again, in new processes: what
looks changed, which the new pairs alone must show again, and what is too noisy to tell. Only the last look calls the
same what this machine cannot tell apart. At each later look the signed-rank p-values of all cases go through Benjamini
and Hochberg's procedure, so that the share of false calls is bounded however many cases there are; stopping early where
nothing is found makes it smaller only. Each later look has its own share of that bound. What no look has decided stays
UNDECIDED, and says so.

`play` knows no clocks and no processes: `compare` gives it rounds that are measured, `calibrate` rounds from its bank.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from benchmarks.ab import signed_rank
from benchmarks.ab.result import Rules, Verdict
from benchmarks.history.records import FAULTS, Outcome


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

    base: Outcome
    head: Outcome
    reason: str

    @property
    def verdict(self) -> Verdict:
        """FAILED where HEAD is at fault, or cannot do what BASE can."""
        failed = self.head in FAULTS or (self.base is Outcome.PASSED and self.head is not Outcome.PASSED)
        return Verdict.FAILED if failed else Verdict.UNDECIDED


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
    """What is known of one case; grows while the contest goes on."""

    case: str
    pairs: list[PairTiming] = field(default_factory=list)
    stopped: PairFailure | None = None
    verdict: Verdict = Verdict.UNDECIDED
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
    """One answer per case, in order."""
    answers = [CaseResult(case) for case in cases]
    extend(answers, measure, rules)
    return answers


def extend(answers: Sequence[CaseResult], measure: MeasurePair, rules: Rules) -> None:
    """Play for answers that somebody holds, so that an exception out of `measure` leaves what was found until then."""
    for pairs, rate in zip(rules.looks, rules.false_discovery_rates, strict=True):
        while waiting := [answer for answer in answers if _is_open(answer) and len(answer.pairs) < pairs]:
            _measure(waiting, measure)
        discoveries = signed_rank.benjamini_hochberg([answer.p_value for answer in answers], rate)
        for answer, discovered in zip(answers, discoveries, strict=True):
            if _is_open(answer):
                _interim_analysis(answer, discovered, rules)


def _is_open(answer: CaseResult) -> bool:
    return answer.verdict is Verdict.UNDECIDED and answer.stopped is None


def _measure(answers: Sequence[CaseResult], measure: MeasurePair) -> None:
    """One new pair for these cases."""
    found = measure([answer.case for answer in answers])
    for answer in answers:
        result = found[answer.case]
        if isinstance(result, PairTiming):
            answer.pairs.append(result)
        else:
            answer.stopped, answer.verdict, answer.reason = result, result.verdict, result.reason


def _interim_analysis(answer: CaseResult, discovered: bool, rules: Rules) -> None:
    effect = answer.effect(rules)
    assert effect is not None, "Rules holds each look to enough pairs"
    low, high = effect.interval
    within = rules.same_within(len(answer.pairs))
    looks_changed = abs(effect.change) >= rules.smallest_change and low * high > 0
    if discovered and answer.p_value <= rules.largest_p and _seen_again(answer, effect, rules):
        answer.verdict, answer.reason = Verdict.SLOWER if effect.change > 0 else Verdict.FASTER, None
    elif -within <= low and high <= within and not looks_changed:
        answer.verdict, answer.reason = Verdict.SAME, None
    else:
        answer.reason = (
            f"{len(answer.pairs)} pairs of processes leave it between {low:+.1%} and {high:+.1%}"
            f" (p = {answer.p_value:.2g})"
        )


def _seen_again(answer: CaseResult, effect: Effect, rules: Rules) -> bool:
    """Whether the pairs since the first look alone show a change to the same side."""
    new = signed_rank.pseudomedian([pair.log_ratio for pair in answer.pairs[rules.looks[0] :]])
    return math.copysign(1, effect.change) * math.expm1(new) >= rules.smallest_change
