"""Workers that end in ways a guard must cope with, without PyTorch: python -m tests.harness.workers <task as JSON>."""

from __future__ import annotations

import ctypes
import faulthandler
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from harness import guard, isolate

Step = Callable[..., None]
PIDS = "HARNESS_TEST_PIDS"
"""Environment variable: the file in which `stalls` leaves the ids of its processes."""
SIGNAL = "HARNESS_TEST_SIGNAL"
"""Environment variable: the signal by which any task ends at once."""
_SLEEP = [sys.executable, "-c", "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"]


def ends(step: Step) -> None:
    for n in range(3):
        step(n)
    print("the end of the log")
    sys.stdout.flush()


def segfaults(_step: Step) -> None:
    ctypes.string_at(0)


def kills_its_guard(_step: Step) -> None:
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(600)


def stalls(step: Step) -> None:
    """Deaf to SIGTERM, holds the interpreter's lock, and so do its children: in its group, and outside of it."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    near = subprocess.Popen(_SLEEP)
    far = subprocess.Popen(_SLEEP, start_new_session=True)
    orphaned = (
        f"import subprocess; print(subprocess.Popen({_SLEEP!r}, stdout=subprocess.DEVNULL, start_new_session=True).pid)"
    )
    orphan = subprocess.check_output([sys.executable, "-c", orphaned], text=True)  # its parent ends at once
    if PIDS in os.environ:
        part = Path(os.environ[PIDS] + ".part")
        part.write_text(f"{os.getpid()} {os.getppid()} {near.pid} {far.pid} {orphan}")
        part.rename(os.environ[PIDS])
    step(0)
    while True:
        ctypes.PyDLL(None).sleep(600)  # unlike CDLL it keeps the lock; a signal ends one sleep


def starts_a_child(step: Step) -> None:
    """Whose scratch folder nobody but the grandparent can remove, once both are killed at the same time."""
    child = isolate.Child("tests.harness.workers", {"function": "ends"})
    step(0, pid=child._process.pid)
    while True:
        time.sleep(600)


def answers(_step: Step) -> None:
    print(sys.stdin.readline().upper())
    print("a warning", file=sys.stderr)
    sys.exit(3)


def leaves_a_process(step: Step) -> None:
    child = subprocess.Popen(_SLEEP, start_new_session=True)
    step(0, pid=child.pid)


def main() -> None:
    """Do what the task names, or die."""
    if SIGNAL in os.environ:
        os.kill(os.getpid(), int(os.environ[SIGNAL]))
    faulthandler.enable()
    task = json.loads(sys.argv[1])
    begin = time.monotonic()

    def step(n: int, **figures: float) -> None:
        guard.send_event(task["events"], "step", n=n, figures=figures)

    guard.send_event(task["events"], "imported", import_s=time.monotonic() - begin)
    globals()[task["function"]](step)


if __name__ == "__main__":
    main()
