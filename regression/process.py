"""The runner's end of one child: start it, read what it tells, take its stacks, end it with all that is below it."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.history.fingerprint import ROOT

GRACE_S = 2.0
"""Between SIGTERM and SIGKILL."""
_STACKS_S = 5.0
_PY_SPY_S = 20.0
_LINES_OF_LOG = 30


class Child:
    """`python -m <module> <task as JSON>`, in a session of its own; use it as a context manager: it never outlives it.

    The task gets three more entries: `events` and `leash`, numbers of open files, and `scratch`, a folder that is
    TMPDIR for all that runs below and is removed at the end. See `regression.guard` for the other end.
    """

    def __init__(self, module: str, task: Mapping[str, Any], environment: Mapping[str, str] | None = None) -> None:
        self.scratch = Path(tempfile.mkdtemp(prefix="nsa-regression-"))
        self.worker: int | None = None
        """Process id of the repro itself, once it has told it."""
        self._events, events = os.pipe()
        leash, self._leash = os.pipe()
        self._buffer = b""
        told = {**task, "events": events, "leash": leash, "scratch": str(self.scratch)}
        try:
            with self.log.open("wb") as log:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", module, json.dumps(told)],
                    cwd=ROOT,
                    env={**os.environ, **(environment or {}), "TMPDIR": str(self.scratch)},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    pass_fds=(events, leash),
                    start_new_session=True,
                )
        finally:
            os.close(events)
            os.close(leash)

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()
        os.close(self._events)
        os.close(self._leash)
        shutil.rmtree(self.scratch, ignore_errors=True)

    @property
    def log(self) -> Path:
        """Its stdout and stderr."""
        return self.scratch / "log"

    @property
    def stacks_file(self) -> Path:
        """Where faulthandler writes."""
        return self.scratch / "stacks"

    @property
    def running(self) -> bool:
        """Whether the guard is there still."""
        return self._process.poll() is None

    def last_words(self) -> str:
        """The end of its log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-_LINES_OF_LOG:])

    def events(self, wait_s: float) -> list[dict[str, Any]]:
        """What it has told since the last call; waits this long for the first."""
        if not select.select([self._events], [], [], wait_s)[0]:
            return []
        self._buffer += os.read(self._events, 2**16)
        *lines, self._buffer = self._buffer.split(b"\n")
        events: list[dict[str, Any]] = [json.loads(line) for line in lines]
        for event in events:
            if event["event"] == "started":
                self.worker = event["pid"]
        return events

    def stacks(self) -> str:
        """Where all its threads are now: faulthandler's view, and py-spy's where that is installed."""
        if self.worker is None or not self.running:
            return "the child has not said where it is"
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.worker, signal.SIGUSR1)
        found = _settled(self.stacks_file)
        spy = shutil.which("py-spy")
        if spy is not None:
            command = [spy, "dump", "--pid", str(self.worker)]
            with contextlib.suppress(subprocess.TimeoutExpired):
                done = subprocess.run(command, capture_output=True, text=True, timeout=_PY_SPY_S)
                found += f"\npy-spy: {done.stdout or done.stderr}"
        found = found.replace(f"{ROOT}{os.sep}", "")  # a record travels: it names files as the repository does
        return found.strip() or "no stack within 5 s: the process does not take signals"

    def end(self) -> None:
        """SIGTERM to the group; after a grace SIGKILL to everything below; wait. Nothing happens if it has ended."""
        if self.running:
            self._signal_group(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(GRACE_S)
        if self.running:
            os.write(self._leash, b"x")
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(GRACE_S)
        self._signal_group(signal.SIGKILL)  # also where the guard itself was killed
        self._process.wait()

    def _signal_group(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS says the latter of a group of zombies
            os.killpg(self._process.pid, number)


def _settled(path: Path) -> str:
    """A file's text once it has stopped growing; "" if nothing came."""
    end, size = time.monotonic() + _STACKS_S, 0
    while time.monotonic() < end:
        time.sleep(0.2)
        now = path.stat().st_size if path.exists() else 0
        if now and now == size:
            break
        size = now
    return path.read_text(errors="replace") if path.exists() else ""
