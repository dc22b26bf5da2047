"""From mutants to lines: each tried in a scratch copy, after its tests have passed there without it."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from pathlib import Path
from queue import SimpleQueue
from threading import Event

from benchmarks.history.mutants import MutantOutcome, MutantResult
from tests.mutants import suites
from tests.mutants.standing import Planned, Suite
from tests.mutants.suites import SuiteRun
from tests.mutants.tree import Copy

HEALTHY_LIMIT_S = 1800.0
"""For an area's tests without a mutant."""
LEAST_LIMIT_S = 60.0
SLOWER = 10
"""As many times as long as without the mutant may the tests take with it."""
PLAINLY_SLOWER = 3
"""After a mutant's tests did not end, they must still end in a third of that time without it."""


class Trials:
    """Copies of the tree, and what came of each suite without a mutant."""

    def __init__(self, root: Path, names: Sequence[str], folder: Path, jobs: int) -> None:
        self._copies: SimpleQueue[Copy] = SimpleQueue()
        for number in range(jobs):
            self._copies.put(Copy(root, names, folder / str(number)))
        self._healthy: dict[Suite, Future[SuiteRun]] = {}
        self._pool, self.stop = ThreadPoolExecutor(jobs), Event()

    def submit(self, planned: Planned) -> Future[MutantResult]:
        """Try it once its suite has passed without it."""
        suite = planned.suite
        if suite not in self._healthy:  # before every mutant that waits for it, so that none waits in vain
            self._healthy[suite] = self._pool.submit(self._without, suite)
        return self._pool.submit(self._line, planned, self._healthy[suite])

    def close(self) -> None:
        """End what runs, start nothing more."""
        self.stop.set()
        self._pool.shutdown(cancel_futures=True)

    def _without(self, suite: Suite, limit_s: float = HEALTHY_LIMIT_S) -> SuiteRun:
        copy = self._copies.get()
        try:
            return suites.run(copy, suite, limit_s, self.stop)
        finally:
            self._copies.put(copy)

    def _line(self, planned: Planned, healthy: Future[SuiteRun]) -> MutantResult:
        mutant = planned.mutant
        outcome, said, duration_s = self._tried(planned, healthy.result())
        if mutant.equivalent is not None:
            if outcome is MutantOutcome.SURVIVED:
                outcome, said = MutantOutcome.EQUIVALENT, mutant.equivalent
            elif outcome is not MutantOutcome.ERROR:
                outcome, said = MutantOutcome.ERROR, f"it is called equivalent, and was seen: {said}"
        return MutantResult(mutant.id, planned.area, outcome, round(duration_s, 1), said, planned.drawn)

    def _tried(self, planned: Planned, healthy: SuiteRun) -> tuple[MutantOutcome, str | None, float]:
        if why := _why_unhealthy(healthy):
            return MutantOutcome.ERROR, f"without the mutant: {why}", healthy.duration_s
        limit_s = max(LEAST_LIMIT_S, SLOWER * healthy.duration_s)
        copy = self._copies.get()
        try:
            with copy.mutated(planned.mutant):
                found = suites.run(copy, planned.suite, limit_s, self.stop)
        except ValueError as error:
            return MutantOutcome.ERROR, str(error), 0.0
        finally:
            self._copies.put(copy)
        if found.timed_out:
            again = self._without(planned.suite, limit_s / PLAINLY_SLOWER)
            if why := _why_unhealthy(again):
                return (
                    MutantOutcome.ERROR,
                    f"no end within {limit_s:.0f} s, but then without it: {why}",
                    found.duration_s,
                )
            said = f"no end within {limit_s:.0f} s; without it {again.duration_s:.1f} s"
            return MutantOutcome.TIMEOUT, said, found.duration_s
        if found.red is not None:
            return MutantOutcome.KILLED, found.red, found.duration_s
        return MutantOutcome.SURVIVED, "no test was collected" if found.nothing_ran else None, found.duration_s


def _why_unhealthy(run: SuiteRun) -> str | None:
    if run.timed_out:
        return f"no end within {run.duration_s:.0f} s"
    return "no test was collected" if run.nothing_ran else run.red


def run(root: Path, names: Sequence[str], planned: Sequence[Planned], jobs: int) -> Iterator[MutantResult]:
    """Lines as they come, `jobs` copies at a time. On any exit nothing that it started is left."""
    with tempfile.TemporaryDirectory(prefix="nsa-mutants-", ignore_cleanup_errors=True) as folder:
        trials = Trials(root, names, Path(folder), max(1, min(jobs, len(planned))))
        try:
            for future in as_completed([trials.submit(one) for one in planned]):
                yield future.result()
        finally:
            trials.close()
