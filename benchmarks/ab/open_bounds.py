"""Which bounds of a calibration still miss what is wanted, and how many more pairs of which cases would meet them.

A bound is missed for want of tests, or for errors among them: without a miss 299 tests show a share of 99 % with 95 %
confidence, with one 473. The number of pairs is worked out beforehand and then measured to the end: whoever stops as
soon as the rates look good publishes bounds that are too good.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.ab import calibration, stages
from benchmarks.ab.calibration import FALSE_ALARMS, Calibration, CalibrationRate
from benchmarks.ab.calibration_samples import CalibrationPair
from harness import machines

_ALL = "all cases"
_LONG_ON_A_GPU = {0.03: 0.99, 0.01: 0.9}
_ELSEWHERE = {0.03: 0.9}


@dataclass(frozen=True)
class OpenBound:
    """One bound that is not met yet."""

    cases: tuple[str, ...]
    """Whose pairs would meet it."""
    kind: str
    """Their class, or "all cases"."""
    slowdown: float
    """0.0: identical code."""
    share: float
    """Of the tests that must be right."""
    tests: int
    """That are there."""
    misses: int
    """Among them."""
    needed: int
    """Tests that meet the bound if no further one is a miss."""
    pairs: int
    """That each of these cases is to have for so many tests, at the pairs that a test has taken until now."""
    further: int
    """The most that one of them lacks."""

    @property
    def text(self) -> str:
        """ "1 ms and more, 3 % found in 99 %: 299 tests without a miss are needed, 49 are there: ..."."""
        what = f"{self.slowdown:.0%} found in {self.share:.0%}" if self.slowdown else f"no alarm in {self.share:.0%}"
        missed = "without a miss" if not self.misses else f"with no miss beside the {self.misses}"
        return (
            f"{self.kind}, {what}: {self.needed} tests {missed} are needed, {self.tests} are there: {self.further} more"
            f" pairs of these {len(self.cases)} cases"
        )


def goals(machine: str, kind: str) -> Mapping[float, float]:
    """Which share of each slowdown is to be found on the cases of a class."""
    return _ELSEWHERE if machine == machines.CPU or kind == calibration.SHORT else _LONG_ON_A_GPU


def tests_needed(share: float, misses: int) -> int:
    """The fewest tests, so many of them misses, whose one-sided 95 % bound reaches the share."""
    fewest, enough = misses, misses + 1
    while calibration.bounds(enough - misses, enough)[0] < share:
        fewest, enough = enough, 2 * enough
    while enough - fewest > 1:
        middle = (fewest + enough) // 2
        if calibration.bounds(middle - misses, middle)[0] < share:
            fewest = middle
        else:
            enough = middle
    return enough


def find(of: Calibration) -> list[OpenBound]:
    """Those that the calibration misses: of each class what is to be found, and of all cases together false alarms."""
    found = list[OpenBound]()
    for one in of.classes:
        names = [case.case for case in of.cases if case.kind == one.name]
        by_level = {rate.slowdown: rate for rate in of.rates(one.name)}
        for slowdown, share in goals(of.fingerprint.machine, one.name).items():
            if rate := by_level.get(slowdown):
                found += _missed(of, one.name, names, rate, share, rate.comparisons - rate.slower)
    identical = [of.rates(one.name)[0] for one in of.classes]
    pooled = calibration.pooled(identical)
    every = [case.case for case in of.cases]
    return [*found, *_missed(of, _ALL, every, pooled, 1 - FALSE_ALARMS, pooled.slower + pooled.faster)]


def _missed(
    of: Calibration, kind: str, names: Sequence[str], rate: CalibrationRate, share: float, misses: int
) -> Iterator[OpenBound]:
    """The bound, unless these tests meet it. Only cases into which the slowdown can be injected count."""
    cases = [
        case
        for case in of.cases
        if case.case in names and any(one.slowdown == rate.slowdown and one.comparisons for one in case.rates)
    ]
    needed = tests_needed(share, misses)
    if not cases or rate.comparisons >= needed:
        return
    there = [of.pairs if case.pairs is None else case.pairs for case in cases]
    pairs = math.ceil(needed * sum(there) / rate.comparisons / len(cases))
    yield OpenBound(
        tuple(case.case for case in cases),
        kind,
        rate.slowdown,
        share,
        rate.comparisons,
        misses,
        needed,
        pairs,
        max(0, pairs - min(there)),
    )


def pair_s(pairs: Sequence[CalibrationPair], cases: int) -> float:
    """What a pair of so many cases may take, from the median of those measured: of a pair that does not tell its stages
    all seconds are taken for its cases', which is too little where fewer are asked for."""
    return statistics.median(_pair_s(pair, cases) for pair in pairs)


def _pair_s(pair: CalibrationPair, cases: int) -> float:
    once = sum(pair.stages_s.get(name, 0.0) for name in stages.ONCE)
    return once + max(0.0, pair.seconds - once) * cases / len(pair.cases)
