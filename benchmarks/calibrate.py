"""From a bank of pairs to rates: how often a contest cries wolf, and how often it finds what was injected.

The pairs are dealt into groups, each as large as one contest; every contest of a group has one case slowed down and
the others as they are, and is played by the same `contest.play`. No pair is in two groups, so that the comparisons of
one case and one size are independent. The thresholds are chosen on half of the groups and judged on the other half,
and the other way round: no comparison is judged by thresholds that saw it.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence

from benchmarks import contest
from benchmarks.bank import SLOWDOWNS, BankedPair
from benchmarks.calibration import Rate
from benchmarks.contest import Answer, Timed
from benchmarks.judgements import Rules, Verdict

FALSE_ALARMS = 0.01
"""The thresholds are the sharpest ones that keep the false-alarm rate at or below this."""
POWER = 0.9
"""`Rules.equal_within` is the smallest injected slowdown that is found at least this often."""
SMALLEST_CHANGES = (0.005, 0.01, 0.015, 0.02, 0.025)
LEVELS = (0.0, *SLOWDOWNS)

Group = Sequence[BankedPair]


def least_effort(rules: Rules) -> Rules:
    """What is calibrated: `compare` up to the first look that can find a change. Later ones can find more,
    and measure on what this one, being the last, calls SAME beyond `plainly_same`."""
    return rules.up_to(rules.fewest_rounds)


def groups_for(comparisons: int, cases: int) -> int:
    """How many groups give at least so many comparisons of each size; two at least, to choose on one."""
    return max(2, -(-comparisons // cases))


def deal(pairs: Sequence[BankedPair], size: int) -> list[Group]:
    """Whole groups, in the order measured."""
    return [pairs[i : i + size] for i in range(0, len(pairs) - size + 1, size)]


def calibrated(groups: Sequence[Group], rules: Rules) -> tuple[Rules, tuple[Rate, ...]]:
    """(thresholds chosen on all groups, rates where each group was judged with those chosen on the other half)."""
    tallies: dict[float, Counter[Verdict]] = {level: Counter() for level in LEVELS}
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


def noise(pairs: Sequence[BankedPair]) -> float:
    """Median over the cases of 1.4826 MAD of the log-ratios of identical code."""
    ratios: dict[str, list[float]] = {}
    for pair in pairs:
        for taken in pair.taken:
            ratios.setdefault(taken.case, []).append(taken.turns.timed().log_ratio)
    return statistics.median(1.4826 * statistics.median(map(abs, values)) for values in ratios.values())


def _tallies(groups: Sequence[Group], rules: Rules, levels: Sequence[float] = LEVELS) -> dict[float, Counter[Verdict]]:
    tallies: dict[float, Counter[Verdict]] = {level: Counter() for level in levels}
    for group in groups:
        cases = [taken.case for taken in group[0].taken]
        for level in levels:
            if level == 0.0:
                tallies[level].update(answer.verdict for answer in play(group, None, 0, rules))
                continue
            for case in cases:
                answers = play(group, case, LEVELS.index(level), rules)
                tallies[level][next(answer.verdict for answer in answers if answer.case == case)] += 1
    return tallies


def play(group: Group, slowed: str | None, level: int, rules: Rules) -> list[Answer]:
    """One contest over all cases, of which one is slowed down, from the pairs of a group."""
    waiting = iter(group)

    def measure(cases: Sequence[str]) -> Mapping[str, Timed]:
        by_case = {taken.case: taken.turns for taken in next(waiting).taken}
        return {case: by_case[case].timed(level if case == slowed else 0) for case in cases}

    return contest.play([taken.case for taken in group[0].taken], measure, least_effort(rules))


def _injected(groups: Sequence[Group], level: float) -> float:
    """What the slowdown really was: median share of the injected work in a turn."""
    i = LEVELS.index(level)
    return statistics.median(
        turn[i] / turn[0] - 1 for group in groups for pair in group for taken in pair.taken for turn in taken.head_ms
    )


def _rate(level: float, tally: Counter[Verdict], injected: float = 0.0) -> Rate:
    slower, faster, same, undecided = (
        tally[verdict] for verdict in (Verdict.SLOWER, Verdict.FASTER, Verdict.SAME, Verdict.UNDECIDED)
    )
    return Rate(level, injected, sum(tally.values()), slower, faster, same, undecided)
