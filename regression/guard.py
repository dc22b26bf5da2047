"""The process between the runner and a repro: it outlives a runner that is killed just long enough to end the rest.

It holds the *leash*, a pipe from the runner. When the leash breaks (the runner is gone, however it went) or a byte
comes through it (the runner wants the repro ended), every descendant is killed, by way of Linux's subreaper also those
that left the process group or whose parent has gone. It never imports PyTorch, so that nothing can block it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil

_POLL_S = 0.05
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def run(work: Callable[[], int], leash: int, scratch: Path, ended: Callable[[int], None]) -> None:
    """Fork; do `work` in the child, guard it in this process, and call `ended` with its status (negative: a signal).

    This process must be the leader of its session. `scratch` is removed if the runner is gone.
    """
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    guard = os.getpid()
    worker = os.fork()
    if worker == 0:
        os.close(leash)
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != guard:  # it went between fork and prctl
            os._exit(1)
        os._exit(work())
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the runner's request to the group is meant for the repro
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    status = _wait(worker, leash)
    runner_is_gone = status is None and not _told_to_end(leash)
    end_descendants()
    if status is None:
        status = _reap(worker)
    with contextlib.suppress(OSError):  # the runner may be gone
        ended(status)
    if runner_is_gone:
        shutil.rmtree(scratch, ignore_errors=True)


def _wait(worker: int, leash: int) -> int | None:
    """The worker's status, or None as soon as the leash says that it must end."""
    while True:
        if select.select([leash], [], [], _POLL_S)[0]:
            return None
        pid, status = os.waitpid(-1, os.WNOHANG)  # also orphans that became ours
        if pid == worker:
            return os.waitstatus_to_exitcode(status)


def _told_to_end(leash: int) -> bool:
    return bool(os.read(leash, 1))


def _reap(worker: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1])


def end_descendants() -> None:
    """SIGKILL everything below this process, until nothing of it runs."""
    while living := [child for child in psutil.Process().children(recursive=True) if _runs(child)]:
        for child in living:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        time.sleep(_POLL_S / 5)


def _runs(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    return False


def _prctl(option: int, value: int) -> None:
    """Linux only; elsewhere the leash alone holds."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, ctypes.c_ulong(value), 0, 0, 0)
