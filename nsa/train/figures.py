"""Figures on their way from the device: asked for at each step, read when they have arrived, a step or two later.

Reading one at once would make the host wait for the device in every step. So that the host cannot run away from the
device either, the oldest is waited for when DEPTH are on their way.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

DEPTH = 2

Told = TypeVar("Told")


@dataclass(frozen=True)
class Arrived(Generic[Told]):
    """The figures of one step, on the host."""

    told: Told
    """What the host knew when it asked."""
    values: dict[str, Tensor]
    """As they were asked for, on the CPU."""
    forward_ms: float | None
    """Of this rank's first forward pass of the step; None where it was replayed with its backward pass."""
    step_s: float | None
    """Since the step before was done; None for the first one."""


@dataclass(frozen=True)
class _Asked(Generic[Told]):
    told: Told
    values: dict[str, Tensor]
    forward: tuple[float | torch.cuda.Event, float | torch.cuda.Event | None]
    done: float | torch.cuda.Event
    """When the step was done: host seconds, or an event."""


class OnTheirWay(Generic[Told]):
    """A queue of asked and arrived figures."""

    def __init__(self, *, in_step: bool = False) -> None:
        """`in_step` where several ranks must read the same figures in the same step, as they answer with collectives:
        then each waits for DEPTH, instead of for whatever its own GPU has done."""
        self._in_step = in_step
        self._asked: deque[_Asked[Told]] = deque()
        self._before: float | torch.cuda.Event | None = None

    def ask(
        self,
        told: Told,
        values: dict[str, Tensor],
        forward: tuple[float | torch.cuda.Event, float | torch.cuda.Event | None],
    ) -> None:
        """Start the copies; `values` may be on the device, and change after this."""
        copies = {name: _copy(x.detach()) for name, x in values.items()}
        done: float | torch.cuda.Event
        if isinstance(forward[0], float):
            done = time.perf_counter()
        else:
            done = torch.cuda.Event(enable_timing=True)
            done.record()
        self._asked.append(_Asked(told, copies, forward, done))

    def arrived(self, *, all_of_them: bool = False) -> list[Arrived[Told]]:
        """What is there, in order; waits for what is too many, or for all."""
        out = []
        while self._asked:
            first = self._asked[0]
            if not all_of_them and len(self._asked) < DEPTH and (self._in_step or not _is_done(first.done)):
                break
            if isinstance(first.done, torch.cuda.Event):
                first.done.synchronize()
            out.append(self._read(self._asked.popleft()))
        return out

    def begin_anew(self) -> None:
        """What came since the last step (a validation, a checkpoint) does not count as part of the next one."""
        self._before = None

    def _read(self, asked: _Asked[Told]) -> Arrived[Told]:
        step_s = None if self._before is None else _seconds(self._before, asked.done)
        self._before = asked.done
        begin, end = asked.forward
        forward_ms = None if end is None else 1000 * _seconds(begin, end)
        return Arrived(asked.told, asked.values, forward_ms, step_s)


def _copy(x: Tensor) -> Tensor:
    if x.device.type != "cuda":
        return x.clone()
    return torch.empty_like(x, device="cpu", pin_memory=True).copy_(x, non_blocking=True)


def _is_done(done: float | torch.cuda.Event) -> bool:
    return not isinstance(done, torch.cuda.Event) or done.query()


def _seconds(begin: float | torch.cuda.Event, end: float | torch.cuda.Event) -> float:
    if isinstance(begin, float) and isinstance(end, float):
        return end - begin
    assert isinstance(begin, torch.cuda.Event)
    assert isinstance(end, torch.cuda.Event)
    return begin.elapsed_time(end) / 1000
