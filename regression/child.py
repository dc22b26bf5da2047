"""The child of one repro: `python -m regression.child <task as JSON>`, below the guard of `harness.isolate.Child`."""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import importlib
import importlib.util
import json
import os
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from harness import forced
from harness.guard import send_event
from regression.contract import Evidence

_CPU_ALLOCATOR = "can't allocate memory"  # what PyTorch's RuntimeError says there


@dataclass(frozen=True)
class Task:
    """What to run, as it comes through the command line."""

    module: str
    """"regression.incidents.step5_stall"."""
    function: str
    """"faulty" or "product"."""
    device: str
    """"cpu" or "cuda"."""
    inject: str | None
    """The module of the incident whose fault is put into the product first; None for the healthy one."""
    options: Mapping[str, Any]
    """Further arguments of the function."""
    events: int


@dataclass(frozen=True)
class Heartbeat:
    """The `step` that a repro calls; see `regression.contract.Step`."""

    events: int
    device: str
    backends: tuple[str, ...]

    def __call__(self, n: int, **figures: float) -> None:
        finite = {name: value if abs(value) < float("inf") else None for name, value in figures.items()}
        send_event(self.events, "step", n=n, figures=finite)


def main() -> None:
    """Run the task in the first argument; what the repro found is sent, whatever happens to it."""
    faulthandler.enable()  # a crash in C shows its Python stack in the log
    task = Task(**json.loads(sys.argv[1]))
    try:
        evidence = _run(task, time.monotonic())
    except BaseException as error:  # also SystemExit and KeyboardInterrupt: it is the repro's, not ours
        traceback.print_exc()
        evidence = of_exception(error)
    send_event(task.events, "evidence", evidence=dataclasses.asdict(evidence))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # threads that the repro left do not hold it up


def _run(task: Task, begin: float) -> Evidence:
    runnable = prepare(task.device)
    module = importlib.import_module(task.module)
    injected = importlib.import_module(task.inject).inject() if task.inject else contextlib.nullcontext()
    function: Callable[..., Evidence] = getattr(module, task.function)
    send_event(task.events, "imported", import_s=time.monotonic() - begin)
    with injected:
        return function(Heartbeat(task.events, task.device, runnable), **task.options)


def prepare(device: str) -> tuple[str, ...]:
    """Make this process ready for the device; NSA's backends that run on it."""
    if device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are imported
        import torch

        from harness import triton_interpreter

        torch.set_num_threads(1)  # calls this small are not shared: threads that wait for a busy core cost more
        triton_interpreter.prepare()
        # NumPy warns of the NaN and Inf that a GPU takes in silence
        warnings.filterwarnings("ignore", category=RuntimeWarning, module=r"triton\.runtime\.interpreter")
    else:
        forced.cap_memory()
    return backends()


def backends() -> tuple[str, ...]:
    """NSA's backends that can be imported here: "triton" only where Triton is installed."""
    has_triton = importlib.util.find_spec("triton") is not None
    return ("reference", "torch", "triton") if has_triton else ("reference", "torch")


def of_exception(error: BaseException) -> Evidence:
    """An exception that nobody expected, told apart from memory that ran out."""
    words = f"{type(error).__name__}: {error}".strip()
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError" or _CPU_ALLOCATOR in words:
        return Evidence(out_of_memory=words, uncaught=True)
    return Evidence(exception=words, uncaught=True)


if __name__ == "__main__":
    main()
