"""The exact statistics, the course of a group-sequential test, and how often it is wrong under noise that is known."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from benchmarks.ab import sequential, signed_rank
from benchmarks.ab.result import CompareVerdict, Rules
from benchmarks.ab.sequential import PairFailure, PairTiming
from benchmarks.cases.outcome import CaseOutcome

RULES = Rules()
Noise = Callable[[random.Random], float]


def timed(log_ratio: float) -> PairTiming:
    return PairTiming(10.0, 10.0 * math.exp(log_ratio), log_ratio)


class Script:
    """Gives each case its log-ratios in turn, the last one for ever, and notes what was asked for."""

    def __init__(self, **ratios: Sequence[float] | PairFailure) -> None:
        self._ratios = ratios
        self._measured: Counter[str] = Counter()
        self.asked: list[list[str]] = []

    def __call__(self, cases: Sequence[str]) -> Mapping[str, PairTiming | PairFailure]:
        self.asked.append(list(cases))
        found = {case: self._next(case) for case in cases}
        self._measured.update(cases)
        return found

    def _next(self, case: str) -> PairTiming | PairFailure:
        ratios = self._ratios[case]
        if isinstance(ratios, PairFailure):
            return ratios
        return timed(ratios[min(self._measured[case], len(ratios) - 1)])

    def play(self, rules: Rules = RULES) -> dict[str, sequential.CaseResult]:
        return {answer.case: answer for answer in sequential.run(list(self._ratios), self, rules)}


def test_p_values_and_intervals_are_exact() -> None:
    """Counted over all 2^n ways to sign the ranks."""
    values = [0.3, -0.1, 0.7, 0.5, -0.2, 0.9, 1.1]
    order = sorted(values, key=abs)
    seen = sum(rank for rank, value in enumerate(order, 1) if value < 0)
    ways = [sum(itertools.compress(range(1, 8), signs)) for signs in itertools.product((0, 1), repeat=7)]
    assert signed_rank.p_value(values) == 2 * sum(way <= seen for way in ways) / 2**7
    assert signed_rank.p_value([-value for value in values]) == signed_rank.p_value(values)
    found = signed_rank.hodges_lehmann([3.0, 1.0, 2.0, 6.0, 5.0, 4.0], alpha=0.05)
    assert (found.value, found.low, found.high) == (3.5, 1.0, 6.0)


@pytest.mark.parametrize("shift", [0.0, 0.4, 1.0, 2.0])
def test_the_interval_excludes_what_the_test_refuses(shift: float) -> None:
    r = random.Random(1)
    for _ in range(50):
        values = [r.gauss(shift, 1.0) for _ in range(12)]
        found = signed_rank.hodges_lehmann(values, 0.05)
        assert (found.low > 0 or found.high < 0) is (signed_rank.p_value(values) <= 0.05)


def test_few_values_show_nothing() -> None:
    assert [signed_rank.p_value([0.1] * n) for n in (1, 5, 6, 14)] == [1.0, 2**-4, 2**-5, 2**-13]
    assert signed_rank.p_value([]) == signed_rank.p_value([0.0] * 9) == 1.0
    assert (signed_rank.enough(5, 0.05), signed_rank.enough(6, 0.05)) == (False, True)
    with pytest.raises(ValueError, match=r"values must be enough for an interval with alpha 0.05; got 5"):
        signed_rank.hodges_lehmann([0.0] * 5, alpha=0.05)


def test_false_discoveries_are_bounded_step_by_step() -> None:
    assert signed_rank.benjamini_hochberg([0.04, 0.01, 0.03, 0.5], 0.05) == [False, True, False, False]
    assert signed_rank.benjamini_hochberg([0.02, 0.01, 0.03, 0.5], 0.05) == [True, True, True, False]
    assert signed_rank.benjamini_hochberg([], 0.05) == []


def test_what_seems_changed_is_measured_again_and_what_is_the_same_is_not() -> None:
    script = Script(slow=[0.1], fast=[-0.1], same=[0.001, -0.001])
    answers = script.play()
    assert [answer.verdict for answer in answers.values()] == [
        CompareVerdict.SLOWER,
        CompareVerdict.FASTER,
        CompareVerdict.SAME,
    ]
    assert script.asked == [["slow", "fast", "same"]] * 6 + [["slow", "fast"]] * 8
    assert answers["slow"].p_value == 2**-13


def test_a_machine_that_tells_little_apart_measures_again_before_it_says_same() -> None:
    """Calibrated to 10 %: an interval within 10 % but not within 3 % ends no case before the last interim analysis."""
    rules = dataclasses.replace(RULES, equal_within=0.1)
    script = Script(slow=[0.05] * 5 + [-0.04, 0.05], noisy=[0.04, -0.05] * 11, same=[0.01, -0.01] * 11)
    found = {case: (answer.verdict, len(answer.pairs)) for case, answer in script.play(rules).items()}
    assert found == {
        "slow": (CompareVerdict.SLOWER, 14),
        "noisy": (CompareVerdict.SAME, 22),
        "same": (CompareVerdict.SAME, 6),
    }


def test_a_machine_that_tells_much_apart_says_same_of_nothing_wider() -> None:
    rules = dataclasses.replace(RULES, equal_within=0.01)
    assert len(Script(same=[0.02, -0.02] * 11).play(rules)["same"].pairs) == RULES.interim_analyses[-1]


def test_a_change_that_is_not_seen_again_is_none() -> None:
    luck = Script(luck=[0.1] * 6 + [0.001, 0.002, 0.003, -0.001] * 4).play()["luck"]
    assert luck.p_value < RULES.largest_p
    assert luck.verdict is not CompareVerdict.SLOWER


def test_one_case_alone_needs_strong_evidence_too() -> None:
    ratios = [0.05, 0.06, 0.07, 0.08, 0.09, 0.1, 0.11, 0.12, 0.13, 0.14, 0.15, -0.055, -0.065, -0.12]
    answer = Script(slow=ratios).play(RULES.up_to(14))["slow"]
    assert RULES.largest_p < answer.p_value < RULES.false_discovery_rates[1]
    assert answer.verdict is CompareVerdict.UNDECIDED


def test_a_wild_pair_hides_no_change() -> None:
    for wild in (-1.0, 1.0):
        answer = Script(slow=[0.1] * 7 + [wild] + [0.1]).play()["slow"]
        assert answer.verdict is CompareVerdict.SLOWER
        effect = answer.effect(RULES)
        assert effect is not None
        assert effect.change == pytest.approx(0.105, abs=1e-3)


def test_a_lone_change_among_many_cases_needs_more_evidence_than_one_among_few() -> None:
    ratios = [0.05, 0.06, 0.07, 0.08, 0.09, 0.1, 0.11, 0.12, 0.13, 0.14, 0.15, -0.01, -0.02, -0.04]
    few = Script(slow=ratios, same=[0.0]).play(RULES.up_to(14))["slow"]
    many = Script(slow=ratios, **{f"same{i}": [0.0] for i in range(60)}).play(RULES.up_to(14))["slow"]
    assert few.p_value == many.p_value
    assert (few.verdict, many.verdict) == (CompareVerdict.SLOWER, CompareVerdict.UNDECIDED)


def test_changes_lend_each_other_evidence() -> None:
    ratios = [0.05, 0.06, 0.07, 0.08, 0.09, 0.1, 0.11, 0.12, 0.13, 0.14, 0.15, -0.01, -0.02, -0.04]
    others = {f"slow{i}": [0.1] for i in range(60)}
    assert Script(slow=ratios, **others).play(RULES.up_to(14))["slow"].verdict is CompareVerdict.SLOWER


def test_noise_asks_for_more_pairs_up_to_the_limit_and_then_says_so() -> None:
    script = Script(noisy=[0.1, -0.1] * 11)
    answer = script.play()["noisy"]
    assert answer.verdict is CompareVerdict.UNDECIDED
    assert len(script.asked) == RULES.interim_analyses[-1] == 22
    assert answer.reason == "22 pairs of processes leave it between -9.5% and +10.5% (p = 1)"
    effect = answer.effect(RULES)
    assert effect is not None
    assert effect.detectable == pytest.approx(0.105, abs=1e-3)


@pytest.mark.parametrize("sign", [1, -1])
def test_same_needs_both_ends_of_the_interval(sign: int) -> None:
    assert Script(lopsided=[sign * 0.1, sign * -0.001] * 11).play()["lopsided"].verdict is CompareVerdict.UNDECIDED


def test_more_pairs_can_decide() -> None:
    answer = Script(late=[0.2, -0.2] + [0.001] * 12).play()["late"]
    assert (answer.verdict, len(answer.pairs)) == (CompareVerdict.SAME, 14)


def test_a_change_below_the_smallest_is_none() -> None:
    assert Script(tiny=[0.004]).play()["tiny"].verdict is CompareVerdict.SAME


def test_what_head_cannot_do_fails_and_is_not_measured_again() -> None:
    wrong = PairFailure(CaseOutcome.PASSED, CaseOutcome.INCORRECT, "HEAD INCORRECT: o: error 1e-3")
    both = PairFailure(CaseOutcome.CRASHED, CaseOutcome.CRASHED, "no")
    lost = PairFailure(CaseOutcome.PASSED, CaseOutcome.UNSUPPORTED, "HEAD UNSUPPORTED: heads")
    new = PairFailure(CaseOutcome.CRASHED, CaseOutcome.PASSED, "BASE CRASHED: no such argument")
    script = Script(wrong=wrong, both=both, lost=lost, new=new, same=[0.0])
    answers = script.play()
    assert [answers[case].verdict for case in ("wrong", "both", "lost")] == [CompareVerdict.FAILED] * 3
    assert (answers["new"].verdict, answers["new"].reason) == (CompareVerdict.UNDECIDED, new.reason)
    assert answers["same"].verdict is CompareVerdict.SAME
    assert script.asked[1:] == [["same"]] * 5


def test_what_breaks_after_the_first_analysis_fails() -> None:
    class Breaks(Script):
        def _next(self, case: str) -> PairTiming | PairFailure:
            return (
                timed(0.1)
                if len(self.asked) <= 6
                else PairFailure(CaseOutcome.PASSED, CaseOutcome.CRASHED, "HEAD CRASHED: x")
            )

    answer = Breaks(slow=[0.1]).play()["slow"]
    assert (answer.verdict, answer.reason) == (CompareVerdict.FAILED, "HEAD CRASHED: x")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"interim_analyses": (6, 6), "false_discovery_rates": (0.0, 0.05)}, "rules.interim_analyses must ascend"),
        ({"interim_analyses": (6, 14)}, "one false_discovery_rates each"),
        ({"interim_analyses": (5, 14, 22)}, "enough pairs for alpha 0.05"),
    ],
)
def test_rules_that_contradict_themselves_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Rules(**changes)


def test_rules_up_to_a_number_of_pairs() -> None:
    assert RULES.min_pairs == 14
    assert RULES.up_to(21).interim_analyses == (6, 14)
    assert RULES.up_to(99) == RULES
    with pytest.raises(ValueError, match="pairs must be at least 14, fewer can show nothing; got 13"):
        RULES.up_to(13)


def gauss(r: random.Random) -> float:
    return r.gauss(0.0, 0.012)


def heavy_tails(r: random.Random) -> float:
    return r.gauss(0.0, 0.008) / max(0.1, abs(r.gauss(0.0, 1.0)))


def bursts(r: random.Random) -> float:
    return r.gauss(0.0, 0.008) + r.choice((-1, 1)) * r.uniform(0.1, 0.5) * (r.random() < 0.05)


def two_modes(r: random.Random) -> float:
    return r.choice((-0.04, 0.0, 0.0, 0.04)) + r.gauss(0.0, 0.002)


def simulated(noise: Noise, slowdown: float, seed: int) -> list[sequential.CaseResult]:
    """Twenty cases of identical code, of which the first is slowed down."""
    r, cases = random.Random(seed), [str(i) for i in range(20)]

    def measure(asked: Sequence[str]) -> Mapping[str, PairTiming]:
        return {case: timed(noise(r) + math.log1p(slowdown) * (case == "0")) for case in asked}

    return sequential.run(cases, measure, RULES)


@pytest.mark.parametrize("noise", [gauss, heavy_tails, bursts, two_modes])
def test_identical_code_raises_no_more_false_alarms_than_promised(noise: Noise) -> None:
    verdicts = Counter(answer.verdict for seed in range(150) for answer in simulated(noise, 0.0, seed))
    alarms = verdicts[CompareVerdict.SLOWER] + verdicts[CompareVerdict.FASTER]
    assert alarms / verdicts.total() <= 0.0035  # 5 % of the tests, twenty cases each


@pytest.mark.parametrize(("noise", "slowdown"), [(gauss, 0.03), (heavy_tails, 0.05), (bursts, 0.05), (two_modes, 0.1)])
def test_a_slowdown_is_found(noise: Noise, slowdown: float) -> None:
    found = Counter(simulated(noise, slowdown, seed)[0].verdict for seed in range(60))
    assert found[CompareVerdict.SLOWER] >= 0.9 * 60
    assert found[CompareVerdict.FASTER] == found[CompareVerdict.SAME] == 0
