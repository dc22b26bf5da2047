"""Work timed on its inputs and on a copy of them alternately, so that a cold call finds nothing of the last one; warm
decode steps of recorded choices in the order in which they follow one another."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch

from benchmarks.cases.key import HOST, Key
from benchmarks.cases.outcome import Correctness
from benchmarks.cases.work import Work
from benchmarks.correctness import anti_cheat, known_answer, process_state
from benchmarks.timing import cross_check, cuda_graphs, latency
from benchmarks.timing.latency import SamplingPlan, Timing

_ROOM = 4
"""A copy is made where this many times the inputs are free on the device: it needs outputs and scratch too."""


class RotatingInputs:
    """What is timed of one key: eager calls or graphs, one or several."""

    def __init__(self, work: Work, key: Key, device: str) -> None:
        copies = [work.copy()] if work.copy is not None and key.cache == "cold" and _has_room(work) else []
        following = work.following() if work.following is not None and key.cache == "warm" else ()
        self._works = [work, *copies, *following]
        captured = key.launch == "graph"
        self._calls = [
            cuda_graphs.capture(one.call) if captured and not one.replays else one.call for one in self._works
        ]
        self._device, self._cache, self._host = device, key.cache, key.mode.startswith(HOST)
        self._loop = key.mode == "train-loop" and device == "cuda"
        self.steps = latency.STEPS_OF_A_LOOP if self._loop else 1
        """Calls of a sample."""
        self._timing: Timing | None = None
        self._settings = process_state.read()

    def time(self, plan: SamplingPlan, around: Callable[[Callable[[], object]], object] | None = None) -> Timing:
        """Time them in turn; ahead of each call one value of each input changes, and at last all of them back.

        `around` makes the call, and what else is to be in the sample.
        """
        touch = anti_cheat.Touch(x for work in self._works for x in work.inputs.values())
        try:
            if self._host:
                timing = latency.of_host(self._in_turn(around), self._device, plan, touch)
            elif self._loop:
                timing = latency.of_loop(self._in_turn(around), plan, touch)
            else:
                timing = latency.measure(self._in_turn(around), self._device, self._cache, plan, touch)
        finally:
            touch.undo()
        if around is None:
            self._timing = timing
        return timing

    def recheck(self, seed: int, rows_share: float = 1.0) -> Correctness | None:
        """The last of them on inputs that no call has seen, watched from outside; None where the work cannot. For
        `rows_share` see `Recheck`.

        Raises IncorrectError also where a setting of the process, the oracle or the comparison was changed meanwhile.
        """
        work, found = self._works[-1], None
        try:
            if work.recheck is not None:
                found = cross_check.recheck(
                    work, self._calls[-1], None if self._host else self._timing, self._device, seed, rows_share
                )
        finally:  # a changed setting names the cause of whatever else was found
            process_state.require_unchanged(self._settings)
        known_answer.require_known_answers()
        return found

    def _in_turn(self, around: Callable[[Callable[[], object]], object] | None) -> Callable[[], object]:
        calls = itertools.cycle(self._calls)
        return (lambda: next(calls)()) if around is None else (lambda: around(next(calls)))


def _has_room(work: Work) -> bool:
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    return _ROOM * sum(x.numel() * x.element_size() for x in work.inputs.values()) < free
