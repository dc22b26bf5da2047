"""Ends a run that hangs: a deadline from its own pace, the stacks of all threads, then the process; and its signals."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from nsa.train.monitoring import monitors

EXIT_STALLED = 86
"""Exit code of a run that the watchdog ended, and of nothing else here."""
_CHECKS_PER_DEADLINE = 20


class Watchdog:
    """Waits for `beat`. After the deadline it dumps the stacks of all threads, calls `on_stall` and ends the process.

    Before the first step, and in what may compile (`patiently`), the deadline is `first_s`; else 10 median steps, and
    never below `floor_s`.
    """

    def __init__(
        self,
        stacks: Path,
        *,
        floor_s: float,
        first_s: float,
        on_stall: Callable[[str], None],
        end: Callable[[int], None] = os._exit,
    ) -> None:
        self._stacks, self._floor_s, self._first_s = stacks, floor_s, first_s
        self._on_stall, self._end = on_stall, end
        self._steps_s: deque[float] = deque(maxlen=64)
        self._last = time.monotonic()
        self._patient = False
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def start(self) -> None:
        self._last = time.monotonic()
        self._thread.start()

    def beat(self, step_s: float | None = None) -> None:
        """Something was done; `step_s` if it was a step."""
        if step_s is not None:
            self._steps_s.append(step_s)
        self._last = time.monotonic()

    @contextmanager
    def patiently(self) -> Iterator[None]:
        """A validation or a checkpoint: no step, so that no pace is known for it."""
        self.beat()
        self._patient = True
        try:
            yield
        finally:
            self.beat()
            self._patient = False

    def close(self) -> None:
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join()

    def __enter__(self) -> Watchdog:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _watch(self) -> None:
        pause_s = min(self._floor_s, self._first_s) / _CHECKS_PER_DEADLINE
        while not self._closed.wait(min(pause_s, 1.0)):
            gap_s = time.monotonic() - self._last
            steps_s = [] if self._patient else list(self._steps_s)
            alarm = monitors.silence(gap_s, steps_s, floor_s=self._floor_s if steps_s else self._first_s)
            if alarm is not None:
                dump_stacks(self._stacks, alarm.why)
                self._on_stall(alarm.why)
                self._end(EXIT_STALLED)
                return


def dump_stacks(path: Path, why: str) -> None:
    """Append the stacks of all threads."""
    with path.open("a") as file:
        file.write(f"--- {time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())} {why}\n")
        file.flush()
        faulthandler.dump_traceback(file)


def dump_on_signal(path: Path) -> Callable[[], None]:
    """SIGUSR1 appends the stacks of all threads to `path`, at once, whatever Python does; returns how to end that."""
    file = path.open("a")
    faulthandler.register(signal.SIGUSR1, file, all_threads=True)

    def end() -> None:
        faulthandler.unregister(signal.SIGUSR1)
        file.close()

    return end


class StopRequest:
    """SIGTERM and SIGINT as a flag that the loop reads between two steps; a second signal ends the process at once."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def __enter__(self) -> StopRequest:
        for number in self._before:
            signal.signal(number, self._note)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: object) -> None:
        if self.signal is not None:
            sys.exit(128 + number)
        self.signal = signal.Signals(number)
