"""Rates come out as the noise says, thresholds from other groups than they judge; samples outlive their writer."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.ab import calibration, calibration_samples, result
from benchmarks.ab.calibration import Calibration, CalibrationRate, CaseCalibration, ClassRules
from benchmarks.ab.moderated import NoisePrior
from benchmarks.ab.result import CompareVerdict, Rules
from benchmarks.ab.sequential import PairTiming
from benchmarks.commands import compare
from harness import fingerprint, jsonl, schema
from harness.fingerprint import Fingerprint
from harness.machines import recognise
from tests.benchmarks import comparisons
from tests.benchmarks.synthetic import FINGERPRINT

RULES = Rules()
CASES = 12


def quiet(r: random.Random) -> float:
    return abs(r.gauss(0.0, 0.004))


def shared(r: random.Random) -> float:
    """As on a CPU that others use too."""
    return abs(r.gauss(0.0, 0.025)) + 0.3 * r.random() * (r.random() < 0.05)


def noisy(r: random.Random) -> float:
    return abs(r.gauss(0.0, 0.5))


def rates_of(noise: comparisons.Noise, pairs: int = 48) -> tuple[Rules, dict[float, CalibrationRate]]:
    measured = calibration.timings(comparisons.calibration_pairs(pairs, CASES, noise))
    classes, cases = calibration.calibrate(measured, RULES)
    found = Calibration(FINGERPRINT, classes, cases, pairs, 1.0, "x")
    assert [one.name for one in classes] == [calibration.LONG]
    rules = found.rules("case 0", 50.0)
    assert rules is not None
    assert found.rules("decode/8x2x64/b1/s64/float32/nsa", 50.0) is None, "of another mode"
    return rules, {rate.slowdown: rate for rate in found.rates(calibration.LONG)}


def test_a_gpu_like_machine_finds_one_percent_without_false_alarms() -> None:
    rules, rates = rates_of(quiet)
    assert rates[0.0].comparisons == pytest.approx(CASES * (48 // 3 - 2), rel=0.02), (
        "three pairs say of identical code that it is the same; of each half the last three are too few for a test"
    )
    assert rates[0.0].alarms == 0
    assert rates[0.0].most_alarms < 0.02
    assert min(rates[level].power for level in (0.01, 0.03, 0.1)) >= 0.98
    assert rates[0.03].injected == pytest.approx(0.03, rel=0.1)
    assert (rules.smallest_change, rules.interim_analyses) == (0.005, RULES.interim_analyses)
    assert rules.equal_within == pytest.approx(0.008), "below the 1 % that is found"
    assert rules.noise.sd < 0.004


def test_a_shared_machine_finds_three_percent() -> None:
    rules, rates = rates_of(shared)
    assert rates[0.0].alarms <= 0.01
    assert rates[0.01].power < rates[0.03].power
    assert rates[0.03].power >= 0.8
    assert rates[0.1].power >= 0.95
    assert rules.equal_within >= 0.024


def test_a_noisy_machine_says_so_instead_of_crying_wolf() -> None:
    rules, rates = rates_of(noisy)
    assert rates[0.0].alarms <= 0.01
    assert 0.03 not in rates or rates[0.03].power < 0.3
    assert rules.equal_within == pytest.approx(0.08)


def test_thresholds_that_judge_a_pair_were_fitted_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = calibration.timings(comparisons.calibration_pairs(8, 2, quiet))
    halves = calibration.halves(measured)
    assert [[len(one.pairs) for one in half] for half in halves] == [[4, 4], [4, 4]]
    assert halves[0][0].pairs + halves[1][0].pairs == measured[0].pairs
    fitted_on: list[object] = []
    judged: list[tuple[object, float]] = []

    def fit(some: Sequence[calibration.CaseTimings], rules: Rules) -> Rules:
        fitted_on.append(list(some))
        return dataclasses.replace(rules, smallest_change=len(fitted_on) / 1000)

    def note(one: calibration.CaseTimings, level: float, rules: Rules) -> list[CompareVerdict]:
        judged.append((one, rules.smallest_change))
        return []

    monkeypatch.setattr(calibration, "fit", fit)
    monkeypatch.setattr(calibration, "verdicts", note)
    calibration.calibrate(measured, RULES)
    assert fitted_on == [halves[1], halves[0], measured]
    assert {change for one, change in judged if one in halves[0]} == {0.001}
    assert {change for one, change in judged if one in halves[1]} == {0.002}


def test_no_pair_of_processes_is_in_both_halves_where_cases_have_different_numbers_of_pairs() -> None:
    """Case 0 has 8 pairs that the other has too, and 12 of its own after them."""
    pairs = comparisons.calibration_pairs(20, 2, quiet)
    some = [*pairs[:8], *(dataclasses.replace(pair, cases=pair.cases[:1]) for pair in pairs[8:])]
    first, second = calibration.halves(calibration.timings(some))
    assert [(one.case, one.numbers) for one in first] == [("case 0", tuple(range(7))), ("case 1", tuple(range(7)))]
    assert [(one.case, one.numbers) for one in second] == [("case 0", tuple(range(7, 20))), ("case 1", (7,))]
    for half in (first, second):
        assert all(len(one.pairs) == len(one.numbers) for one in half)
    late = [dataclasses.replace(pairs[0], cases=pairs[0].cases[1:]), *some[8:]]
    first, second = calibration.halves(calibration.timings(late))
    assert ([one.case for one in first], [one.case for one in second]) == (["case 1", "case 0"], ["case 0"])


def test_further_pairs_of_some_cases_are_further_tests_of_these(tmp_path: Path) -> None:
    pairs = comparisons.calibration_pairs(48, 4, quiet)
    some = [*pairs[:24], *(dataclasses.replace(pair, cases=pair.cases[:2]) for pair in pairs[24:])]
    classes, cases = calibration.calibrate(calibration.timings(some), RULES)
    assert [case.pairs for case in cases] == [48, 48, 24, 24]
    assert [case.rates[2].comparisons for case in cases] == [14, 14, 6, 6]
    found = Calibration(FINGERPRINT, classes, cases, 24, 1.0, "x")
    assert found.rates(calibration.LONG)[2].comparisons == 40
    calibration.save(tmp_path, found)
    assert calibration.load(tmp_path, "cpu") == found


def test_a_test_takes_the_pairs_that_it_needs_and_the_next_one_goes_on_behind_them() -> None:
    same, wild = timed(0.001), [timed(x) for x in (0.4, -0.4, 0.3)]
    pairs = [same, same, same, *wild, *wild, same, same, same, same]
    one = calibration.CaseTimings("a", tuple({0.0: pair} for pair in pairs), {0.0: 0.0}, tuple(range(len(pairs))))
    assert calibration.verdicts(one, 0.0, RULES) == ["SAME"], "the second one lacked pairs for its last analysis"
    slower = dataclasses.replace(one, pairs=tuple({0.01: pair} for pair in pairs), injected={0.01: 0.01})
    assert calibration.verdicts(slower, 0.01, RULES) == ["SAME", "UNDECIDED"], "which is a slowdown that was not found"
    few = dataclasses.replace(slower, pairs=slower.pairs[:8])
    assert calibration.verdicts(few, 0.01, RULES) == ["SAME"], "five pairs are too few for a second one"


def timed(log_ratio: float) -> PairTiming:
    return PairTiming(10.0, 10.0, log_ratio)


def test_false_alarms_raise_the_thresholds() -> None:
    """A case whose pairs differ by a constant 0.7 %, as two builds of one source can: 1 % is not asked for any more."""
    pairs = comparisons.calibration_pairs(24, 4, lambda r: r.gauss(0.0, 0.0005))
    one_slower = [
        dataclasses.replace(pair, cases=(_head_slower(pair.cases[0], 1.007), *pair.cases[1:])) for pair in pairs
    ]
    calm, told = (calibration.fit(calibration.timings(some), RULES) for some in (pairs, one_slower))
    assert (calm.smallest_change, calm.equal_within) == (0.005, pytest.approx(0.008))
    assert told.smallest_change >= 0.01
    assert told.equal_within == pytest.approx(0.024)
    assert calibration._over(calibration.timings(one_slower), 0.0, told).alarms == 0.0
    assert calibration._over(calibration.timings(one_slower), 0.0, calm).alarms > calibration.FALSE_ALARMS


def test_noise_is_about_no_change_at_all() -> None:
    pairs = comparisons.calibration_pairs(24, 4, lambda r: r.gauss(0.0, 0.0005))
    slower = [dataclasses.replace(pair, cases=tuple(_head_slower(one, 1.012) for one in pair.cases)) for pair in pairs]
    assert calibration.fit(calibration.timings(slower), RULES).noise.sd == pytest.approx(math.log(1.012), rel=0.05)


def test_thresholds_of_cases_without_an_injected_slowdown_are_the_smallest_without_alarms() -> None:
    measured = calibration.timings(comparisons.calibration_pairs(24, 4, quiet))
    bare = [dataclasses.replace(one, injected={0.0: 0.0}) for one in measured]
    assert calibration.fit(bare, RULES).smallest_change == calibration.SMALLEST_CHANGES[0]


def test_of_thresholds_that_find_as_much_the_largest_is_taken() -> None:
    """0.5 % calls 1 % as surely as 0.25 % does, and identical code less often; 1 % would find half of it."""
    measured = calibration.timings(comparisons.calibration_pairs(24, 4, quiet))
    fitted = calibration.fit(measured, RULES)
    assert fitted.smallest_change == 0.005
    assert calibration._over(measured, 0.01, fitted).power == 1.0
    assert calibration._over(measured, 0.01, dataclasses.replace(fitted, smallest_change=0.01)).power < 0.9


def _head_slower(one: calibration_samples.CaseSamples, factor: float) -> calibration_samples.CaseSamples:
    return dataclasses.replace(one, head_ms=tuple(tuple(factor * x for x in sample) for sample in one.head_ms))


def test_long_and_short_cases_are_judged_apart() -> None:
    pairs = comparisons.calibration_pairs(24, 4, quiet)
    shorter = [
        dataclasses.replace(pair, cases=(*pair.cases[:2], *(_scaled(one, 1e-3) for one in pair.cases[2:])))
        for pair in pairs
    ]
    classes, cases = calibration.calibrate(calibration.timings(shorter), RULES)
    assert [one.name for one in classes] == [calibration.LONG, calibration.SHORT]
    assert [(one.case, one.kind) for one in cases] == [
        ("case 0", calibration.LONG),
        ("case 1", calibration.LONG),
        ("case 2", calibration.SHORT),
        ("case 3", calibration.SHORT),
    ]
    assert (calibration.case_class(1.0), calibration.case_class(0.999)) == (calibration.LONG, calibration.SHORT)


def _scaled(one: calibration_samples.CaseSamples, by: float) -> calibration_samples.CaseSamples:
    head = tuple(tuple(by * x for x in sample) for sample in one.head_ms)
    return dataclasses.replace(one, base_ms=tuple(by * x for x in one.base_ms), head_ms=head)


def test_a_slowdown_that_could_not_be_injected_is_left_out() -> None:
    """On a GPU the shortest kernel takes 2 us: beside a call of 20 us it is 10 %, whatever was wanted."""
    (pair,) = comparisons.calibration_pairs(1, 1, lambda r: 0.0)
    one = pair.cases[0]
    short = dataclasses.replace(one, head_ms=tuple((x[0], x[0] * 1.1, x[0] * 1.1, x[0] * 1.1) for x in one.head_ms))
    (measured,) = calibration.timings([dataclasses.replace(pair, cases=(short,))])
    assert list(measured.injected) == [0.0, 0.1]


def a_calibration(where: Fingerprint = FINGERPRINT) -> Calibration:
    rules = Rules(0.005, 0.008, NoisePrior(0.002, 12.0))
    rates = (CalibrationRate(0.0, 0.0, 200, 1, 1, 190, 8), CalibrationRate(0.03, 0.03, 100, 99, 0, 0, 1))
    cases = (CaseCalibration("a", 2.0, 0.002, rates), CaseCalibration("b", 3.0, 0.002, rates))
    return Calibration(where, (ClassRules(calibration.LONG, rules),), cases, 100, 600.0, "x")


def test_compare_takes_its_thresholds_from_the_machines_calibration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cpu = recognise(None)
    assert compare.rules_for(tmp_path, cpu, 12)("a", 5.0) == RULES
    assert "thresholds: the defaults, which need more pairs; calibrate --gpu cpu" in capsys.readouterr().out
    found = a_calibration(dataclasses.replace(FINGERPRINT, device=fingerprint.device_name(cpu)))
    path = calibration.save(tmp_path, found)
    assert calibration.load(tmp_path, "cpu") == found
    told = compare.rules_for(tmp_path, cpu, 6)
    assert told("a", 1.0) == dataclasses.replace(found.classes[0].rules, interim_analyses=(3, 6))
    assert told("a", 0.9) == RULES.up_to(6), "no short case was calibrated"
    calibration.save(tmp_path, a_calibration())
    assert compare.rules_for(tmp_path, cpu, 12)("a", 5.0) == RULES, "of another processor"
    path.write_text('{"rules": 1}')
    capsys.readouterr()
    assert compare.rules_for(tmp_path, cpu, 12)("a", 5.0) == RULES
    assert "cpu.json is no calibration, or of an earlier rule: " in capsys.readouterr().out


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        json.dumps({"sd": 0.0, "df": 30.0}),
        json.dumps({"sd": 1e300, "df": 1.0}),
        json.dumps({"sd": 0.1, "df": -1.0}),
    ],
    ids=["deep", "no noise", "endless noise", "less than nothing known"],
)
def test_a_calibration_that_was_edited_is_no_calibration(text: str, tmp_path: Path) -> None:
    path = calibration.save(tmp_path, a_calibration())
    good = json.loads(path.read_text())
    if text.startswith("{"):
        good["classes"][0]["rules"]["noise"] = json.loads(text)
        text = json.dumps(good)
    path.write_text(text)
    with pytest.raises(ValueError, match=r"cpu\.json is no calibration, or of an earlier rule"):
        calibration.load(tmp_path, "cpu")


def test_the_rates_of_a_class_are_those_of_its_cases_together() -> None:
    identical, slowed = a_calibration().rates(calibration.LONG)
    assert identical == CalibrationRate(0.0, 0.0, 400, 2, 2, 380, 16)
    assert (identical.alarms, slowed.power) == (0.01, 0.99)
    assert identical.most_alarms == pytest.approx(0.0227, abs=1e-4), "beta.ppf(0.95, 5, 396)"
    assert slowed.least_power == pytest.approx(0.9689, abs=1e-4), "beta.ppf(0.05, 198, 3)"
    assert a_calibration().rates(calibration.SHORT) == ()


def test_files_with_earlier_names_are_read(tmp_path: Path) -> None:
    """Pairs and comparison results of before."""
    (pair,) = comparisons.calibration_pairs(1, 2, quiet)
    _with_earlier_names(calibration_samples.path(tmp_path, "cpu"), pair, {"cases": "taken"})
    assert calibration_samples.read(tmp_path, "cpu", "identity") == ([pair], [])
    found = comparisons.comparison_result(CompareVerdict.SAME)
    file = result.path(tmp_path, found.utc, found.base, found.head)
    names = {
        "interim_analyses": "looks",
        "min_samples": "turns",
        "max_samples": "most_turns",
        "target_standard_error": "turn_precision",
    }
    _with_earlier_names(file, found, names)
    former = '"plainly_same": 0.03, "false_discovery_rates": [0.0, 0.04, 0.01], "looks":'
    file.write_text(file.read_text().replace('"looks":', former))
    assert result.read(tmp_path) == ([found], [])
    with pytest.raises(ValueError, match=r"rules must not have 'looks' beside 'interim_analyses'"):
        schema.build(Rules, {"looks": [6], "interim_analyses": [6]}, "rules")


def _with_earlier_names(path: Path, value: Any, names: Mapping[str, str]) -> None:
    jsonl.append(path, value)
    text = path.read_text()
    for name, earlier in names.items():
        assert f'"{name}":' in text
        text = text.replace(f'"{name}":', f'"{earlier}":')
    path.write_text(text)


def test_a_calibration_that_cannot_be_written_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = a_calibration()
    path = calibration.save(tmp_path, old)

    def full(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="no space left"):
        calibration.save(tmp_path, dataclasses.replace(old, pairs=200))
    assert calibration.load(tmp_path, "cpu") == old
    assert [file.name for file in path.parent.iterdir()] == ["cpu.json"]
