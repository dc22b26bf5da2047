"""What a run of the mutants prints: a line each, the time left on a terminal, a table per area."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from types import TracebackType

from tqdm import tqdm

from benchmarks.history.mutants import SEEN, MutantOutcome, MutantResult, rates
from tests.mutants.standing import Area, Planned


class Progress:
    """Lines of finished mutants on stdout; on a terminal, below them on stderr, how many are done and the time left."""

    def __init__(self, total: int) -> None:
        self._total, self._done, self._begin = total, 0, time.perf_counter()
        self._bar = tqdm(total=total, unit="mutant", leave=False, dynamic_ncols=True, disable=None)  # None: no log

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._bar.close()

    def finished(self, line: MutantResult) -> None:
        """Print its line."""
        self._done += 1
        self._bar.update()
        left_s = (time.perf_counter() - self._begin) / self._done * (self._total - self._done)
        head = f"[{self._done:>{len(str(self._total))}}/{self._total} {left_s:5.0f} s left]"
        said = f"{head} {line.outcome.value:<10} {line.area}: {line.id} {line.duration_s:g} s  {line.killed_by or ''}"
        tqdm.write(said.rstrip(), file=sys.stdout)
        sys.stdout.flush()


def table(lines: Sequence[MutantResult]) -> str:
    """One row per area; below it every mutant that nothing saw, or of which nothing is known."""
    shown = [f"{'area':<16} {'seen':>12} {'share':>7} {'drawn':>9} {'timeouts':>8} {'errors':>6} {'equivalent':>10}"]
    for rate in rates(lines):
        count = rate.outcomes
        shown.append(
            f"{rate.area:<16} {f'{rate.seen} of {rate.total}':>12} {rate.share:>7.1%} "
            f"{f'{rate.drawn_seen} of {rate.drawn}':>9} {count.get(MutantOutcome.TIMEOUT, 0):>8} "
            f"{rate.errors:>6} {count.get(MutantOutcome.EQUIVALENT, 0):>10}"
        )
    for line in lines:
        if line.outcome not in (*SEEN, MutantOutcome.EQUIVALENT):
            shown.append(f"{line.outcome.value}: {line.area}: {line.id}: {line.killed_by or 'every test passed'}")
    return "\n".join(shown)


def listing(planned: Sequence[Planned], areas: Mapping[str, Area]) -> str:
    """Every mutant, what it changes and what must see it."""
    shown = []
    for name in dict.fromkeys(one.area for one in planned):
        own = [one for one in planned if one.area == name]
        shown.append(f"{name}: {len(own)} mutants; {' '.join(areas[name].tests)}")
        for one in own:
            what = one.mutant.why or f"drawn: {one.mutant.operator}"
            shown.append(f"  {one.mutant.id:<48} {one.mutant.file:<40} {what}")
    return "\n".join(shown)
