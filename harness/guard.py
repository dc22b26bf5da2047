"""The guard: a process between a parent and a worker, which outlives a parent that is killed just long enough.

`python -m harness.guard EVENTS CONTROL SCRATCH MODULE TASK` forks: the forked process becomes `python -m MODULE TASK`,
this one guards it. `harness.isolate.Child` starts it. The guard holds the read end of the *control pipe* from the
parent. When that pipe breaks (the parent is gone, however it went) or a byte comes through it (the parent
wants the worker ended), every descendant is killed, by way of Linux's subreaper also those that left the process group
or whose parent has gone. The guard never imports PyTorch, so that nothing can block it, and the worker is
forked before anything has used CUDA or started a thread.

`send_event` is what a worker tells its parent: one line of JSON per event, each in one write. `harness.isolate` is the
parent's end; it understands the events `started`, `imported` (`import_s`), `step` and `ended` (`status`).
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import json
import os
import runpy
import select
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

import psutil

from harness import package_folder

STACKS = "stacks"
"""File in the scratch folder to which faulthandler writes all threads on SIGUSR1."""
_POLL_S = 0.01
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def send_event(events: int, event: str, **facts: Any) -> None:
    """Write one event to the pipe. NaN is refused: None is what is not known to be finite."""
    line = json.dumps({"event": event, "at": time.monotonic(), **facts}, separators=(",", ":"), allow_nan=False) + "\n"
    data = line.encode()
    while data:
        data = data[os.write(events, data) :]


def main() -> None:
    """Guard the module that the arguments name."""
    events, control, scratch, module, *task = sys.argv[1:]
    if fork(int(events), int(control), Path(scratch)):
        package_folder.keep()
        sys.argv = [module, *task]
        runpy.run_module(module, run_name="__main__", alter_sys=True)


def fork(events: int, control: int, scratch: Path) -> bool:
    """True in a new process, the worker; False in this one, which guards it, once everything below has ended.

    `started` and `ended` are sent to `events`; the status of `ended` is negative for a signal. This process must be the
    leader of its session. `scratch` is removed if the parent is gone.
    """
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    guard = os.getpid()
    child_ended = _notified_of_children()
    worker = os.fork()
    if worker == 0:
        os.close(control)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != guard:  # it went between fork and prctl
            os._exit(1)
        _start_worker(events, scratch)
        return True
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the parent's request to the group is meant for the worker
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    status = _wait(worker, control, child_ended)
    parent_is_gone = status is None and not _asked_to_end(control)
    end_descendants()
    if status is None:
        status = _reap(worker)
    with contextlib.suppress(OSError):  # the parent may be gone
        send_event(events, "ended", status=status)
    if parent_is_gone:
        shutil.rmtree(scratch, ignore_errors=True)
    return False


def _start_worker(events: int, scratch: Path) -> None:
    stacks = (scratch / STACKS).open("wb")
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    send_event(events, "started", pid=os.getpid())


def _notified_of_children() -> int:
    """A pipe in which bytes come as children end, so that a guard beside a measurement sleeps until then."""
    ended, write = os.pipe()
    os.set_blocking(write, False)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)  # ignored, as it is by default, it would wake nobody
    return ended


def _wait(worker: int, control: int, child_ended: int) -> int | None:
    """The worker's status, or None as soon as the control pipe says that it must end."""
    while True:
        if control in select.select([control, child_ended], [], [])[0]:
            return None
        os.read(child_ended, 2**12)
        pid = -1
        while pid:  # also orphans that became ours; one signal may stand for several
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == worker:
                return os.waitstatus_to_exitcode(status)


def _asked_to_end(control: int) -> bool:
    return bool(os.read(control, 1))


def _reap(worker: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1])


def end_descendants() -> None:
    """SIGKILL everything below this process, until nothing of it runs."""
    while living := [child for child in psutil.Process().children(recursive=True) if _runs(child)]:
        for child in living:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        time.sleep(_POLL_S)


def _runs(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    return False


def _prctl(option: int, value: int) -> None:
    """Linux only; elsewhere the control pipe alone holds."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, ctypes.c_ulong(value), 0, 0, 0)


if __name__ == "__main__":
    main()
