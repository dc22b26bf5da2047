"""A slowdown of known size, as real work after the call: what a detector of slowdowns is tried on.

The work is a fixed number of small matrix products, counted out once, so that it is disturbed by whatever disturbs
the call; multiplying the measured time, or spinning until a clock says so, would inject a change without noise. It
comes in stages (1 %, then 2 % more, then 7 % more): one run gives a sample of every size.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

_UNIT_SIZE = 48  # a product of some microseconds whose operands stay in the first-level cache
_TRIALS = 30
_UNITS_PER_TRIAL = 20


class StagedSlowdown:
    """A CPU call followed by work in stages; `samples_ms` collects the time from the start to the end of each."""

    def __init__(self, call: Callable[[], tuple[Tensor, ...]], latency_ms: float, slowdowns: Sequence[float]) -> None:
        """`slowdowns` are shares of the call's latency, ascending: 0.03 is 3 %."""
        if list(slowdowns) != sorted(set(slowdowns)) or not all(slowdown > 0 for slowdown in slowdowns):
            raise ValueError(f"slowdowns must be above 0 and ascend; got {list(slowdowns)}")
        self._call = call
        self._operand, self._product = torch.rand(2, _UNIT_SIZE, _UNIT_SIZE)
        units = [round(slowdown * latency_ms / self._unit_ms()) for slowdown in slowdowns]
        self._stages = [count - before for count, before in zip(units, [0, *units[:-1]], strict=True)]
        self.samples_ms: list[list[float]] = []

    def __call__(self) -> tuple[Tensor, ...]:
        marks = [time.perf_counter()]
        outputs = self._call()
        marks.append(time.perf_counter())
        for units in self._stages:
            self._work(units)
            marks.append(time.perf_counter())
        self.samples_ms.append([(mark - marks[0]) * 1e3 for mark in marks[1:]])
        return outputs

    def _work(self, units: int) -> None:
        for _ in range(units):
            torch.mm(self._operand, self._operand, out=self._product)

    def _unit_ms(self) -> float:
        """Of the fastest trials: a disturbed one would make the slowdown smaller than it says."""
        times_ms = []
        for _ in range(_TRIALS):
            begin = time.perf_counter()
            self._work(_UNITS_PER_TRIAL)
            times_ms.append((time.perf_counter() - begin) * 1e3)
        return sorted(times_ms)[_TRIALS // 4] / _UNITS_PER_TRIAL
