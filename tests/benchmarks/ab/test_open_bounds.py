"""How many more pairs meet a bound, worked out beforehand."""

from __future__ import annotations

import dataclasses

import pytest

from benchmarks.ab import calibration, open_bounds
from benchmarks.ab.calibration import Calibration, CalibrationRate, CaseCalibration, ClassRules
from benchmarks.ab.calibration_samples import CalibrationPair
from benchmarks.ab.result import Rules
from harness import repository
from tests.benchmarks import comparisons
from tests.benchmarks.synthetic import FINGERPRINT


@pytest.mark.parametrize(
    ("share", "misses", "needed"), [(0.99, 0, 299), (0.99, 1, 473), (0.99, 2, 628), (0.9, 0, 29), (0.9, 1, 46)]
)
def test_so_many_tests_are_needed(share: float, misses: int, needed: int) -> None:
    """Known sizes of such samples (Clopper and Pearson): 29 and 46 of 90 %, 299, 473 and 628 of 99 %."""
    assert open_bounds.tests_needed(share, misses) == needed
    assert calibration.bounds(needed - misses, needed)[0] >= share
    assert calibration.bounds(needed - 1 - misses, needed - 1)[0] < share


def rate(slowdown: float, tests: int, slower: int) -> CalibrationRate:
    return CalibrationRate(slowdown, slowdown, tests, slower, 0, 0, tests - slower)


def of_gpu(*cases: CaseCalibration, machine: str = "h200") -> Calibration:
    kinds = dict.fromkeys(case.kind for case in cases)
    where = dataclasses.replace(FINGERPRINT, machine=machine)
    return Calibration(where, tuple(ClassRules(kind, Rules()) for kind in kinds), cases, 30, 600.0, "x")


def test_a_bound_that_is_met_is_not_open_and_one_that_is_not_says_what_it_wants() -> None:
    long = CaseCalibration("a", 2.0, 0.001, (rate(0.0, 310, 0), rate(0.01, 60, 60), rate(0.03, 20, 20)), 60)
    short = CaseCalibration("b", 0.5, 0.001, (rate(0.0, 10, 0), rate(0.03, 40, 40)), 120)
    (found,) = open_bounds.find(of_gpu(long, short))
    assert (found.kind, found.slowdown, found.share, found.cases) == (calibration.LONG, 0.03, 0.99, ("a",))
    assert (found.tests, found.misses, found.needed) == (20, 0, 299)
    assert (found.pairs, found.further) == (897, 837), "three pairs a test until now"
    assert "3% found in 99%: 299 tests without a miss are needed, 20 are there: 837 more pairs" in found.text
    missed = dataclasses.replace(long, rates=(*long.rates[:2], rate(0.03, 400, 399)))
    (found,) = open_bounds.find(of_gpu(missed, short))
    assert (found.needed, found.misses) == (473, 1)
    assert "473 tests with no miss beside the 1 are needed" in found.text
    assert open_bounds.find(of_gpu(missed, short, machine="cpu")) == [], "a CPU is to find 3 % in 90 %"


def test_false_alarms_are_counted_over_all_classes() -> None:
    rates = (rate(0.01, 40, 40), rate(0.03, 300, 300))
    long, short = (
        CaseCalibration(name, ms, 0.001, (rate(0.0, 150, 0), *rates), 50) for name, ms in (("a", 2.0), ("b", 0.5))
    )
    assert open_bounds.find(of_gpu(long, short)) == []
    alarmed = dataclasses.replace(short, rates=(rate(0.0, 150, 1), *rates))
    (found,) = open_bounds.find(of_gpu(long, alarmed))
    assert (found.kind, found.cases, found.tests, found.misses, found.needed) == ("all cases", ("a", "b"), 300, 1, 473)
    assert found.pairs == 79, "50 pairs gave 150 tests"


def test_a_pair_of_few_cases_takes_what_is_of_a_pair_and_their_share_of_the_rest() -> None:
    (pair,) = comparisons.calibration_pairs(1, 4, lambda _: 0.0)
    told = dataclasses.replace(pair, seconds=10.0, stages_s={"start": 1.5, "end": 0.5, "samples": 7.0})
    assert open_bounds.pair_s([told], 2) == 2.0 + 4.0
    slow = dataclasses.replace(pair, seconds=90.0)
    assert open_bounds.pair_s([told, told, slow], 4) == 10.0, "the first pair of a session compiles"
    assert open_bounds.pair_s([CalibrationPair("x", 10.0, pair.cases)], 1) == 2.5


def test_no_bound_of_the_h200_is_open() -> None:
    found = calibration.load(repository.ROOT / "results", "h200")
    assert found is not None
    assert open_bounds.find(found) == []
