"""Lanes: launches of one call that may run beside one another while a CUDA graph is captured.

A call is a line of launches, lane 0. In a block of `beside` other lanes begin where it stands, and end with the block.
Of a call that is recorded (`recording.py`) the lanes are noted, for the graphs into which its plan is captured later;
where a graph captures the call itself they are streams. Short kernels, the last programs of long ones, and kernels that
wait for memory leave much of a GPU idle, and a graph runs others in between for nothing. Elsewhere all is lane 0: to
fork and join streams costs the host more than it saves.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator
from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class Wait(NamedTuple):
    """A lane goes on when all that another one has launched so far has ended."""

    lane: int
    other: int


class Lanes(Protocol):
    """Of one call."""

    def fork(self, last: int) -> None:
        """Let lanes 1 to `last` begin behind what lane 0 has launched."""

    def join(self, *others: int) -> None:
        """Let lane 0 go on behind what these have launched; behind all where none is named."""

    def at(self, lane: int) -> contextlib.AbstractContextManager[None]:
        """Launch in this lane."""

    def hold(self, *tensors: Tensor) -> None:
        """Keep the memory of tensors until all lanes are joined."""


class RecordedLanes:
    """Notes what each launch waits for. A recording holds all tensors itself."""

    def __init__(self) -> None:
        self.number, self.current = 1, 0
        self._running: set[int] = set()
        """Lanes with launches that lane 0 has not waited for."""
        self._forked: list[int] = []
        self._joined: set[int] = set()

    def fork(self, last: int) -> None:
        self._forked = [lane for lane in range(1, last + 1) if lane not in self._running]

    def join(self, *others: int) -> None:
        self._joined |= self._running.intersection(others or self._running)

    @contextlib.contextmanager
    def at(self, lane: int) -> Iterator[None]:
        outer, self.current = self.current, lane
        try:
            yield
        finally:
            self.current = outer

    def hold(self, *tensors: Tensor) -> None:
        pass

    def launched(self) -> tuple[Wait, ...]:
        """What is waited for before a launch in the current lane."""
        lane, begin, self._forked = self.current, self._forked, []
        if lane and lane not in self._running and lane not in begin:
            begin.append(lane)
        waits = [Wait(other, 0) for other in begin]
        if lane == 0:
            waits += [Wait(0, other) for other in sorted(self._joined)]
            self._running -= self._joined
            self._joined.clear()
        self._running.update(begin)
        self.number = max([self.number, *(other + 1 for other in begin)])
        return tuple(waits)

    def left(self) -> tuple[int, ...]:
        """Those that lane 0 is to wait for at the end."""
        return tuple(sorted(self._running))


class CapturedLanes:
    """Streams beside the one that captures a graph."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._main = device, torch.cuda.current_stream(device)
        self._running: set[int] = set()
        self._held: list[Tensor] = []

    def _stream(self, lane: int) -> torch.cuda.Stream:
        return side_stream(self._device, self._main.cuda_stream, lane) if lane else self._main

    def fork(self, last: int) -> None:
        for lane in range(1, last + 1):
            self._stream(lane).wait_stream(self._main)
            self._running.add(lane)

    def join(self, *others: int) -> None:
        for lane in sorted(self._running.intersection(others or self._running)):
            self._main.wait_stream(self._stream(lane))

    def at(self, lane: int) -> contextlib.AbstractContextManager[None]:
        found: contextlib.AbstractContextManager[None] = torch.cuda.stream(self._stream(lane))
        return found

    def hold(self, *tensors: Tensor) -> None:
        self._held += tensors  # what one lane frees, another one's next tensor may take while the first still reads it


class _Thread(threading.local):
    lanes: Lanes | None = None


MOST_BYTES = 2**27
"""Of queries: a longer call that a graph captures has no lanes. What they read is held until they end, 2 GiB more of
64/4 heads of 128 at 64k, where they saved 0.5 % on an H200 (3 % at 8k)."""
QUERIES = 3
"""The lane of dq, of all branches, in the backward pass."""
thread = _Thread()
"""The lanes of a recording, or of a block of `beside`; None elsewhere."""
_NOTHING = contextlib.nullcontext()


@contextlib.contextmanager
def beside(last: int, x: Tensor) -> Iterator[None]:
    """Lanes 1 to `last` may run beside lane 0 in this block, which they begin with and end with; of the queries x."""
    recorded = thread.lanes
    few = x.numel() * x.itemsize <= MOST_BYTES
    lanes = recorded or (CapturedLanes(x.device) if few and _captured(x) else None)
    if lanes is None:
        yield
        return
    thread.lanes = lanes
    try:
        lanes.fork(last)
        yield
        lanes.join()
    finally:
        thread.lanes = recorded


def lane(number: int) -> contextlib.AbstractContextManager[None]:
    """Launches in this block are of that lane, where there are lanes.

    They may read what lane 0 wrote before the block of `beside`, and what their own lane wrote.
    """
    return _NOTHING if thread.lanes is None else thread.lanes.at(number)


def join(number: int) -> None:
    """What lane 0 launches from here on may read what that lane has written."""
    if thread.lanes is not None:
        thread.lanes.join(number)


def hold(*tensors: Tensor) -> None:
    """Lanes read these: none of their memory may be used anew in this block of `beside`."""
    if thread.lanes is not None:
        thread.lanes.hold(*tensors)


def _captured(x: Tensor) -> bool:
    """Whether a graph is captured now, on the device of x."""
    if not x.is_cuda or x.get_device() != torch.cuda.current_device():
        return False
    return torch.cuda.is_current_stream_capturing()


@functools.cache
def side_stream(device: torch.device, beside: int, lane: int) -> torch.cuda.Stream:
    """One for each lane and for each stream that captures: two captures at once do not meet on it."""
    del beside, lane
    return torch.cuda.Stream(device)
