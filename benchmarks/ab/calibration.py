"""How often `compare` is right on a machine, from pairs of processes in which the slowdown is known.

The pairs of a case are taken in order: a test uses as many of them as it needs for its answer, the next test begins
behind it, so that no pair is in two tests of one size of slowdown. What the rules need to know (the noise between
pairs, the smallest change to call, the margin of SAME) is fitted on one half of the pairs and judged on the other, and
the other way round: no test is judged by what saw it. One moment parts the halves for all cases of a class, also where
some have more pairs than others: what two cases share, a pair of processes and its hour, is in one half. Cases are
pooled by class. The result is kept in results/calibration/<machine>.json.
"""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import scipy  # its parts take a second, see `ab/moderated.py`

from benchmarks.ab import moderated, sequential
from benchmarks.ab.calibration_samples import SLOWDOWNS, CalibrationPair
from benchmarks.ab.result import CompareVerdict, Rules
from benchmarks.ab.sequential import PairTiming
from benchmarks.ab.trial import PairedSamples
from harness import schema
from harness.fingerprint import Fingerprint
from nsa.io import atomic_write

LONG, SHORT = "1 ms and more", "below 1 ms"
_LONG_MS = 1.0
FALSE_ALARMS = 0.01
"""Of the cases of a class together: the smallest change that is called keeps the share of false alarms at or below
this."""
POWER = 0.9
"""A slowdown that is found this often may be ruled out by SAME."""
_POWER_LOSS = 0.01
"""A larger threshold, which calls identical code less often, is taken if it finds at most this share less."""
_MARGIN = 0.8
"""Of the smallest slowdown that is found: SAME rules it out, so that its margin lies below."""
SMALLEST_CHANGES = (0.0025, 0.005, 0.01, 0.015, 0.02, 0.025)
LEVELS = (0.0, *SLOWDOWNS)
_REAL = 0.25
"""An injected slowdown counts where it is what was wanted within this share: a GPU has no work of 0.3 us."""
_CONFIDENCE = 0.95


def case_class(latency_ms: float) -> str:
    """Which cases are judged alike: short ones vary more from process to process."""
    return LONG if latency_ms >= _LONG_MS else SHORT


@dataclass(frozen=True)
class CalibrationRate:
    """What `compare` answered where the slowdown was known."""

    slowdown: float
    """Wanted: 0.0 is identical code, 0.03 is 3 % more work."""
    injected: float
    """Measured: median share of the time that the injected work took beside the call."""
    comparisons: int
    slower: int
    faster: int
    same: int
    undecided: int

    @property
    def alarms(self) -> float:
        """Share of FASTER and SLOWER: with identical code the false-alarm rate."""
        return (self.slower + self.faster) / max(1, self.comparisons)

    @property
    def most_alarms(self) -> float:
        """What `alarms` is at most, with 95 % confidence, one-sided."""
        return bounds(self.slower + self.faster, self.comparisons)[1]

    @property
    def power(self) -> float:
        """Share of SLOWER: of an injected slowdown, how often it was found."""
        return self.slower / max(1, self.comparisons)

    @property
    def least_power(self) -> float:
        """What `power` is at least, with 95 % confidence, one-sided."""
        return bounds(self.slower, self.comparisons)[0]


def bounds(hits: int, trials: int) -> tuple[float, float]:
    """One-sided bounds of a share, each with 95 % confidence (Clopper and Pearson, Biometrika 26, 1934)."""
    if trials == 0:
        return 0.0, 1.0
    found = scipy.stats.binomtest(hits, trials).proportion_ci(2 * _CONFIDENCE - 1, "exact")
    return float(found.low), float(found.high)


@dataclass(frozen=True)
class CaseCalibration:
    """One case: each test was judged by what was fitted without it."""

    case: str
    latency_ms: float
    noise: float
    """Root mean square of the log-ratios of identical code."""
    rates: tuple[CalibrationRate, ...]
    """Ascending by slowdown, the first is 0; without those that could not be injected."""
    pairs: int | None = None
    """Pairs of processes that it was measured in; None in earlier calibrations, whose cases all have the same."""

    def __post_init__(self) -> None:
        if not self.rates or self.rates[0].slowdown != 0:
            raise ValueError(f"rates of {self.case} must begin with identical code")

    @property
    def kind(self) -> str:
        return case_class(self.latency_ms)


@dataclass(frozen=True)
class ClassRules:
    """What `compare` uses on this machine from now on for the cases of one class."""

    name: str
    rules: Rules


@dataclass(frozen=True)
class Calibration:
    """One calibration of one machine."""

    fingerprint: Fingerprint
    classes: tuple[ClassRules, ...]
    cases: tuple[CaseCalibration, ...]
    pairs: int
    """Pairs of processes of the case that has fewest."""
    seconds: float
    """What measuring all pairs took."""
    command: str

    def __post_init__(self) -> None:
        kinds = {case.kind for case in self.cases}
        if bare := [one.name for one in self.classes if one.name not in kinds]:
            raise ValueError(f"no case was calibrated of {', '.join(bare)}")

    def rules(self, case: str, latency_ms: float) -> Rules | None:
        """For a case that takes so long; None where none of its mode and class was calibrated."""
        kind = case_class(latency_ms)
        if not any(one.kind == kind and _mode(one.case) == _mode(case) for one in self.cases):
            return None
        return next(one.rules for one in self.classes if one.name == kind)

    def rates(self, name: str) -> tuple[CalibrationRate, ...]:
        """Of all cases of a class together."""
        found = [rate for case in self.cases if case.kind == name for rate in case.rates]
        return tuple(
            pooled([rate for rate in found if rate.slowdown == level])
            for level in LEVELS
            if any(rate.slowdown == level for rate in found)
        )


def _mode(case: str) -> str:
    return case.partition("/")[0]


def pooled(rates: Sequence[CalibrationRate]) -> CalibrationRate:
    """Of one slowdown, as if they were of one case."""
    counts = {
        name: sum(getattr(rate, name) for rate in rates)
        for name in ("comparisons", "slower", "faster", "same", "undecided")
    }
    return CalibrationRate(rates[0].slowdown, statistics.median(rate.injected for rate in rates), **counts)


def path(results: Path, machine: str) -> Path:
    """Where a machine's calibration is."""
    return results / "calibration" / f"{machine}.json"


def load(results: Path, machine: str) -> Calibration | None:
    """The machine's calibration; None where there is none. ValueError naming the file where it is damaged."""
    file = path(results, machine)
    if not file.exists():
        return None
    try:
        return schema.build(Calibration, json.loads(file.read_text()), "calibration")
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(
            f"{file} is no calibration, or of an earlier rule: {error}; run calibrate again or remove it"
        ) from error


def save(results: Path, calibration: Calibration) -> Path:
    """Replace the machine's calibration in one step, on the disk when this returns."""
    file = path(results, calibration.fingerprint.machine)
    text = json.dumps(dataclasses.asdict(calibration), allow_nan=False, indent=1) + "\n"
    atomic_write(file, text.encode())
    return file


@dataclass(frozen=True)
class CaseTimings:
    """Every pair of one case, in the order measured."""

    case: str
    pairs: tuple[Mapping[float, PairTiming], ...]
    """By slowdown."""
    injected: Mapping[float, float]
    """What each slowdown was: 0.0 alone where none could be injected."""
    numbers: tuple[int, ...]
    """Of the pair of processes behind each, ascending: cases that share a number were measured by the same two."""

    @property
    def latency_ms(self) -> float:
        return statistics.median(pair[0.0].base_ms for pair in self.pairs)

    @property
    def identical(self) -> list[float]:
        """The log-ratios of identical code."""
        return [pair[0.0].log_ratio for pair in self.pairs]

    def part(self, begin: int, end: int) -> CaseTimings:
        """The pairs that came in this range."""
        return dataclasses.replace(self, pairs=self.pairs[begin:end], numbers=self.numbers[begin:end])


def halves(measured: Sequence[CaseTimings]) -> tuple[list[CaseTimings], list[CaseTimings]]:
    """The pairs of some cases before a moment, and from then on: the latest one before which at most half of them came.

    A case that has none on one side is left out there.
    """
    numbers = sorted(number for one in measured for number in one.numbers)
    moment = numbers[len(numbers) // 2]
    first, second = list[CaseTimings](), list[CaseTimings]()
    for one in measured:
        middle = bisect_left(one.numbers, moment)
        first += [one.part(0, middle)] if middle else []
        second += [one.part(middle, len(one.pairs))] if middle < len(one.pairs) else []
    return first, second


def timings(pairs: Sequence[CalibrationPair]) -> list[CaseTimings]:
    """The measured pairs case by case."""
    samples: dict[str, dict[int, PairedSamples]] = {}
    for number, pair in enumerate(pairs):
        for one in pair.cases:
            samples.setdefault(one.case, {})[number] = one.samples
    found = []
    for case, of_case in samples.items():
        injected = {level: _injected([one.head_ms for one in of_case.values()], i) for i, level in enumerate(LEVELS)}
        real = {level: share for level, share in injected.items() if abs(share - level) <= _REAL * level}
        by_level = tuple({level: paired.timed(LEVELS.index(level)) for level in real} for paired in of_case.values())
        found.append(CaseTimings(case, by_level, real, tuple(of_case)))
    return found


def _injected(head_ms: Sequence[Sequence[Sequence[float]]], i: int) -> float:
    """Median share of the injected work in a sample."""
    return statistics.median(sample[i] / sample[0] - 1 for samples in head_ms for sample in samples)


def calibrate(
    measured: Sequence[CaseTimings], rules: Rules
) -> tuple[tuple[ClassRules, ...], tuple[CaseCalibration, ...]]:
    """(rules fitted on all pairs, what each case's tests answered by rules that were fitted without them)."""
    classes: list[ClassRules] = []
    cases: list[CaseCalibration] = []
    for name in (LONG, SHORT):
        of_class = [one for one in measured if case_class(one.latency_ms) == name]
        if not of_class:
            continue
        split = halves(of_class)
        fitted = [fit(split[1 - number], rules) for number in (0, 1)]
        classes.append(ClassRules(name, fit(of_class, rules)))
        for one in of_class:
            judged = [(part, fitted[number]) for number in (0, 1) for part in split[number] if part.case == one.case]
            tallies = {
                level: Counter(verdict for part, by in judged for verdict in verdicts(part, level, by))
                for level in one.injected
            }
            rates = tuple(_rate(level, one.injected[level], tally) for level, tally in tallies.items())
            noise = math.sqrt(statistics.fmean(value**2 for value in one.identical))
            cases.append(CaseCalibration(one.case, one.latency_ms, noise, rates, len(one.pairs)))
    return tuple(classes), tuple(cases)


def fit(measured: Sequence[CaseTimings], rules: Rules) -> Rules:
    """The noise of these cases; the margin of SAME for the smallest slowdown that is found; and of the thresholds
    (`smallest_change`) with few false alarms the largest that finds as much of it as the smallest one does.

    The largest of each where none is good enough.
    """
    rules = dataclasses.replace(rules, noise=moderated.fit([one.identical for one in measured]))
    for slowdown in SLOWDOWNS:
        margin = dataclasses.replace(rules, equal_within=_MARGIN * slowdown)
        tried = [dataclasses.replace(margin, smallest_change=change) for change in SMALLEST_CHANGES]
        quiet = [one for one in tried if _over(measured, 0.0, one).alarms <= FALSE_ALARMS] or tried[-1:]
        found = [_over(measured, slowdown, one) for one in quiet]
        if found[0].power >= POWER:
            break
    if not found[0].comparisons:  # it could not be injected into any of these cases
        return quiet[0]
    return [one for one, rate in zip(quiet, found, strict=True) if rate.power >= found[0].power - _POWER_LOSS][-1]


def _over(measured: Sequence[CaseTimings], level: float, rules: Rules) -> CalibrationRate:
    tally = Counter[CompareVerdict]()
    for one in measured:
        if level in one.injected:
            tally.update(verdicts(one, level, rules))
    return _rate(level, level, tally)


def verdicts(measured: CaseTimings, level: float, rules: Rules) -> list[CompareVerdict]:
    """Of one test after the other.

    None begins where fewer pairs are left than the second analysis takes: the goals ("3 % found in 99 %") are of so
    many. One that is UNDECIDED because the pairs ended before its last analysis counts as a slowdown that was not
    found; of identical code, which a later analysis could have called, it says nothing and is left out.
    """
    pairs, found = [pair[level] for pair in measured.pairs], []
    while len(pairs) >= rules.interim_analyses[:2][-1]:
        for analysis in rules.interim_analyses:
            verdict, _ = sequential.analyse(pairs[:analysis], rules)
            if verdict is not CompareVerdict.UNDECIDED or len(pairs) < analysis:
                break
        complete = verdict is not CompareVerdict.UNDECIDED or len(pairs) >= rules.interim_analyses[-1]
        if complete or level > 0.0:
            found.append(verdict)
        del pairs[:analysis]
    return found


def _rate(level: float, injected: float, tally: Counter[CompareVerdict]) -> CalibrationRate:
    slower, faster, same, undecided = (
        tally[verdict]
        for verdict in (CompareVerdict.SLOWER, CompareVerdict.FASTER, CompareVerdict.SAME, CompareVerdict.UNDECIDED)
    )
    return CalibrationRate(level, injected, sum(tally.values()), slower, faster, same, undecided)
