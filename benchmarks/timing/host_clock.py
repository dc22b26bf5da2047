"""Wall time of a call on the host, by two clocks that know nothing of one another.

A sample is the difference of two readings of `time.perf_counter`. Around it the kernel's raw monotonic clock is read
through the C library, past Python's `time`: where a program has replaced `time.perf_counter`, the two disagree.
"""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable, Sequence

from benchmarks.correctness.verify import IncorrectError

_SHARE = 0.05
_SPARE_MS = 0.02
"""What reading the second clock may take beside the first, in the median."""


class _Timespec(ctypes.Structure):
    """The C library's `struct timespec`."""

    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def _raw_clock() -> Callable[[], float]:
    """Reads the raw monotonic clock, s; where there is none, the monotonic clock of Python."""
    number = getattr(time, "CLOCK_MONOTONIC_RAW", None)
    if number is None:
        return time.monotonic
    read = ctypes.CDLL(None).clock_gettime

    def now() -> float:
        found = _Timespec()
        read(number, ctypes.byref(found))
        return float(found.seconds + found.nanoseconds * 1e-9)

    return now


raw_s = _raw_clock()
"""Seconds since some moment, by a clock that Python's `time` has no part in."""


class WallSampler:
    """Samples of a call on the CPU."""

    def __init__(self, call: Callable[[], object], before: Callable[[], object]) -> None:
        """`before` runs ahead of each call, not timed."""
        self._call, self._before = call, before
        self._raw_ms: list[float] = []

    def sample(self) -> float:
        """One sample, ms."""
        self._before()
        raw = raw_s()
        begin = time.perf_counter()
        self._call()
        end = time.perf_counter()
        self._raw_ms.append((raw_s() - raw) * 1e3)
        return (end - begin) * 1e3

    def require_same_time(self, samples_ms: Sequence[float]) -> None:
        """Raises IncorrectError unless the last samples took, in the median, what the second clock says."""
        require_same_time(statistics.median(samples_ms), statistics.median(self._raw_ms[-len(samples_ms) :]))


def require_same_time(told_ms: float, raw_ms: float) -> None:
    """Raises IncorrectError where the two clocks differ by more than reading them takes."""
    if abs(told_ms - raw_ms) > _SPARE_MS + _SHARE * raw_ms:
        raise IncorrectError(
            f"time.perf_counter says {told_ms:.4g} ms, the system's raw clock {raw_ms:.4g} ms: the timer was replaced"
        )
