"""One round: every case in a new pair of processes; on a CPU two pairs at a time, each on a core of its own.

Pinned, because a process that comes back to another core starts with cold caches; not more than two, because the cores
share the memory.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

from benchmarks.checkout import Sources
from benchmarks.child import Child
from benchmarks.contest import NotTimed
from benchmarks.duel import Pair, SideError, Turns, blame
from benchmarks.judgements import Rules
from benchmarks.records import Key
from benchmarks.verdict import FAULTS

_LANES = 2
_SIBLINGS = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"


def play(
    base: Sources,
    head: Sources,
    device: str,
    keys: Sequence[Key],
    rules: Rules,
    first: int,
    slowdowns: Sequence[float] = (),
    *,
    check: bool = True,
) -> list[Turns | NotTimed]:
    """What came of each case, in order; after a fault the rest goes on in a new pair. For the rest see `duel.Pair`."""
    cores = _cores()[: len(keys)] if device == "cpu" else [None]
    lanes = [_Lane(base, head, device, core, rules, first, slowdowns, check) for core in cores]
    with ThreadPoolExecutor(len(lanes)) as pool:
        try:
            shares = [pool.submit(lane.play, keys[i :: len(lanes)]) for i, lane in enumerate(lanes)]
            played = [share.result() for share in shares]
        except BaseException:
            for lane in lanes:
                lane.stop()
            raise
    return [played[i % len(lanes)][i // len(lanes)] for i in range(len(keys))]


def _cores() -> list[int | None]:
    """Logical CPUs of `_LANES` different cores, or of as many as there are; [None] where they cannot be told."""
    if not hasattr(os, "sched_getaffinity"):
        return [None]
    first_of: dict[str, int | None] = {}
    for cpu in sorted(os.sched_getaffinity(0)):
        siblings = Path(_SIBLINGS.format(cpu))
        first_of.setdefault(siblings.read_text() if siblings.exists() else str(cpu), cpu)
    return list(first_of.values())[:_LANES]


class _Lane:
    """Plays its share of a round, one pair of processes at a time."""

    def __init__(
        self,
        base: Sources,
        head: Sources,
        device: str,
        core: int | None,
        rules: Rules,
        first: int,
        slowdowns: Sequence[float],
        check: bool,
    ) -> None:
        self._sides, self._device, self._core, self._rules = (base, head), device, core, rules
        self._first, self._slowdowns, self._check = first, slowdowns, check
        self._children: list[Child] = []
        self._lock, self._stopped = threading.Lock(), False

    def play(self, keys: Sequence[Key]) -> list[Turns | NotTimed]:
        """What came of each case, in order."""
        found: list[Turns | NotTimed] = []
        while len(found) < len(keys):
            try:
                with ExitStack() as stack:
                    pair = self._pair(stack)
                    self._until_fault(pair, keys, found)
            except SideError as error:  # before its first case: this side cannot even be imported
                found += [error.result] * (len(keys) - len(found))
        return found

    def stop(self) -> None:
        """From another thread: end the children, whatever they do, and start no others."""
        with self._lock:
            self._stopped = True
            for child in self._children:
                child.kill()

    def _pair(self, stack: ExitStack) -> Pair:
        with self._lock:
            if self._stopped:
                raise InterruptedError("the round was stopped")
            self._children = [Child(side) for side in self._sides]
            for child in self._children:
                stack.callback(child.close)
        for side, child in enumerate(self._children):
            with blame(side):
                child.begin(self._core)
        return Pair(self._children[0], self._children[1], self._device)

    def _until_fault(self, pair: Pair, keys: Sequence[Key], found: list[Turns | NotTimed]) -> None:
        """Go on until a case may have left a process that fails at everything, as a kernel's fault does on a GPU."""
        for key in keys[len(found) :]:
            try:
                result = pair.play(key, self._rules, self._first, self._slowdowns, check=self._check)
            except SideError as error:
                result = error.result
            found.append(result)
            if isinstance(result, NotTimed) and (result.base in FAULTS or result.head in FAULTS):
                return
