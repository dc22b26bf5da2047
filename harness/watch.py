"""Watch a child that sends events, until it has ended or has been silent for longer than its deadline allows.

The deadline is scaled from the child's own pace: nothing is a fixed number of seconds but the floors.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from threading import Event
from typing import Any

from harness.interrupt import CancelledError
from harness.isolate import Child

IMPORT_FLOOR_S = 60.0
IMPORTS_PER_FIRST_STEP = 30
"""The first step may compile kernels: as many times the child's own import as this, which scales with the machine."""
MEDIANS_PER_STEP = 10
LONGEST_PER_STEP = 3
IMPORTS_PER_STEP = 2
_POLL_S = 0.1


@dataclass
class Deadline:
    """The silence that a child is allowed, from the times of its own clock at which it made its steps."""

    floor_s: float
    """Silence between two steps that never counts as a stall."""
    known_import_s: float = 0.0
    """What importing took elsewhere on this machine; 0 where it is not known."""
    import_s: float | None = None
    """What it took in this child."""
    first_step_s: float | None = None
    """Import to first step: compilation, first batch."""
    steps_s: list[float] = field(default_factory=list)
    """Each later step."""
    _last: float | None = None

    def on_event(self, event: Mapping[str, Any]) -> None:
        """Take the time of an event that moves the deadline; others do not."""
        if event["event"] == "imported":
            self.imported(event["at"], event["import_s"])
        elif event["event"] == "step":
            self.step(event["at"])

    def imported(self, at: float, import_s: float) -> None:
        """The child has imported what it needs, at this time of its monotonic clock."""
        self.import_s, self._last = import_s, at

    def step(self, at: float) -> None:
        """A heartbeat."""
        if self._last is not None:
            took = max(at - self._last, 0.0)
            if self.first_step_s is None:
                self.first_step_s = took
            else:
                self.steps_s.append(took)
        self._last = at

    @property
    def allowed_s(self) -> float:
        """Silence after which the child counts as stalled."""
        if self.import_s is None:
            return max(IMPORT_FLOOR_S, IMPORTS_PER_FIRST_STEP * self.known_import_s)
        if self.first_step_s is None:
            return max(self.floor_s, IMPORTS_PER_FIRST_STEP * self.import_s)
        if not self.steps_s:  # the first step's length says little of the next one's, unless it was long
            return max(self.floor_s, IMPORTS_PER_STEP * self.import_s, LONGEST_PER_STEP * self.first_step_s)
        return max(
            self.floor_s,
            IMPORTS_PER_STEP * self.import_s,
            MEDIANS_PER_STEP * statistics.median(self.steps_s),
            LONGEST_PER_STEP * max(self.steps_s),
        )

    @property
    def longest_s(self) -> float | None:
        """The longest silence after the import; None before the first step."""
        return None if self.first_step_s is None else max(self.first_step_s, *self.steps_s, 0.0)


@dataclass
class ChildEnd:
    """How a child ended, or why it was ended."""

    status: int | None = None
    """Exit status; negative is a signal. None where the guard did not live to send it."""
    stalled_after_s: float | None = None
    """Silence after which it counts as stalled; None if it does not."""
    stacks: str | None = None
    """All threads of one that stalled."""
    unreadable: str | None = None
    """Why an event that it sent cannot be read; None if all could."""
    log_tail: str = ""


def watch(
    child: Child, deadline: Deadline, stop: Event, on_event: Callable[[Mapping[str, Any]], None] = lambda event: None
) -> ChildEnd:
    """Until the child has ended, stalled, or sent what cannot be read; `on_event` gets each event.

    Raises CancelledError once `stop` is set.
    """
    end, last_event_s = ChildEnd(), time.monotonic()
    while end.status is None:
        if stop.is_set():
            raise CancelledError
        running = child.running  # before the events: what a process sent before it ended is all in the pipe
        try:
            events = child.events(_POLL_S)
            for event in events:
                deadline.on_event(event)
                on_event(event)
                if event["event"] == "ended":
                    end.status = event["status"]
        except (ValueError, TypeError, KeyError) as error:  # a fault of this child alone, not of the suite
            end.unreadable = f"{type(error).__name__}: {error}"
            break
        if events:
            last_event_s = time.monotonic()
        elif not running:  # the guard itself was killed
            break
        elif time.monotonic() - last_event_s > deadline.allowed_s:
            end.stalled_after_s, end.stacks = time.monotonic() - last_event_s, child.stacks()
            break
    end.log_tail = child.log_tail()
    return end
