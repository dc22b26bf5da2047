"""Repros that end in every way a process can, for the runner's tests; none needs PyTorch."""

from __future__ import annotations

import ctypes
import os
import sys
import time
from contextlib import AbstractContextManager

from regression.contract import Bound, Evidence, Incident, ReproVerdict, Step
from regression.injection import Fault, injected
from tests.harness import workers

INCIDENT = Incident(
    id="a-repro",
    symptom="s",
    cause="c",
    detector="d",
    expects=ReproVerdict.WRONG,
    floor_s=1.0,
)


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


def names_its_backends(step: Step) -> Evidence:
    return Evidence(wrong=(), notes=step.backends)


def wrong(_step: Step) -> Evidence:
    return Evidence(wrong=("row 3",))


def gives_the_wrong_type(_step: Step) -> Evidence:
    return Evidence(wrong="row 3")  # type: ignore[arg-type]


def garbles_an_event(step: Step) -> Evidence:
    os.write(step.events, b"not JSON\n")  # type: ignore[attr-defined]
    return Evidence(wrong=())


def leaves_a_word_out(step: Step) -> Evidence:
    os.write(step.events, b'{"event": "step"}\n')  # type: ignore[attr-defined]
    return Evidence(wrong=())


def a_graph_of_a_host_sync(_step: Step) -> Evidence:
    """A capture that fails may leave its process unfit for CUDA: it has one of its own."""
    from regression.incidents import step2_stall

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
    print("last line")
    sys.stdout.flush()
    os._exit(3)


def segfaults(_step: Step) -> Evidence:
    ctypes.string_at(0)
    raise AssertionError


def kills_its_guard(step: Step) -> Evidence:
    workers.kills_its_guard(step)
    raise AssertionError


def slow_but_alive(step: Step) -> Evidence:
    """Silent for longer than the floor, at its own pace."""
    for n in range(3):
        time.sleep(0.7)
        step(n)
    time.sleep(2.0)
    return Evidence(wrong=())


def stalls(step: Step) -> Evidence:
    workers.stalls(step)
    raise AssertionError


def poisons_the_context(_step: Step) -> Evidence:
    """A read past the end, which leaves no CUDA call of this process usable."""
    import torch

    x, i = torch.zeros(4, device="cuda"), torch.tensor([7], device="cuda")
    x[i].cpu()
    raise AssertionError


def uses_the_gpu(_step: Step) -> Evidence:
    import torch

    return Evidence(wrong=() if torch.ones(4, device="cuda").sum().item() == 4 else ("4 is not 4",))
