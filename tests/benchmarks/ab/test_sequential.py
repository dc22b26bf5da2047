"""The course of a group-sequential test, and how often it is wrong under noise that is known."""

from __future__ import annotations

import dataclasses
import math
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import pytest

from benchmarks.ab import moderated, sequential
from benchmarks.ab.moderated import NoisePrior
from benchmarks.ab.result import CompareVerdict, Rules
from benchmarks.ab.sequential import PairFailure, PairTiming
from benchmarks.cases.outcome import CaseOutcome

RULES = Rules()
QUIET = Rules(smallest_change=0.005, equal_within=0.008, noise=NoisePrior(0.0025, 20.0))
"""As of a GPU that was calibrated: pairs differ by 0.25 %."""
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
        results = [sequential.CaseResult(case) for case in self._ratios]
        sequential.extend(results, self, lambda case, base_ms: rules, rules.interim_analyses)
        return {one.case: one for one in results}


def verdicts(answers: Mapping[str, sequential.CaseResult]) -> dict[str, tuple[str, int]]:
    return {case: (answer.verdict.value, len(answer.pairs)) for case, answer in answers.items()}


def test_on_a_machine_whose_noise_is_known_three_pairs_decide() -> None:
    script = Script(slow=[0.010, 0.012, 0.009], fast=[-0.03, -0.031, -0.029], same=[0.001, -0.001, 0.002])
    assert verdicts(script.play(QUIET)) == {"slow": ("SLOWER", 3), "fast": ("FASTER", 3), "same": ("SAME", 3)}
    assert script.asked == [["slow", "fast", "same"]] * 3


def test_where_nothing_is_known_three_pairs_call_no_change() -> None:
    """However well they agree: a process may be in one of two states."""
    script = Script(slow=[0.1, 0.1, 0.1], same=[0.001, -0.001, 0.002])
    assert verdicts(script.play()) == {"slow": ("SLOWER", 6), "same": ("SAME", 3)}
    assert script.asked == [["slow", "same"]] * 3 + [["slow"]] * 3


@pytest.mark.parametrize(("noise", "verdict"), [
    (moderated.UNKNOWN, CompareVerdict.UNDECIDED),
    (NoisePrior(0.004, 1.7), CompareVerdict.SLOWER),
])  # fmt: skip
def test_three_pairs_call_a_large_change_where_little_is_known(noise: NoisePrior, verdict: CompareVerdict) -> None:
    """As below 1 ms on a GPU, where cases differ in their noise."""
    rules = dataclasses.replace(QUIET, noise=noise)
    assert sequential.analyse([timed(x) for x in (0.150, 0.152, 0.149)], rules)[0] is verdict


def test_what_is_calibrated_for_one_percent_does_not_call_it_the_same() -> None:
    assert sequential.analyse([timed(x) for x in (0.0101, 0.0099, 0.0100)], QUIET)[0] is CompareVerdict.SLOWER
    assert verdicts(Script(slow=[0.009, 0.0095, 0.008]).play()) == {"slow": ("SAME", 3)}, "3 % by default"


def test_a_change_that_the_later_pairs_do_not_show_is_none() -> None:
    again = sequential.analyse([timed(0.05), timed(0.05), timed(0.05)], QUIET)
    once = sequential.analyse([timed(0.05), timed(0.004), timed(0.004)], QUIET)
    assert again[0] is CompareVerdict.SLOWER, "seen by three pairs, and again by the later two of them"
    assert once[0] is CompareVerdict.UNDECIDED


def test_one_case_alone_needs_six_pairs() -> None:
    """Three pairs of it cannot tell whether the machine is as quiet as at its calibration; those of three cases can."""
    slow = [0.0101, 0.0099, 0.0100]
    assert verdicts(Script(slow=slow).play(QUIET)) == {"slow": ("SLOWER", 6)}
    same = [0.001, -0.001, 0.0]
    assert verdicts(Script(slow=slow, same=same, as_well=same).play(QUIET))["slow"] == ("SLOWER", 3)


def test_noise_is_learnt_from_the_pairs_too() -> None:
    """A case that varies ten times as much as the calibration's is not called at once."""
    answer = sequential.analyse([timed(x) for x in (0.01, 0.09, 0.05)], QUIET)
    assert answer[0] is CompareVerdict.UNDECIDED


def test_three_pairs_that_contradict_what_is_known_call_no_change() -> None:
    """They are then judged by themselves, and three of unknown noise are too few."""
    loud = NoisePrior(0.0001, 20.0)
    pairs = [timed(x) for x in (0.0499, 0.05, 0.0514)]
    found = sequential.effect(pairs, dataclasses.replace(QUIET, noise=loud))
    assert (found.df, found.p_value < QUIET.largest_p) == (2.0, True)
    assert sequential.analyse(pairs, dataclasses.replace(QUIET, noise=loud))[0] is CompareVerdict.UNDECIDED


def together(cases: int, comparisons: int, times: float, slowdown: float = 0.0) -> Counter[CompareVerdict]:
    """What is answered of cases of one comparison on a machine that is so many times as noisy as at its calibration."""
    found = Counter[CompareVerdict]()
    for seed in range(comparisons):
        r = random.Random(seed)
        results = [sequential.CaseResult(f"case {number}") for number in range(cases)]

        def measure(names: Sequence[str], r: random.Random = r) -> Mapping[str, PairTiming]:
            return {name: timed(r.gauss(math.log1p(slowdown), times * 0.0025)) for name in names}

        sequential.extend(results, measure, lambda case, base_ms: QUIET, QUIET.interim_analyses)
        found.update(one.verdict for one in results)
    return found


@pytest.mark.parametrize("times", [3.0, 5.0])
@pytest.mark.parametrize(("cases", "comparisons"), [(1, 400), (3, 200), (20, 25)])
def test_a_machine_noisier_than_its_calibration_raises_few_false_alarms(
    cases: int, comparisons: int, times: float
) -> None:
    found = together(cases, comparisons, times)
    assert found[CompareVerdict.SLOWER] + found[CompareVerdict.FASTER] <= 0.01 * cases * comparisons


@pytest.mark.parametrize("cases", [1, 3, 20])
def test_on_a_machine_as_it_was_calibrated_no_power_is_lost(cases: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A change of less than three standard deviations of a pair."""
    now = together(cases, 300 // cases, 1.0, 0.007)[CompareVerdict.SLOWER]
    monkeypatch.setattr(moderated, "inflation", lambda cases: moderated.Inflation())
    before = together(cases, 300 // cases, 1.0, 0.007)[CompareVerdict.SLOWER]
    assert now >= before >= 0.88 * 300


def test_a_case_is_judged_by_the_noise_of_all_cases() -> None:
    """Of which a decided one is still part; what it was judged by is told."""
    loud = {f"loud {number}": [0.03, -0.03, 0.0, 0.03, -0.03, 0.0] for number in range(4)}
    answers = Script(lucky=[0.010, 0.012, 0.009], **loud).play(QUIET)
    assert answers["lucky"].verdict is CompareVerdict.UNDECIDED
    assert Script(lucky=[0.010, 0.012, 0.009]).play(QUIET)["lucky"].verdict is CompareVerdict.SLOWER
    rules = answers["lucky"].rules
    assert rules is not None
    assert rules.noise.sd > 5 * QUIET.noise.sd
    assert dataclasses.replace(rules, noise=QUIET.noise) == QUIET


def test_a_wild_pair_hides_no_change_where_the_noise_is_known() -> None:
    for wild in (-1.0, 1.0):
        answer = Script(slow=[0.1, wild, 0.1, 0.101, 0.099, 0.1]).play(QUIET)["slow"]
        assert answer.verdict is CompareVerdict.SLOWER
        effect = answer.effect(QUIET)
        assert effect is not None
        assert effect.change == pytest.approx(0.105, abs=4e-3)


def test_a_change_needs_strong_evidence() -> None:
    pairs = [timed(x) for x in (0.004, 0.012, 0.005, 0.011, 0.013, 0.007)]
    found = sequential.effect(pairs, RULES)
    assert RULES.largest_p < found.p_value < 0.05
    strict = dataclasses.replace(RULES, smallest_change=0.001, equal_within=0.01)
    assert sequential.analyse(pairs, strict)[0] is CompareVerdict.UNDECIDED
    assert sequential.analyse(pairs, dataclasses.replace(strict, largest_p=0.01))[0] is CompareVerdict.SLOWER


def test_noise_asks_for_more_pairs_up_to_the_limit_and_then_says_so() -> None:
    script = Script(noisy=[0.1, -0.1] * 6)
    answer = script.play()["noisy"]
    assert answer.verdict is CompareVerdict.UNDECIDED
    assert len(script.asked) == RULES.interim_analyses[-1] == 12
    assert answer.reason == "12 pairs of processes leave it between -6.4% and +6.9% (p = 1)"
    effect = answer.effect(RULES)
    assert effect is not None
    assert effect.detectable == pytest.approx(0.16, abs=0.01), "what would have been called, beyond the interval"


@pytest.mark.parametrize("sign", [1, -1])
def test_same_needs_both_ends_of_the_interval(sign: int) -> None:
    ratios = [sign * x for x in (0.001, 0.009, 0.005)]
    assert sequential.analyse([timed(x) for x in ratios], QUIET)[0] is CompareVerdict.UNDECIDED


def test_a_change_below_the_smallest_is_none() -> None:
    assert Script(tiny=[0.004]).play()["tiny"].verdict is CompareVerdict.SAME


def test_each_case_has_rules_of_its_own() -> None:
    """As short cases have, which vary more; the time on BASE says which."""
    asked: list[tuple[str, float]] = []

    def rules_of(case: str, base_ms: float) -> Rules:
        asked.append((case, base_ms))
        return QUIET if case == "long" else RULES

    results = [sequential.CaseResult("long"), sequential.CaseResult("short")]
    sequential.extend(results, Script(long=[0.009], short=[0.009]), rules_of, (6,))
    assert [one.verdict.value for one in results] == ["SLOWER", "SAME"]
    assert asked == [("long", 10.0), ("short", 10.0)]


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
    assert script.asked[1:] == [["same"]] * 2


def test_what_breaks_after_the_first_analysis_fails() -> None:
    class Breaks(Script):
        def _next(self, case: str) -> PairTiming | PairFailure:
            return (
                timed(0.1)
                if len(self.asked) <= 3
                else PairFailure(CaseOutcome.PASSED, CaseOutcome.CRASHED, "HEAD CRASHED: x")
            )

    answer = Breaks(slow=[0.1]).play()["slow"]
    assert (answer.verdict, answer.reason) == (CompareVerdict.FAILED, "HEAD CRASHED: x")


@pytest.mark.parametrize("analyses", [(), (6, 6), (12, 6), (1, 6)])
def test_interim_analyses_ascend_from_two_pairs(analyses: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"rules\.interim_analyses must ascend from two pairs or more"):
        Rules(interim_analyses=analyses)


def test_rules_up_to_a_number_of_pairs() -> None:
    assert RULES.up_to(11).interim_analyses == (3, 6)
    assert RULES.up_to(99) == RULES
    with pytest.raises(ValueError, match="pairs must be at least 3, fewer can show nothing; got 2"):
        RULES.up_to(2)


def gauss(r: random.Random) -> float:
    return r.gauss(0.0, 0.012)


def heavy_tails(r: random.Random) -> float:
    return r.gauss(0.0, 0.008) / max(0.1, abs(r.gauss(0.0, 1.0)))


def bursts(r: random.Random) -> float:
    return r.gauss(0.0, 0.008) + r.choice((-1, 1)) * r.uniform(0.1, 0.5) * (r.random() < 0.05)


def two_modes(r: random.Random) -> float:
    return r.choice((-0.04, 0.0, 0.0, 0.04)) + r.gauss(0.0, 0.002)


def simulated(noise: Noise, slowdown: float, rules: Rules, seed: int) -> CompareVerdict:
    """What is answered of one case of identical code that is slowed down."""
    r = random.Random(seed)
    results = [sequential.CaseResult("case")]

    def measure(cases: Sequence[str]) -> Mapping[str, PairTiming]:
        return {case: timed(noise(r) + math.log1p(slowdown)) for case in cases}

    sequential.extend(results, measure, lambda case, base_ms: rules, rules.interim_analyses)
    return results[0].verdict


def calibrated(noise: Noise) -> Rules:
    """As `calibrate` would know the noise: twelve pairs of twenty cases."""
    r = random.Random(0)
    prior = moderated.fit([[noise(r) for _ in range(12)] for _ in range(20)])
    return dataclasses.replace(RULES, smallest_change=0.005, equal_within=0.024, noise=prior)


@pytest.mark.parametrize("known", [False, True], ids=["defaults", "calibrated"])
@pytest.mark.parametrize("noise", [gauss, heavy_tails, bursts, two_modes])
def test_identical_code_raises_no_more_false_alarms_than_promised(noise: Noise, known: bool) -> None:
    rules = calibrated(noise) if known else RULES
    found = Counter(simulated(noise, 0.0, rules, seed) for seed in range(600))
    alarms = found[CompareVerdict.SLOWER] + found[CompareVerdict.FASTER]
    assert alarms <= 4  # three analyses at p = 0.0005 are one alarm in 670; five in 600 would be one chance in 400


@pytest.mark.parametrize(("noise", "slowdown"), [(gauss, 0.03), (heavy_tails, 0.1), (bursts, 0.05), (two_modes, 0.1)])
def test_a_slowdown_is_found(noise: Noise, slowdown: float) -> None:
    rules = calibrated(noise)
    found = Counter(simulated(noise, slowdown, rules, seed) for seed in range(100))
    assert found[CompareVerdict.SLOWER] >= 90
    assert found[CompareVerdict.FASTER] == found[CompareVerdict.SAME] == 0
