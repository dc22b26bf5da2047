"""The parent's end of an isolated child: start it, read its events, end it with all that is below it.

`Child` is the process, and all that a child has in common with every other: a session of its own, its log, its stacks,
its end and that of everything below. What its parent and it say to each other is theirs: events (`events`), or requests
and answers through stdin and stdout or through further open files.

`harness.watch` reads the events of a child until it has ended or was silent for too long; `harness.guard` is the
child's end.
"""

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
from collections.abc import Mapping, Sequence
from pathlib import Path
from threading import RLock
from typing import IO, Any

from harness.guard import STACKS
from harness.repository import ROOT

GRACE_S = 2.0
"""Between SIGTERM and SIGKILL."""
SCRATCH_PREFIX = "nsa-child-"
SCRATCH = "HARNESS_SCRATCH"
"""Environment variable of a child: its scratch folder, in which those of its own children lie and go with it."""
_STACKS_S = 5.0
_PY_SPY_S = 20.0
_LINES_OF_LOG = 30


class Child:
    """`python -m <module> <task as JSON>`, in a session of its own; use it as a context manager: it never outlives it.

    The task gets one more entry, `events`, the number of an open file for `harness.guard.send_event`. Unless `stdout`
    says otherwise, stdout goes where stderr goes; `log=False` leaves both as they are here.
    """

    def __init__(
        self,
        module: str,
        task: Mapping[str, Any],
        environment: Mapping[str, str] | None = None,
        *,
        cwd: Path = ROOT,
        stdin: int = subprocess.DEVNULL,
        stdout: int | None = None,
        log: bool = True,
        files: Sequence[int] = (),
        own_tmpdir: bool = False,
    ) -> None:
        """`environment` is beside this process's own, `stdin` and `stdout` are as `subprocess.Popen` takes them,
        `files` stay open in the child under the same numbers; `own_tmpdir`: TMPDIR is removed with the child."""
        self.scratch = Path(tempfile.mkdtemp(prefix=SCRATCH_PREFIX, dir=os.environ.get(SCRATCH)))
        self.worker: int | None = None
        """Process id of the worker below the guard, once it has sent it."""
        self._status: int | None = None
        self._ended = self._closed = False
        self._events, events = os.pipe()
        control, self._control = os.pipe()
        self._buffer = b""
        self._reading, self._ending = RLock(), RLock()  # another thread than the one that waits may end it
        guard = [str(events), str(control), str(self.scratch)]
        try:
            with self.log.open("wb") as file:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "harness.guard", *guard, module, json.dumps({**task, "events": events})],
                    cwd=cwd,
                    env={
                        **os.environ,
                        **dict.fromkeys((SCRATCH, "TMPDIR") if own_tmpdir else (SCRATCH,), str(self.scratch)),
                        **(environment or {}),
                    },
                    stdin=stdin,
                    stdout=file if stdout is None and log else stdout,
                    stderr=file if log else None,
                    pass_fds=(events, control, *files),
                    start_new_session=True,
                )
        finally:
            os.close(events)
            os.close(control)

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End it and leave nothing behind."""
        self.end()
        with self._ending, self._reading:
            if self._closed:
                return
            for pipe in (self._process.stdin, self._process.stdout):
                if pipe is not None:
                    with contextlib.suppress(BrokenPipeError):  # of a request that a child which died has never read
                        pipe.close()
            os.close(self._events)
            os.close(self._control)
            self._closed = True
        shutil.rmtree(self.scratch, ignore_errors=True)

    @property
    def stdin(self) -> IO[bytes]:
        """The pipe to its stdin, if it has one."""
        assert self._process.stdin is not None
        return self._process.stdin

    @property
    def stdout(self) -> IO[bytes]:
        """The pipe from its stdout, if it has one."""
        assert self._process.stdout is not None
        return self._process.stdout

    @property
    def log(self) -> Path:
        """Its stderr, and its stdout where that has no other way."""
        return self.scratch / "log"

    @property
    def stacks_file(self) -> Path:
        """Where faulthandler writes."""
        return self.scratch / STACKS

    @property
    def running(self) -> bool:
        """Whether the guard is there still."""
        return self._process.poll() is None

    def log_tail(self) -> str:
        """The end of its log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-_LINES_OF_LOG:])

    def events(self, wait_s: float) -> list[dict[str, Any]]:
        """What it has sent since the last call; waits this long for the first."""
        with self._reading:
            if not select.select([self._events], [], [], wait_s)[0]:
                return []
            self._buffer += os.read(self._events, 2**16)
            *lines, self._buffer = self._buffer.split(b"\n")
            events: list[dict[str, Any]] = [json.loads(line) for line in lines]
            for event in events:
                if event["event"] == "started":
                    self.worker = event["pid"]
                elif event["event"] == "ended":
                    self._status = event["status"]
            return events

    def wait(self, timeout_s: float | None = None) -> int:
        """The worker's exit status, negative for a signal, or the guard's where that did not live to send it.

        Raises subprocess.TimeoutExpired. For a child that sends few events: nobody else reads them meanwhile.
        """
        status = self._process.wait(timeout_s)
        with self._reading:
            while self._status is None and not self._closed and self.events(0.0):
                pass
        return status if self._status is None else self._status

    def communicate(self, timeout_s: float) -> bytes:
        """All that it writes to stdout until it has ended. Raises subprocess.TimeoutExpired."""
        return self._process.communicate(timeout=timeout_s)[0]

    def threads(self, within_s: float) -> str:
        """Where all its threads are now, as faulthandler says it; "" if nothing came in this time."""
        if self.worker is None or not self.running:
            return ""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.worker, signal.SIGUSR1)
        return _read_when_written(self.stacks_file, within_s)

    def stacks(self) -> str:
        """Where all its threads are now: faulthandler's view, and py-spy's where that is installed."""
        if self.worker is None or not self.running:
            return "the child has not said where it is"
        found = self.threads(_STACKS_S)
        spy = shutil.which("py-spy")
        if spy is not None:
            command = [spy, "dump", "--pid", str(self.worker)]
            with contextlib.suppress(subprocess.TimeoutExpired):
                done = subprocess.run(command, capture_output=True, text=True, timeout=_PY_SPY_S)
                found += f"\npy-spy: {done.stdout or done.stderr}"
        found = found.replace(f"{ROOT}{os.sep}", "")  # a record travels: it names files as the repository does
        return found.strip() or "no stack within 5 s: the process does not take signals"

    def end(self, grace_s: float = GRACE_S) -> None:
        """SIGTERM to the group; after a grace SIGKILL to everything below; wait. Nothing happens if it has ended.

        From any thread: who waits for the child is told of its end.
        """
        with self._ending:
            if self._ended:
                return
            if grace_s and self.running:
                self._signal_group(signal.SIGTERM)
                self._wait_for_guard(grace_s)
            if self.running:
                with contextlib.suppress(BrokenPipeError):  # it has gone by itself
                    os.write(self._control, b"x")
                self._wait_for_guard(GRACE_S)
            self._signal_group(signal.SIGKILL)  # also where the guard itself was killed
            with contextlib.suppress(ValueError, TypeError, KeyError):  # what it has sent that cannot be read
                self.wait()
            self._ended = True

    def _wait_for_guard(self, timeout_s: float) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s)

    def _signal_group(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS says the latter of a group of zombies
            os.killpg(self._process.pid, number)


def _read_when_written(path: Path, within_s: float) -> str:
    """A file's text once it has stopped growing; "" if nothing came."""
    end, size = time.monotonic() + within_s, 0
    while time.monotonic() < end:
        time.sleep(0.2)
        now = path.stat().st_size if path.exists() else 0
        if now and now == size:
            break
        size = now
    return path.read_text(errors="replace") if path.exists() else ""
