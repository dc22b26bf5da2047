"""What a function launches, told by the kernels of this package (`relaunch.heard`), and whether that is all it does.

Launches stand in lanes: those of one follow one another, and a plan (`plan.py`) may run lanes side by side.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

from torch.utils._python_dispatch import TorchDispatchMode

from nsa.triton_backend import relaunch

_ALLOCATIONS = ("empty", "new_empty")
_NOTHING_DONE = ("alias", "detach", "_unsafe_view", "_reshape_alias")


class Lanes:
    """Which lanes a launch waits for."""

    def __init__(self) -> None:
        self.number = 1
        self._running: set[int] = set()
        """Lanes with launches that lane 0 has not waited for."""
        self._joined = False

    def join(self) -> None:
        self._joined = True

    def launched(self, lane: int) -> tuple[int, ...]:
        self.number = max(self.number, lane + 1)
        if lane == 0:
            return self.left() if self._joined else ()
        waits_for = () if lane in self._running else (0,)
        self._running.add(lane)
        return waits_for

    def left(self) -> tuple[int, ...]:
        """Those that lane 0 is to wait for now."""
        found, self._joined = tuple(sorted(self._running)), False
        self._running.clear()
        return found


class Recorded(NamedTuple):
    """A launch with its arguments."""

    compiled: Any
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    lane: int
    waits_for: tuple[int, ...]


class Recording(TorchDispatchMode):
    """What is launched inside a `with` block of this thread; `whole` is false where something else was done, too."""

    def __init__(self) -> None:
        super().__init__()
        self.launches: list[Recorded] = []
        self.whole = True
        self.lane, self.lanes = 0, Lanes()

    def __enter__(self) -> Recording:
        relaunch.heard.recorder = self
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        relaunch.heard.recorder = None

    def launched(self, compiled: Any, grid: tuple[int, ...], arguments: tuple[Any, ...] | None) -> None:
        """Called by kernels; no arguments where Triton launched what cannot be launched without it."""
        if arguments is None:
            self.whole = False
        else:
            waits_for = self.lanes.launched(self.lane)
            self.launches.append(Recorded(compiled, grid, arguments, self.lane, waits_for))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if not (func.is_view or name.startswith(_ALLOCATIONS) or name in _NOTHING_DONE):
            self.whole = False
        return func(*args, **(kwargs or {}))


_NOTHING = contextlib.nullcontext()


@contextlib.contextmanager
def _in_lane(recording: Recording, number: int) -> Iterator[None]:
    recording.lane = number
    yield
    recording.lane = 0


def lane(number: int) -> contextlib.AbstractContextManager[None]:
    """What is launched in this block needs nothing that was launched since the last `join`, but in lane 0 before its
    first launch, and in itself. `number` is 1 or more; all else is lane 0."""
    recorder = relaunch.heard.recorder
    return _in_lane(recorder, number) if isinstance(recorder, Recording) else _NOTHING


def join() -> None:
    """What follows may need all that was launched in any lane."""
    recorder = relaunch.heard.recorder
    if isinstance(recorder, Recording):
        recorder.lanes.join()
