"""Run a command, show and keep what it prints, and pass an interrupt on once.

The command has a session of its own, so that the terminal's Ctrl-C reaches it through this process alone. What it
prints while it ends is still read: with its pipe closed it could not end what it has started.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from harness import interrupt, repository
from harness.interrupt import INTERRUPTED


def run(command: Sequence[str], log: Path) -> tuple[int, str]:
    """(exit code, the last line that looks like JSON, "" without one) of a command in the repository's root.

    The exit code is `INTERRUPTED` where an interrupt came; negative for a signal that ended the command.
    """
    with log.open("w") as kept, interrupt.deferred() as let_through:
        process = subprocess.Popen(
            command,
            cwd=repository.ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        with process:
            try:
                let_through()
                last = _shown(process, kept)
            except KeyboardInterrupt:
                os.killpg(process.pid, signal.SIGINT)
                _shown(process, kept)
                process.wait()
                return INTERRUPTED, ""
            return process.wait(), last


def _shown(process: subprocess.Popen[str], kept: IO[str]) -> str:
    """Everything to the end of what it prints; the last line that looks like JSON."""
    assert process.stdout is not None
    last = ""
    for line in process.stdout:
        print(line, end="", flush=True)
        kept.write(line)
        last = line if line.startswith("{") else last
    return last


def as_json(line: str) -> dict[str, Any]:
    """The object that a suite's last line is; empty where it is none."""
    try:
        found = json.loads(line)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
