"""The parent's end of an isolated child: start it, read its events, end it with all that is below it.

`Child` is the process, and all that a child has in common with every other: a session of its own, its log, its stacks,
its end and that of everything below. What its parent and it say to each other is theirs: events (`events`), or requests
and answers through stdin and stdout or through further open files.

For a child that sends events, `Deadline` is how long it may be silent, scaled from its own pace (nothing is a fixed
number of seconds but the floors), and `watch` reads the one until it has ended or has exceeded the other.
`harness.guard` is the child's end.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event, RLock
from typing import IO, Any

from harness.guard import STACKS
from harness.interrupt import CancelledError
from harness.repository import ROOT

GRACE_S = 2.0
"""Between SIGTERM and SIGKILL."""
IMPORT_FLOOR_S = 60.0
IMPORTS_PER_FIRST_STEP = 30
"""The first step may compile kernels: as many times the child's own import as this, which scales with the machine."""
MEDIANS_PER_STEP = 10
LONGEST_PER_STEP = 3
IMPORTS_PER_STEP = 2
SCRATCH_PREFIX = "nsa-child-"
SCRATCH = "HARNESS_SCRATCH"
"""Environment variable of a child: its scratch folder, in which those of its own children lie and go with it."""
_POLL_S = 0.1
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
class Outcome:
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
) -> Outcome:
    """Until the child has ended, stalled, or sent what cannot be read; `on_event` gets each event.

    Raises CancelledError once `stop` is set.
    """
    outcome, last_event_s = Outcome(), time.monotonic()
    while outcome.status is None:
        if stop.is_set():
            raise CancelledError
        running = child.running  # before the events: what a process sent before it ended is all in the pipe
        try:
            events = child.events(_POLL_S)
            for event in events:
                deadline.on_event(event)
                on_event(event)
                if event["event"] == "ended":
                    outcome.status = event["status"]
        except (ValueError, TypeError, KeyError) as error:  # a fault of this child alone, not of the suite
            outcome.unreadable = f"{type(error).__name__}: {error}"
            break
        if events:
            last_event_s = time.monotonic()
        elif not running:  # the guard itself was killed
            break
        elif time.monotonic() - last_event_s > deadline.allowed_s:
            outcome.stalled_after_s, outcome.stacks = time.monotonic() - last_event_s, child.stacks()
            break
    outcome.log_tail = child.log_tail()
    return outcome
