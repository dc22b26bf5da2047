"""Metrics copied from the device without waiting for it.

Reading a metric at once would make the host wait for the device in every step. So the metrics of a step are asked for
when it is launched (`AsyncMetrics.submit`), and read when they have arrived, a step or two later. So that the host
cannot run away from the device either, the oldest step is waited for when DEPTH are pending.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

DEPTH = 2
"""Steps that may be pending."""

Context = TypeVar("Context")
Moment = float | torch.cuda.Event
"""Host seconds, or an event."""


@dataclass(frozen=True)
class StepTimes:
    """Of one step, all on one clock."""

    begin: Moment
    forward_end: Moment | None
    """Of the first forward pass; None where nobody saw it end."""
    work_end: Moment | None
    """When this rank began to wait for the others; None where nobody saw it."""


@dataclass(frozen=True)
class HostMetrics(Generic[Context]):
    """The metrics of one step, on the host."""

    context: Context
    """What the host knew when it submitted them."""
    values: dict[str, Tensor]
    """By the names under which they were submitted, on the CPU."""
    forward_ms: float | None
    """Of this rank's first forward pass of the step; None where it was replayed with its backward pass."""
    work_ms: float | None
    """What this rank did before it waited for the others."""
    step_s: float | None
    """Since the step before was done; None for the first one."""


@dataclass(frozen=True)
class _Pending(Generic[Context]):
    context: Context
    shapes: dict[str, torch.Size]
    copy: Tensor
    """All values behind one another; complete once `done` is."""
    times: StepTimes
    done: Moment
    """When the step was done."""


class AsyncMetrics(Generic[Context]):
    """A queue of steps whose metrics are being copied to the host."""

    def __init__(self, *, synchronous: bool = False) -> None:
        """`synchronous` where several ranks must read the same metrics in the same step, as they answer with
        collectives: then each waits for DEPTH, instead of for whatever its own GPU has done."""
        self._synchronous = synchronous
        self._pending: deque[_Pending[Context]] = deque()
        self._last_done: Moment | None = None

    def submit(self, context: Context, values: Mapping[str, Tensor], times: StepTimes) -> None:
        """Start one copy of all values, floats on one device; they may change after this."""
        flat = [x.detach().reshape(-1) for x in values.values()]
        together = torch.cat(flat) if flat else torch.empty(0)  # a copy; float64 if one of them is
        done: Moment
        if together.device.type == "cuda":
            together = torch.empty_like(together, device="cpu", pin_memory=True).copy_(together, non_blocking=True)
        if isinstance(times.begin, float):
            done = time.perf_counter()
        else:
            done = torch.cuda.Event(enable_timing=True)
            done.record()
        shapes = {name: x.shape for name, x in values.items()}
        self._pending.append(_Pending(context, shapes, together, times, done))

    def ready(self, *, wait: bool = False) -> list[HostMetrics[Context]]:
        """What has arrived, in order. Waits for the oldest when DEPTH are pending, and with `wait` for all."""
        out = []
        while self._pending:
            first = self._pending[0]
            if not wait and len(self._pending) < DEPTH and (self._synchronous or not _is_done(first.done)):
                break
            if isinstance(first.done, torch.cuda.Event):
                first.done.synchronize()
            out.append(self._read(self._pending.popleft()))
        return out

    def restart_clock(self) -> None:
        """What came since the last step (a validation, a checkpoint) does not count as part of the next one."""
        self._last_done = None

    def _read(self, pending: _Pending[Context]) -> HostMetrics[Context]:
        step_s = None if self._last_done is None else _seconds(self._last_done, pending.done)
        self._last_done = pending.done
        times = pending.times
        forward_ms, work_ms = (
            None if end is None else 1000 * _seconds(times.begin, end) for end in (times.forward_end, times.work_end)
        )
        pieces = pending.copy.split([shape.numel() for shape in pending.shapes.values()])
        values = {name: x.view(shape) for (name, shape), x in zip(pending.shapes.items(), pieces, strict=True)}
        return HostMetrics(pending.context, values, forward_ms, work_ms, step_s)


def _is_done(done: Moment) -> bool:
    return not isinstance(done, torch.cuda.Event) or done.query()


def _seconds(begin: Moment, end: Moment) -> float:
    if isinstance(begin, float) and isinstance(end, float):
        return end - begin
    assert isinstance(begin, torch.cuda.Event)
    assert isinstance(end, torch.cuda.Event)
    return begin.elapsed_time(end) / 1000
