"""Where the seconds of a pair of processes go, stage by stage."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

START, WARM_UP, SAMPLES, FINISH, END = "start", "warm_up", "samples", "finish", "end"
"""Stages that the parent sees: waiting for two processes that are ready; the first timed calls of each case; its
samples; the oracle's second question; ending the processes."""
FREE, INPUTS, FIRST_CALL, COPIES = "free", "inputs", "first_call", "copies"
"""Stages that a worker tells of a case's preparation: freeing what the case before has left; inputs; the call that
loads or compiles the kernels, with the oracle's first question; copies of the inputs and CUDA graphs."""
ONCE = (START, END)
"""Stages of a pair, however many cases it has."""


class StageClock:
    """Seconds by stage; of what runs side by side, on a CPU, the sum."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._lock = threading.Lock()

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """What happens in here is of this stage, also where it fails."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.add({name: time.perf_counter() - begin})

    def add(self, seconds: Mapping[str, float]) -> None:
        """Count these too."""
        with self._lock:
            for name, spent in seconds.items():
                self._seconds[name] = self._seconds.get(name, 0.0) + spent

    def add_sides(self, sides: Sequence[Mapping[str, float]], *, together: bool) -> None:
        """Count what the processes of a pair did; where they worked together, the longer of each stage."""
        join = max if together else sum
        for name in dict.fromkeys(name for seconds in sides for name in seconds):
            self.add({name: join(seconds.get(name, 0.0) for seconds in sides)})

    def seconds(self) -> dict[str, float]:
        """By stage, rounded to 10 ms, the longest first."""
        rounded = {name: round(spent, 2) for name, spent in self._seconds.items()}
        return dict(sorted(rounded.items(), key=lambda one: -one[1]))
