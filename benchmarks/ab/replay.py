"""Histories of eight commits, played with pairs of processes that `calibrate` recorded.

In each history one commit changes one case by a known amount, or none does. A pair of a commit before the change is a
recorded pair of identical code; one of a commit from there on has the injected work on HEAD's side, for a speed-up on
BASE's. As in use, the last commit is compared with the good one, in one comparison with all cases of its class that the
same processes have measured; where it is SLOWER the commit is searched by halves, each comparison being of that case
alone.

The pairs are split into two halves by time (`calibration.halves`). The rules are fitted on one half and tried on the
other. Comparisons take the pairs of their half in the order measured, each going on behind the one before; at the end
they begin anew.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.ab import bisect, calibration, sequential
from benchmarks.ab.backtest import BacktestEvent
from benchmarks.ab.calibration import CaseTimings
from benchmarks.ab.result import CompareVerdict, Rules
from benchmarks.ab.sequential import CaseResult, PairTiming

COMMITS = 8
"""After the good one."""
LEAST = 64
"""Histories of a backtest."""
CHANGES = (0.03, 0.0, -0.03, 0.1, 0.03, 0.0, -0.1, -0.03)
"""What histories hold, in turn."""
Judge = Callable[[Sequence[CaseResult], sequential.MeasurePair, Rules], None]
"""Compares cases, the first of which counts: gives each result its pairs and its verdict."""


def compare(results: Sequence[CaseResult], measure: sequential.MeasurePair, rules: Rules) -> None:
    """As the command `compare` does it."""
    sequential.extend(results, measure, lambda case, base_ms: rules, rules.interim_analyses)


def replay(
    measured: Sequence[CaseTimings], rules: Rules, seed: int, judge: Judge = compare, least: int = LEAST
) -> list[BacktestEvent]:
    """Histories until each pair of a case was used once on average, and so many at least; equal arguments, equal ones.

    `rules` are the schedule, to which each class's noise and thresholds are fitted; `judge` is the rule that is tried.
    ValueError where no case can show a change.
    """
    r = random.Random(seed)
    decks = list(_decks(measured, rules))
    if not decks:
        raise ValueError("no recorded case has work injected that could be a change: calibrate other cases")
    r.shuffle(decks)
    found: list[BacktestEvent] = []
    pairs = sum(len(deck.case.pairs) for deck in decks)
    for change in itertools.cycle(CHANGES):
        if len(found) >= least and sum(deck.used for deck in decks) >= pairs:
            break
        deck = min((one for one in decks if one.has(change)), key=lambda one: one.used, default=None)
        if deck is not None:
            found.append(_history(deck, change, r.randrange(COMMITS) if change else None, judge))
    return found


@dataclass
class _Deck:
    """One half of the pairs of one case, and of those that are compared with it."""

    case: CaseTimings
    others: Sequence[CaseTimings]
    """Each was measured in every pair of processes that the case was."""
    half: int
    rules: Rules
    used: int = 0
    """Pairs that comparisons have taken."""

    def has(self, change: float) -> bool:
        """Whether a change of this size could be injected into the case."""
        return abs(change) in self.case.injected

    def pair(self, number: int, change: float) -> dict[str, PairTiming]:
        """The recorded pair of this number, with this change of the case; the others are unchanged."""
        at = number % len(self.case.pairs)
        processes = self.case.numbers[at]
        others = {one.case: one.pairs[one.numbers.index(processes)][0.0] for one in self.others}
        return {self.case.case: _changed(self.case.pairs[at], change), **others}


def _changed(pair: Mapping[float, PairTiming], change: float) -> PairTiming:
    slowed = pair[abs(change)]
    if change >= 0:
        return slowed
    return PairTiming(slowed.head_ms, slowed.base_ms, -slowed.log_ratio)


def _decks(measured: Sequence[CaseTimings], rules: Rules) -> Iterator[_Deck]:
    for kind in (calibration.LONG, calibration.SHORT):
        of_class = [one for one in measured if calibration.case_class(one.latency_ms) == kind]
        if not of_class:
            continue
        split = calibration.halves(of_class)
        for half, here in enumerate(split):
            fitted = calibration.fit(split[1 - half], rules)
            for case in here:
                if len(case.injected) > 1:
                    yield _Deck(case, [one for one in here if _beside(one, case)], half, fitted)


def _beside(one: CaseTimings, case: CaseTimings) -> bool:
    """Whether it is another case, measured in every pair of processes that this one was."""
    return one is not case and set(case.numbers) <= set(one.numbers)


def _history(deck: _Deck, change: float, first: int | None, judge: Judge) -> BacktestEvent:
    case, begin = deck.case.case, deck.used

    def verdict(commit: int, cases: Sequence[str]) -> CompareVerdict:
        here = change if first is not None and commit >= first else 0.0
        numbers = itertools.count(deck.used)

        def measure(wanted: Sequence[str]) -> dict[str, PairTiming]:
            number = next(numbers)
            if case in wanted:  # what only the others take is not used up
                deck.used = number + 1
            found = deck.pair(number, here)
            return {name: found[name] for name in wanted}

        results = [CaseResult(name) for name in cases]
        judge(results, measure, deck.rules)
        return results[0].verdict

    last = verdict(COMMITS - 1, [case, *(one.case for one in deck.others)])
    suspects: tuple[int, ...] = ()
    if change > 0 and last is CompareVerdict.SLOWER:
        names = [str(commit) for commit in range(COMMITS)]
        left = bisect.first_slow(names, lambda name: verdict(int(name), [case]))
        suspects = tuple(map(int, left.commits))
    return BacktestEvent(case, deck.half, change, first, last, suspects, deck.used - begin)
