"""Repros that end in every way a process can, for the runner's tests; none needs PyTorch."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from contextlib import AbstractContextManager
from pathlib import Path

from regression.evidence import Bound, Evidence
from regression.incident import Incident, Step
from regression.injection import Fault, injected
from regression.verdict import Verdict

INCIDENT = Incident(
    id="a-repro",
    symptom="s",
    cause="c",
    detector="d",
    expects=Verdict.WRONG,
    floor_s=1.0,
)
PIDS = "REGRESSION_TEST_PIDS"
"""Environment variable: the file in which `stalls` leaves the ids of its processes."""
_SLEEP = [sys.executable, "-c", "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"]


def passes(step: Step) -> Evidence:
    for n in range(3):
        step(n, loss=1.0 / (n + 1), bad=float("nan"), low=float("-inf"))
    return Evidence(wrong=(), error=Bound(1.0, 2.0))


def faulty(step: Step) -> Evidence:
    """A fault that its detector does not see."""
    return passes(step)


def product(step: Step) -> Evidence:
    return passes(step)


def inject() -> AbstractContextManager[None]:
    """A fault that `product` does not enter."""
    return injected(Fault(sys.modules[__name__], "segfaults", raises))


def wrong(_step: Step) -> Evidence:
    return Evidence(wrong=("row 3",))


def gives_the_wrong_type(_step: Step) -> Evidence:
    return Evidence(wrong="row 3")  # type: ignore[arg-type]


def garbles_an_event(step: Step) -> Evidence:
    os.write(step.fd, b"not JSON\n")  # type: ignore[attr-defined]
    return Evidence(wrong=())


def leaves_a_word_out(step: Step) -> Evidence:
    os.write(step.fd, b'{"event": "step"}\n')  # type: ignore[attr-defined]
    return Evidence(wrong=())


def a_graph_of_a_host_sync(_step: Step) -> Evidence:
    """A capture that fails may leave its process unfit for CUDA: it has one of its own."""
    from regression import step2_stall

    with step2_stall.inject():
        why = step2_stall._captured("torch")
    return Evidence(wrong=() if why is None else (why,))


def says_nothing(_step: Step) -> Evidence:
    return Evidence()


def skips(_step: Step) -> Evidence:
    return Evidence(skipped="no mood")


def raises(_step: Step) -> Evidence:
    raise KeyError("k")


def runs_out_of_memory(_step: Step) -> Evidence:
    raise MemoryError("no more")


def exits(_step: Step) -> Evidence:
    print("last words")
    sys.stdout.flush()
    os._exit(3)


def segfaults(_step: Step) -> Evidence:
    ctypes.string_at(0)
    raise AssertionError


def kills_its_guard(_step: Step) -> Evidence:
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(600)
    raise AssertionError


def slow_but_alive(step: Step) -> Evidence:
    """Silent for longer than the floor, at its own pace."""
    for n in range(3):
        time.sleep(0.7)
        step(n)
    time.sleep(2.0)
    return Evidence(wrong=())


def stalls(step: Step) -> Evidence:
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


def poisons_the_context(_step: Step) -> Evidence:
    """A read past the end, which leaves no CUDA call of this process usable."""
    import torch

    x, i = torch.zeros(4, device="cuda"), torch.tensor([7], device="cuda")
    x[i].cpu()
    raise AssertionError


def uses_the_gpu(_step: Step) -> Evidence:
    import torch

    return Evidence(wrong=() if torch.ones(4, device="cuda").sum().item() == 4 else ("4 is not 4",))


def leaves_a_process(step: Step) -> Evidence:
    child = subprocess.Popen(_SLEEP, start_new_session=True)
    step(0, pid=child.pid)
    return Evidence(wrong=())
