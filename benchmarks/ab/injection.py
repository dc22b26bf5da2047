"""A slowdown of known size, as real work after the call: what a detector of slowdowns is tried on.

The work is a fixed amount, counted out once, so that it is disturbed by whatever disturbs the call; multiplying the
measured time, or spinning until a clock says so, would inject a change without noise. On a CPU it is small matrix
products; on a GPU a kernel behind the call's own that runs for so many cycles, which takes longer when the clock falls.
It comes in stages (1 %, then 2 % more, then 7 % more): one run gives a sample of every size.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch

_UNIT_SIZE = 48  # a product of some microseconds whose operands stay in the first-level cache
_TRIALS = 30
_UNITS_PER_TRIAL = 20
_FEW_CYCLES, _MANY_CYCLES = 1_000, 201_000
_AHEAD_CYCLES = 1_000_000  # the GPU spins for half a millisecond while the host queues what is timed


class StagedSlowdown:
    """Calls followed by work in stages."""

    def __init__(self, latency_ms: float, slowdowns: Sequence[float], device: str) -> None:
        """`slowdowns` are shares of the call's latency, ascending: 0.03 is 3 %."""
        if list(slowdowns) != sorted(set(slowdowns)) or not all(slowdown > 0 for slowdown in slowdowns):
            raise ValueError(f"slowdowns must be above 0 and ascend; got {list(slowdowns)}")
        self._work = _device_work() if device == "cuda" else _HostWork()
        steps = [after - before for before, after in zip([0.0, *slowdowns], slowdowns, strict=False)]
        self._stages = [self._work.amount(step * latency_ms) for step in steps]
        self._marks: list[list[Any]] = []

    def __call__(self, call: Callable[[], object]) -> object:
        """The call and the stages behind it."""
        marks = [self._work.mark()]
        outputs = call()
        marks.append(self._work.mark())
        for amount in self._stages:
            self._work.do(amount)
            marks.append(self._work.mark())
        self._marks.append(marks)
        return outputs

    def take_samples_ms(self) -> list[list[float]]:
        """Of each call since the last time: from its start to its own end, and to the end of each stage."""
        taken = [[self._work.ms(marks[0], mark) for mark in marks[1:]] for marks in self._marks]
        self._marks.clear()
        return taken


@cache
def _device_work() -> _DeviceWork:
    """One for the life of the process: how long a cycle takes is asked for 60 times."""
    return _DeviceWork()


class _HostWork:
    """Matrix products on this core."""

    def __init__(self) -> None:
        self._operand, self._product = torch.rand(2, _UNIT_SIZE, _UNIT_SIZE)
        times_ms = []
        for _ in range(_TRIALS):
            begin = self.mark()
            self.do(_UNITS_PER_TRIAL)
            times_ms.append(self.ms(begin, self.mark()))
        # of the fastest trials: a disturbed one would make the slowdown smaller than it says
        self._unit_ms = sorted(times_ms)[_TRIALS // 4] / _UNITS_PER_TRIAL

    def amount(self, wanted_ms: float) -> int:
        return round(wanted_ms / self._unit_ms)

    def do(self, amount: int) -> None:
        for _ in range(amount):
            torch.mm(self._operand, self._operand, out=self._product)

    def mark(self) -> float:
        return time.perf_counter()

    def ms(self, begin: float, end: float) -> float:
        return (end - begin) * 1e3


class _DeviceWork:
    """A kernel that runs for so many of the GPU's cycles."""

    def __init__(self) -> None:
        few_ms, many_ms = (
            statistics.median(self._spin_ms(cycles) for _ in range(_TRIALS)) for cycles in (_FEW_CYCLES, _MANY_CYCLES)
        )
        self._ms_per_cycle = (many_ms - few_ms) / (_MANY_CYCLES - _FEW_CYCLES)
        self._launch_ms = few_ms - _FEW_CYCLES * self._ms_per_cycle

    def amount(self, wanted_ms: float) -> int:
        return max(0, round((wanted_ms - self._launch_ms) / self._ms_per_cycle))

    def do(self, amount: int) -> None:
        torch.cuda._sleep(amount)

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def ms(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return float(begin.elapsed_time(end))

    def _spin_ms(self, cycles: int) -> float:
        self.do(_AHEAD_CYCLES)
        begin = self.mark()
        self.do(cycles)
        end = self.mark()
        end.synchronize()
        return self.ms(begin, end)
