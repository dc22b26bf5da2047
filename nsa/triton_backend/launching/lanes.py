"""Lanes: launches of one call that may run beside one another while a CUDA graph is captured.

A call is a line of launches, lane 0. In a block of `beside` other lanes fork from it, and join it at the end. Of a call
that is recorded (`recording.py`) the lanes are noted, for the graphs into which its plan is captured later; where a
graph captures the call itself they are side streams. Short kernels, the last programs of long ones, and kernels that
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

MOST_BYTES = 2**27
"""A graph that captures a call with larger queries has one lane: several hold more memory. 64/4 heads of 128 at 64k
took 2 GiB more on an H200 and gained 0.5 %, at 8k 3 %."""
WINDOW, COMPRESSED, QUERIES = 1, 2, 3
"""Lanes of the backward pass: dk and dv of the window, of compressed keys, and dq of all branches. Forward, WINDOW."""


class Wait(NamedTuple):
    """A lane goes on when all that another one has launched so far has ended."""

    waiting: int
    awaited: int


class Lanes(Protocol):
    """Of one block of `beside`."""

    def fork(self, last: int) -> None:
        """Let lanes 1 to `last` begin behind what lane 0 has launched."""

    def join(self, *lanes: int) -> None:
        """Let lane 0 go on behind what these have launched; none named: behind all, which end."""

    def launching_in(self, lane: int) -> contextlib.AbstractContextManager[None]:
        """Launch in this lane, if the block has it."""

    def hold(self, *tensors: Tensor) -> None:
        """Keep the memory of tensors until all lanes have ended."""


class RecordedLanes:
    """Notes who waits for whom. A recording holds all tensors itself."""

    def __init__(self) -> None:
        self.number, self.current = 1, 0
        self.waits: list[Wait] = []
        """Before the next launch, of whatever lane, in this order."""
        self._running = range(0)

    def fork(self, last: int) -> None:
        self._running = range(1, last + 1)
        self.number = max(self.number, last + 1)
        self.waits += [Wait(lane, 0) for lane in self._running]

    def join(self, *lanes: int) -> None:
        self.waits += [Wait(0, lane) for lane in lanes or self._running]
        self._running = self._running if lanes else range(0)

    @contextlib.contextmanager
    def launching_in(self, lane: int) -> Iterator[None]:
        outer, self.current = self.current, lane if lane in self._running else 0
        try:
            yield
        finally:
            self.current = outer

    def hold(self, *tensors: Tensor) -> None:
        pass

    def taken(self) -> tuple[Wait, ...]:
        """`waits`, which are then none."""
        waits, self.waits = self.waits, []
        return tuple(waits)


class CapturedLanes:
    """Side streams of the stream that captures a graph."""

    def __init__(self, device: torch.device) -> None:
        main = torch.cuda.current_stream(device)
        self._stream = functools.partial(side_stream, device, main.cuda_stream)
        self._main, self._running = main, range(0)
        self._held: list[Tensor] = []

    def fork(self, last: int) -> None:
        self._running = range(1, last + 1)
        for lane in self._running:
            self._stream(lane).wait_stream(self._main)

    def join(self, *lanes: int) -> None:
        for lane in lanes or self._running:
            self._main.wait_stream(self._stream(lane))

    def launching_in(self, lane: int) -> contextlib.AbstractContextManager[None]:
        found: contextlib.AbstractContextManager[None] = torch.cuda.stream(self._stream(lane))
        return found

    def hold(self, *tensors: Tensor) -> None:
        self._held += tensors  # what one lane frees, another one's next tensor may take while the first still reads it


class _Thread(threading.local):
    lanes: Lanes | None = None


thread = _Thread()
"""The lanes of a recording, or of a block of `beside` in a capture; None elsewhere."""
_ONE_LANE = contextlib.nullcontext()


@contextlib.contextmanager
def beside(last: int, queries: Tensor) -> Iterator[None]:
    """In this block lanes 1 to `last` may run beside lane 0."""
    recorded = thread.lanes
    lanes = recorded or (CapturedLanes(queries.device) if _has_lanes(queries) else None)
    if lanes is None:
        yield
        return
    thread.lanes = lanes
    lanes.fork(last)
    try:
        yield
    finally:
        lanes.join()  # behind an error too: no capture can end before
        thread.lanes = recorded


def lane(number: int) -> contextlib.AbstractContextManager[None]:
    """Launches in this block are of that lane, where there are lanes.

    They may read what lane 0 wrote before the block of `beside`, and what their own lane wrote.
    """
    return _ONE_LANE if thread.lanes is None else thread.lanes.launching_in(number)


def join(number: int) -> None:
    """What lane 0 launches from here on may read what that lane has written."""
    if thread.lanes is not None:
        thread.lanes.join(number)


def hold(*tensors: Tensor) -> None:
    """Lanes read these: none of their memory may be used anew in this block of `beside`."""
    if thread.lanes is not None:
        thread.lanes.hold(*tensors)


def _has_lanes(queries: Tensor) -> bool:
    """Whether a graph is captured now, on the device of these queries, which are not too many."""
    if not queries.is_cuda or queries.get_device() != torch.cuda.current_device():
        return False
    return queries.numel() * queries.itemsize <= MOST_BYTES and torch.cuda.is_current_stream_capturing()


@functools.cache
def side_stream(device: torch.device, beside: int, lane: int) -> torch.cuda.Stream:
    """One for each lane and for each stream that captures."""
    del beside, lane
    return torch.cuda.Stream(device)
