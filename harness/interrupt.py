"""What every command does that is interrupted: it raises `KeyboardInterrupt` or this, and ends with this code."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

INTERRUPTED = 128 + signal.SIGINT
"""Exit code, as shells have it."""
_ASKED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class CancelledError(Exception):
    """The run was interrupted; what it started has ended."""


@contextmanager
def deferred() -> Iterator[Callable[[], None]]:
    """Keep interrupts waiting while a process is started: one that came in between would leave it running, unknown.

    Yields a function that lets them through again, and raises KeyboardInterrupt if one came. In the main thread only.
    """
    came: list[int] = []
    handlers = {asked: handler for asked in _ASKED if callable(handler := signal.getsignal(asked))}
    for asked in handlers:
        signal.signal(asked, lambda number, _: came.append(number))

    def restore() -> None:
        while handlers:
            signal.signal(*handlers.popitem())

    def let_through() -> None:
        restore()
        if came:
            raise KeyboardInterrupt

    try:
        yield let_through
    finally:
        restore()
