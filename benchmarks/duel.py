"""A pair of child processes, one per side, that take turns on each case: A B, B A, A B, ... within a second or two.

The pair is what counts as one observation. Both processes are new, so that what a process has for its whole life (where
its memory lies, in what order it was started) differs from pair to pair; and since the turns stand next to each other,
what comes and goes on the machine (clocks, neighbours) meets both sides. Only one of the two works at a time.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from benchmarks import ranks
from benchmarks.child import Child, ChildError
from benchmarks.contest import NotTimed, Timed
from benchmarks.judgements import Rules
from benchmarks.records import Key, Outcome

PREPARE_DEADLINE_S = 600.0
"""Compilation and the oracle included."""
TURN_DEADLINE_S = 120.0
_TURN_MS = 50.0
"""A turn of short calls lasts about this long, beside its first call."""
_MOST_CALLS = 20
_ONE_CALL_MS = 20.0
"""From here on a turn on a CPU is one call. Where the host's speed changes within a tenth of a second, neighbouring
calls differ by 7 %, medians of calls further apart by 8 % in twice the time; caches weigh little in such a call."""


@dataclass(frozen=True)
class Turns:
    """What the two processes of a pair took on one case, turn by turn."""

    base_ms: tuple[float, ...]
    head_ms: tuple[tuple[float, ...], ...]
    """Per turn: as it is, then with each slowdown injected."""

    def timed(self, level: int = 0) -> Timed:
        """One observation; `level` is 0 for HEAD as it is, i for the i-th slowdown."""
        head_ms = [turn[level] for turn in self.head_ms]
        ratio = ranks.typical(self._log_ratios(level))
        return Timed(statistics.median(self.base_ms), statistics.median(head_ms), ratio)

    def enough(self, rules: Rules) -> bool:
        """Whether further turns would say little more; looks at the spread alone, so that it favours no answer."""
        taken = len(self.base_ms)
        if taken < rules.turns or taken % 2:
            return False
        return taken >= rules.most_turns or standard_error(self._log_ratios(0)) <= rules.turn_precision

    def _log_ratios(self, level: int) -> list[float]:
        pairs = zip(self.base_ms, self.head_ms, strict=True)
        return [math.log(head_ms[level] / base_ms) for base_ms, head_ms in pairs]


def standard_error(ratios: Sequence[float]) -> float:
    """Of `ranks.typical`, from the median distance to it, which wild turns do not widen."""
    middle = ranks.typical(ratios)
    spread = 1.4826 * statistics.median(abs(ratio - middle) for ratio in ratios)
    return 1.05 * spread / math.sqrt(len(ratios))  # efficiency pi / 3 under normal noise


class Pair:
    """Two children, BASE and HEAD, on "cpu" or "cuda"."""

    def __init__(self, base: Child, head: Child, device: str) -> None:
        self._children, self._device = (base, head), device

    def play(
        self, key: Key, rules: Rules, first: int, slowdowns: Sequence[float] = (), *, check: bool = True
    ) -> Turns | NotTimed:
        """Prepare one case on both sides, then take turns, side `first` (0 BASE, 1 HEAD) before the other.

        Both sides do the work of the slowdowns, so that it leaves the same caches to either's next call; HEAD's is
        read. `check`: the oracle is asked before the turns, and again after them on other inputs. Raises SideError.
        """
        if refused := self._both({"prepare": dataclasses.asdict(key), "device": self._device, "check": check}):
            return refused
        latencies_ms = [self._alone(side, {"slowdowns": list(slowdowns)})["latency_ms"] for side in (0, 1)]
        calls = calls_in_a_turn(min(latencies_ms), self._device)
        taken = Turns((), ())
        while not taken.enough(rules):
            turn = {}
            for side in (0, 1) if (len(taken.base_ms) + first) % 2 == 0 else (1, 0):
                turn[side] = self._alone(side, {"turn": calls})["turn_ms"]
            taken = Turns((*taken.base_ms, turn[0][0]), (*taken.head_ms, tuple(turn[1])))
        if check and (refused := self._both({"finish": True})):
            return refused
        return taken

    def _alone(self, side: int, request: Mapping[str, Any]) -> dict[str, Any]:
        with blame(side):
            self._children[side].ask(request)
            return self._children[side].answer(TURN_DEADLINE_S)

    def _both(self, request: Mapping[str, Any]) -> NotTimed | None:
        """Ask both, at the same time on a CPU; on a GPU the oracle's memory is there for one of them."""
        asked, answers = 0, []
        for side in (0, 1):
            while asked <= (1 if self._device == "cpu" else side):
                with blame(asked):
                    self._children[asked].ask(request)
                asked += 1
            with blame(side):
                answers.append(self._children[side].answer(PREPARE_DEADLINE_S))
        base, head = (Outcome(answer["outcome"]) for answer in answers)
        if base is head is Outcome.PASSED:
            return None
        said = ("BASE", base, answers[0]["reason"]), ("HEAD", head, answers[1]["reason"])
        why = "; ".join(f"{name} {outcome.value}: {text}" for name, outcome, text in said if text)
        return NotTimed(base, head, why)


def calls_in_a_turn(latency_ms: float, device: str) -> int:
    """For either side alike, or one of them would count its first call and the other not."""
    if device == "cpu" and latency_ms >= _ONE_CALL_MS:
        return 1
    return 1 + max(1, min(_MOST_CALLS, math.ceil(_TURN_MS / latency_ms)))


class SideError(Exception):
    """A child of this side (0 BASE, 1 HEAD) was lost."""

    def __init__(self, side: int, error: ChildError) -> None:
        outcomes = [Outcome.PASSED, Outcome.PASSED]
        outcomes[side] = error.outcome
        reason = f"{('BASE', 'HEAD')[side]} {error.outcome.value}: {error}"
        self.result = NotTimed(outcomes[0], outcomes[1], reason)
        super().__init__(reason)


@contextmanager
def blame(side: int) -> Iterator[None]:
    """A child that is lost in here is of this side. Raises SideError."""
    try:
        yield
    except ChildError as error:
        raise SideError(side, error) from error
