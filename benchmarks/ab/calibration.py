"""How often `compare` is right on a machine, from pairs of processes in which the slowdown is known.

The pairs are split into groups, each as large as one test; in every test of a group one case is slowed down and the
others are as they are, and `sequential.run` decides. No pair is in two groups, so that the comparisons of one case and
one size are independent. The thresholds are chosen on half of the groups and judged on the other half, and the other
way round: no comparison is judged by thresholds that saw it. The result is kept in results/calibration/<machine>.json.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.ab import sequential
from benchmarks.ab.calibration_samples import SLOWDOWNS, CalibrationPair
from benchmarks.ab.result import CompareVerdict, Rules
from benchmarks.ab.sequential import CaseResult, PairTiming
from harness import schema
from harness.fingerprint import Fingerprint
from nsa.io import atomic_write


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
        return (self.slower + self.faster) / self.comparisons

    @property
    def power(self) -> float:
        """Share of SLOWER: of an injected slowdown, how often it was found."""
        return self.slower / self.comparisons


@dataclass(frozen=True)
class Calibration:
    """One calibration of one machine."""

    fingerprint: Fingerprint
    rules: Rules
    """What `compare` uses on this machine from now on."""
    rates: tuple[CalibrationRate, ...]
    """Ascending by slowdown, the first is 0. Each comparison was judged with thresholds chosen on the others."""
    cases: tuple[str, ...]
    """Names of the keys that were measured."""
    pairs: int
    """Pairs of processes, each of them in one comparison per case only."""
    noise: float
    """Median over the cases of the spread (1.4826 MAD) between pairs of identical code."""
    command: str


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
    except (ValueError, TypeError) as error:
        raise ValueError(f"{file} is no calibration: {error}; run calibrate again or remove it") from error


def save(results: Path, calibration: Calibration) -> Path:
    """Replace the machine's calibration in one step, on the disk when this returns."""
    file = path(results, calibration.fingerprint.machine)
    text = json.dumps(dataclasses.asdict(calibration), allow_nan=False, indent=1) + "\n"
    atomic_write(file, text.encode())
    return file


FALSE_ALARMS = 0.01
"""The thresholds are the sharpest ones that keep the false-alarm rate at or below this."""
POWER = 0.9
"""`Rules.equal_within` is the smallest injected slowdown that is found at least this often."""
SMALLEST_CHANGES = (0.005, 0.01, 0.015, 0.02, 0.025)
LEVELS = (0.0, *SLOWDOWNS)

Group = Sequence[CalibrationPair]


def least_effort(rules: Rules) -> Rules:
    """What is calibrated: `compare` up to the first interim analysis that can find a change. Later ones can find more,
    and measure on what this one, being the last, calls SAME beyond `plainly_same`."""
    return rules.up_to(rules.min_pairs)


def groups_for(comparisons: int, cases: int) -> int:
    """How many groups give at least so many comparisons of each size; two at least, to choose on one."""
    return max(2, -(-comparisons // cases))


def split(pairs: Sequence[CalibrationPair], size: int) -> list[Group]:
    """Whole groups, in the order measured."""
    return [pairs[i : i + size] for i in range(0, len(pairs) - size + 1, size)]


def calibrate(groups: Sequence[Group], rules: Rules) -> tuple[Rules, tuple[CalibrationRate, ...]]:
    """(thresholds chosen on all groups, rates where each group was judged with those chosen on the other half)."""
    tallies: dict[float, Counter[CompareVerdict]] = {level: Counter() for level in LEVELS}
    for half in (0, 1):
        chosen = choose(groups[1 - half :: 2], rules)
        for level, tally in _tallies(groups[half::2], chosen).items():
            tallies[level] += tally
    rates = tuple(_rate(level, tally, _injected(groups, level)) for level, tally in tallies.items())
    return choose(groups, rules), rates


def choose(groups: Sequence[Group], rules: Rules) -> Rules:
    """The sharpest thresholds that these groups allow; the bluntest where none is good enough."""
    for smallest_change in SMALLEST_CHANGES:
        tried = dataclasses.replace(rules, smallest_change=smallest_change)
        if _rate(0.0, _tallies(groups, tried, (0.0,))[0.0]).alarms <= FALSE_ALARMS:
            break
    tallies = _tallies(groups, tried, SLOWDOWNS)
    found = [level for level in SLOWDOWNS if _rate(level, tallies[level]).power >= POWER]
    return dataclasses.replace(tried, equal_within=found[0] if found else SLOWDOWNS[-1])


def noise(pairs: Sequence[CalibrationPair]) -> float:
    """Median over the cases of 1.4826 MAD of the log-ratios of identical code."""
    ratios: dict[str, list[float]] = {}
    for pair in pairs:
        for one in pair.cases:
            ratios.setdefault(one.case, []).append(one.samples.timed().log_ratio)
    return statistics.median(1.4826 * statistics.median(map(abs, values)) for values in ratios.values())


def _tallies(
    groups: Sequence[Group], rules: Rules, levels: Sequence[float] = LEVELS
) -> dict[float, Counter[CompareVerdict]]:
    tallies: dict[float, Counter[CompareVerdict]] = {level: Counter() for level in levels}
    for group in groups:
        cases = [one.case for one in group[0].cases]
        for level in levels:
            if level == 0.0:
                tallies[level].update(answer.verdict for answer in simulate(group, None, 0, rules))
                continue
            for case in cases:
                answers = simulate(group, case, LEVELS.index(level), rules)
                tallies[level][next(answer.verdict for answer in answers if answer.case == case)] += 1
    return tallies


def simulate(group: Group, slowed: str | None, level: int, rules: Rules) -> list[CaseResult]:
    """One test over all cases, of which one is slowed down, from the pairs of a group."""
    waiting = iter(group)

    def measure(cases: Sequence[str]) -> Mapping[str, PairTiming]:
        by_case = {one.case: one.samples for one in next(waiting).cases}
        return {case: by_case[case].timed(level if case == slowed else 0) for case in cases}

    return sequential.run([one.case for one in group[0].cases], measure, least_effort(rules))


def _injected(groups: Sequence[Group], level: float) -> float:
    """What the slowdown really was: median share of the injected work in a sample."""
    i = LEVELS.index(level)
    return statistics.median(
        sample[i] / sample[0] - 1 for group in groups for pair in group for one in pair.cases for sample in one.head_ms
    )


def _rate(level: float, tally: Counter[CompareVerdict], injected: float = 0.0) -> CalibrationRate:
    slower, faster, same, undecided = (
        tally[verdict]
        for verdict in (CompareVerdict.SLOWER, CompareVerdict.FASTER, CompareVerdict.SAME, CompareVerdict.UNDECIDED)
    )
    return CalibrationRate(level, injected, sum(tally.values()), slower, faster, same, undecided)
