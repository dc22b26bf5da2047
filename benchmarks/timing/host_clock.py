"""Wall time of a call on the host, by two clocks that know nothing of one another.

A sample is the difference of two readings of `time.perf_counter`. Around it the kernel's raw monotonic clock is read
through the C library, past Python's `time`: where a program has replaced `time.perf_counter`, the two disagree.
"""

from __future__ import annotations

import ctypes
import time
from collections import deque
from collections.abc import Callable, Sequence

from benchmarks.correctness.verify import IncorrectError

_SHARE = 0.05
_SPARE_MS = 0.02
"""What reading the second clock may take beside the first."""
_FEWEST = 5
_recent: deque[tuple[float, float]] = deque(maxlen=1000)
"""The last samples of this process by both clocks, ms."""


class _Timespec(ctypes.Structure):
    """The C library's `struct timespec`."""

    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_RAW = getattr(time, "CLOCK_MONOTONIC_RAW", None)
"""The clock's number; None where there is none."""
_read_clock = None if _RAW is None else ctypes.CDLL(None).clock_gettime


def raw_s() -> float:
    """Seconds since some moment, by a clock that Python's `time` has no part in; where there is none, by Python's."""
    if _read_clock is None:
        return time.monotonic()
    found = _Timespec()
    _read_clock(_RAW, ctypes.byref(found))
    return float(found.seconds + found.nanoseconds * 1e-9)


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
        """Raises IncorrectError where the second clock says something else of most of the last samples.

        Fewer than five are judged together with those of before in this process: of one alone a busy machine takes
        a tenth between two readings.
        """
        _recent.extend(zip(samples_ms, self._raw_ms[-len(samples_ms) :], strict=True))
        last = list(_recent)[-max(len(samples_ms), _FEWEST) :]
        if len(last) >= _FEWEST:
            try:
                require_same_time([told for told, _ in last], [raw for _, raw in last])
            except IncorrectError:
                _recent.clear()
                raise


def require_same_time(told_ms: Sequence[float], raw_ms: Sequence[float]) -> None:
    """Raises IncorrectError where the two clocks differ, by more than reading them takes, on more than half of the
    samples: a process that is held up between two readings is no replaced timer."""
    apart = [
        (told, raw) for told, raw in zip(told_ms, raw_ms, strict=True) if abs(told - raw) > _SPARE_MS + _SHARE * raw
    ]
    if 2 * len(apart) > len(told_ms):
        told, raw = sorted(apart)[len(apart) // 2]
        raise IncorrectError(
            f"time.perf_counter says {told:.4g} ms, the system's raw clock {raw:.4g} ms, as of {len(apart)} of"
            f" {len(told_ms)} samples: the timer was replaced"
        )
