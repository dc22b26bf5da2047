"""Makes a command of the benches take a fake board for this machine's GPU, while the CPU is what is measured.

In this process: `install`. In a new one: `variables`, whose PYTHONPATH leads to `path/sitecustomize.py`, which asks
`patches` in the process of a command alone; the processes that measure are left as they are, since they compare their
own functions with their files.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import sys
from collections.abc import Callable, Mapping
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tests.fake_nvml.boards import BOARDS, Board
from tests.fake_nvml.library import PATH, UUID, FakeNvml

VARIABLE, OTHER_PID = "FAKE_NVML_BOARD", "FAKE_NVML_OTHER_PID"
SAID = "fake GPU, the figures are this CPU's"
_POLL_S = 10.0
"""Of the fake's own time, which passes only in sleeps."""

Patch = Callable[[ModuleType, Callable[[Any, str, Any], None]], None]


def variables(board: str, other_pid: int | None = None) -> dict[str, str]:
    """The environment of a new process whose GPU is this one."""
    before = os.environ.get("PYTHONPATH", "")
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(PATH), str(PATH.parents[2]), *before.split(os.pathsep)]),
        VARIABLE: board,
        OTHER_PID: "" if other_pid is None else str(other_pid),
    }


def told(environment: Mapping[str, str] = os.environ) -> FakeNvml:
    """The library that these variables ask for."""
    other = environment.get(OTHER_PID)
    return FakeNvml(BOARDS[environment[VARIABLE]], int(other) if other else None)


def install(monkeypatch: pytest.MonkeyPatch, board: Board, other_pid: int | None = None) -> FakeNvml:
    """Until the end of the test. Returns the library, which counts what it is asked."""
    from harness import nvml

    library = FakeNvml(board, other_pid)
    monkeypatch.setitem(sys.modules, "pynvml", library)
    for name, patch in patches(board).items():
        __import__(name)
        patch(sys.modules[name], monkeypatch.setattr)
    for name in ("device", "_slice_handle"):  # which remember what they found, also beyond this test
        monkeypatch.setattr(nvml, name, functools.cache(getattr(nvml, name).__wrapped__))
    return library


def patches(board: Board) -> dict[str, Patch]:
    """What changes in each module once it is imported."""

    def torch_cuda(cuda: ModuleType, put: Callable[[Any, str, Any], None]) -> None:
        major, minor = board.compute_capability
        seen = SimpleNamespace(
            name=board.name, uuid=UUID, major=major, minor=minor, multi_processor_count=board.sms, L2_cache_size=0
        )
        put(cuda, "current_device", lambda: 0)
        put(cuda, "get_device_properties", lambda device: seen)
        put(cuda, "get_device_name", lambda: board.name)

    def machines(module: ModuleType, put: Callable[[Any, str, Any], None]) -> None:
        recognise = module.recognise

        def on_the_cpu(gpu: Any) -> Any:
            found = recognise(gpu)
            if found.device == "cpu":
                return found
            return dataclasses.replace(found, device="cpu", suite="cpu", title=f"{SAID}: {found.title}")

        def visible_gpu() -> Any:
            from harness import nvml

            settings = nvml.settings()
            capped_w = None if settings is None else settings.capped_w
            return module.Gpu(board.name, board.compute_capability, sms=board.sms, capped_w=capped_w)

        put(module, "visible_gpu", visible_gpu)
        put(module, "recognise", on_the_cpu)

    def fingerprint(module: ModuleType, put: Callable[[Any, str, Any], None]) -> None:
        take = module.take

        def as_of_a_gpu(machine: str, device: str, measured_peak: Any = None) -> Any:
            found = take(machine, device if machine == "cpu" else "cuda", measured_peak)
            return dataclasses.replace(found, cpu=f"{found.cpu} ({SAID})")  # the device says which machine it is

        put(module, "take", as_of_a_gpu)

    def watch(module: ModuleType, put: Callable[[Any, str, Any], None]) -> None:
        put(module, "time", SleepingTime())
        put(module, "POLL_S", _POLL_S)

    def plan(module: ModuleType, put: Callable[[Any, str, Any], None]) -> None:
        put(module, "QUICK", dataclasses.replace(module.QUICK, min_time_s=0.0, precision=None))

    return {
        "torch.cuda": torch_cuda,
        "harness.machines": machines,
        "harness.fingerprint": fingerprint,
        "benchmarks.timing.gpu_watch": watch,
        "benchmarks.runner": plan,
    }


class SleepingTime:
    """Stands for the module `time`: it passes only while somebody sleeps, so that no test waits or is late."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds
