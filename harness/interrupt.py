"""What every command does that is interrupted: it raises `KeyboardInterrupt` or this, and ends with this code."""

from __future__ import annotations

import signal

INTERRUPTED = 128 + signal.SIGINT
"""Exit code, as shells have it."""


class CancelledError(Exception):
    """The run was interrupted; what it started has ended."""
