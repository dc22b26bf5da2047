"""Which two processes make a pair: new ones, and on a GPU two that launch kernels alike.

What a process drew at its start (`launch_interval`) makes a call of many short kernels up to 3 % slower for as long as
it lives. Two processes of one draw differ by 0.2 %. So on a GPU several are started for each side, while the pair
before measures, and those two whose launch intervals are nearest to each other are taken.

A process may take longer to import PyTorch than a pair of few cases to be measured. So further ones import meanwhile,
without a context on the GPU: that is made between two pairs, where it disturbs none.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager

from benchmarks.ab.checkout import Sources
from benchmarks.ab.child import WorkerError, WorkerProcess
from benchmarks.ab.sequential import PairFailure
from benchmarks.cases.outcome import CaseOutcome

_AHEAD = 3
"""Processes of each side that stand ready on a GPU."""
_IMPORTING = 2
"""Further ones of each side that import beside a pair."""
_ALIKE = 0.03
"""Launch intervals that differ by less are of one draw."""
_MOST_DRAWS = 4
"""How often BASE of the nearest two is replaced; then the nearest two are taken all the same."""


class SideError(Exception):
    """A child of this side (0 BASE, 1 HEAD) was lost."""

    def __init__(self, side: int, error: WorkerError) -> None:
        outcomes = [CaseOutcome.PASSED, CaseOutcome.PASSED]
        outcomes[side] = error.outcome
        reason = f"{('BASE', 'HEAD')[side]} {error.outcome.value}: {error}"
        self.result = PairFailure(outcomes[0], outcomes[1], reason)
        super().__init__(reason)


@contextmanager
def blame(side: int) -> Iterator[None]:
    """A child that is lost in here is of this side. Raises SideError."""
    try:
        yield
    except WorkerError as error:
        raise SideError(side, error) from error


class PairStarter:
    """Starts the pairs of one comparison; a context, in which those that stand ready live."""

    def __init__(self, base: Sources, head: Sources, device: str) -> None:
        self.device = device
        self._sides = (base, head)
        self._ready: tuple[list[WorkerProcess], list[WorkerProcess]] = ([], [])

    def __enter__(self) -> PairStarter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End those that stand ready; also from another thread, where `start` then raises SideError."""
        for child in itertools.chain(*self._ready):
            child.close()

    def start(self) -> list[WorkerProcess]:
        """A new pair, BASE and HEAD, which the caller lets begin, and closes. Raises SideError on a GPU."""
        if self.device == "cpu":
            return [WorkerProcess(side) for side in self._sides]
        self._fill()
        base, head = self._nearest()
        for _ in range(_MOST_DRAWS):
            if _difference(base, head) <= _ALIKE:
                break
            self._ready[0].remove(base)
            base.close()
            self._fill()
            base, head = self._nearest()
        for ready, child in zip(self._ready, (base, head), strict=True):
            ready.remove(child)
        self._start_processes(_AHEAD + _IMPORTING)
        return [base, head]

    def _nearest(self) -> tuple[WorkerProcess, WorkerProcess]:
        base, head = (ready[:_AHEAD] for ready in self._ready)
        return min(itertools.product(base, head), key=lambda pair: _difference(*pair))

    def _start_processes(self, wanted: int) -> None:
        """Until so many of each side are there, the oldest first."""
        for sources, ready in zip(self._sides, self._ready, strict=True):
            ready += [WorkerProcess(sources) for _ in range(wanted - len(ready))]

    def _fill(self) -> None:
        """Until `_AHEAD` of each side have told their launch interval, one after the other: each has the GPU alone."""
        self._start_processes(_AHEAD)
        first = [(side, child) for side, ready in enumerate(self._ready) for child in ready[:_AHEAD]]
        for side, child in first:
            with blame(side):
                child.begin(None)
                child.ask_for_context()  # it is made while the next one is waited for
        for side, child in first:
            with blame(side):
                child.wait_for_context()
        for side, child in first:
            with blame(side):
                child.launch_interval_ns()


def _difference(base: WorkerProcess, head: WorkerProcess) -> float:
    return abs(head.launch_interval_ns() / base.launch_interval_ns() - 1)
