"""How busy other processes kept the CPU beside a measurement: a CPU's figure is worth little where they took its cores.

Their time is that of the whole machine less this process's own. What the host gave to its other guests (steal) counts
as theirs.
"""

from __future__ import annotations

import time

import psutil

_BUSY = ("user", "nice", "system", "irq", "softirq", "steal")
_SHORTEST_S = 0.1  # the system counts in hundredths of a second


class OtherLoad:
    """From the moment when it is made."""

    def __init__(self) -> None:
        self._begin_s, self._others_s = time.perf_counter(), _others_s()

    def cores(self) -> float | None:
        """Cores that others kept busy since then, on average; None where that is too short to say."""
        seconds = time.perf_counter() - self._begin_s
        return round(max(0.0, _others_s() - self._others_s) / seconds, 2) if seconds >= _SHORTEST_S else None


def _others_s() -> float:
    machine, own = psutil.cpu_times(), psutil.Process().cpu_times()
    busy_s = sum(getattr(machine, name, 0.0) for name in _BUSY)  # which of them there are depends on the system
    return busy_s - (own.user + own.system)
