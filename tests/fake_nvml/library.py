"""The module that stands in the place of `pynvml`: the real one's constants and errors, and a board's answers."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from tests.fake_nvml.boards import Board, Course, OnGpu, Refused

PATH = Path(__file__).with_name("path")
"""The folder that a new process searches first; it holds a `pynvml.py`."""
BOARD, SLICE = "the board's handle", "the slice's handle"
UUID = "01234567-89ab-cdef-0123-456789abcdef"
_OF_A_FIELD = (
    "nvmlDeviceGetClockInfo", "nvmlDeviceGetMaxClockInfo", "nvmlDeviceGetCurrentClocksThrottleReasons",
    "nvmlDeviceGetPowerUsage", "nvmlDeviceGetEnforcedPowerLimit", "nvmlDeviceGetPowerManagementDefaultLimit",
    "nvmlDeviceGetTemperature", "nvmlDeviceGetTemperatureThreshold", "nvmlDeviceGetPersistenceMode",
    "nvmlDeviceGetDisplayActive", "nvmlDeviceGetAPIRestriction", "nvmlDeviceGetVirtualizationMode",
    "nvmlSystemGetDriverVersion",
)  # fmt: skip
OF_PROCESSES = (
    "nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetGraphicsRunningProcesses", "nvmlDeviceGetProcessUtilization",
)  # fmt: skip
FUNCTIONS = (
    *_OF_A_FIELD, *OF_PROCESSES, "nvmlInit", "nvmlDeviceGetHandleByUUID",
    "nvmlDeviceGetDeviceHandleFromMigDeviceHandle",
)  # fmt: skip
"""All that it answers; another name is an error, so that the product reads nothing that no test has seen."""


def real() -> ModuleType:
    """The pynvml that is installed, whatever stands in its place."""
    spec = importlib.machinery.PathFinder.find_spec("pynvml", [one for one in sys.path if Path(one) != PATH])
    if spec is None or spec.loader is None:
        raise ImportError("the fake takes constants and errors from pynvml: python -m pip install nvidia-ml-py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class FakeNvml(ModuleType):
    """Answers for one board. `readings` counts what was asked of each function."""

    def __init__(self, board: Board, other_pid: int | None = None) -> None:
        """`other_pid`: the process that `OnGpu` stands for."""
        super().__init__("pynvml")
        self.board, self.readings = board, Counter[str]()
        self._real, self._other_pid = real(), other_pid
        self._listed: tuple[OnGpu, ...] = ()
        self._taken = Counter[str]()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name not in FUNCTIONS:
            found = getattr(self._real, name)
            if callable(found) and name.startswith("nvml"):
                raise NotImplementedError(f"tests/fake_nvml has no {name}")
            return found
        if self._refusal(name) == "ABSENT":
            raise AttributeError(name)
        return self._function(name)

    def _function(self, name: str) -> Callable[..., Any]:
        def function(*arguments: Any) -> Any:
            self.readings[name] += 1
            if name in _OF_A_FIELD:
                return self._next(name)
            if why := self._refusal(name):
                raise self._error(why)
            return getattr(self, f"_{name}")(*arguments)

        return function

    def _refusal(self, name: str) -> str | None:
        key = {"nvmlDeviceGetProcessUtilization": "utilisation"}.get(name, name)
        key = "processes" if name in OF_PROCESSES[:2] else key
        told = self.board.field(key) if name not in FUNCTIONS[-3:] else None
        return told.why if isinstance(told, Refused) else None

    def _next(self, name: str) -> Any:
        told = self.board.field(name)
        if isinstance(told, Refused):
            raise self._error(told.why)
        if not isinstance(told, Course):
            return told
        self._taken[name] += 1
        return told.values[min(self._taken[name], len(told.values)) - 1]

    def _error(self, why: str) -> Exception:
        error: Exception = self._real.NVMLError(getattr(self._real, f"NVML_ERROR_{why}"))
        return error

    def _nvmlInit(self) -> None:  # noqa: N802 - NVML's names, here and below
        pass

    def _nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:  # noqa: N802
        handle = SLICE if self.board.is_slice else BOARD
        if uuid != {SLICE: f"MIG-{UUID}", BOARD: f"GPU-{UUID}"}[handle]:
            raise self._error("NOT_FOUND")
        return handle

    def _nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, handle: str) -> str:  # noqa: N802
        assert handle == SLICE
        return BOARD

    def _nvmlDeviceGetComputeRunningProcesses(self, handle: str) -> list[SimpleNamespace]:  # noqa: N802
        assert handle == (SLICE if self.board.is_slice else BOARD)
        self._listed = self._next("processes")
        return self._rows(draw=False)

    def _nvmlDeviceGetGraphicsRunningProcesses(self, handle: str) -> list[SimpleNamespace]:  # noqa: N802
        return self._rows(draw=True)

    def _nvmlDeviceGetProcessUtilization(self, handle: str, since_us: int) -> list[SimpleNamespace]:  # noqa: N802
        now_us = int(time.time() * 1e6)
        busy = [one for one in self._listed if one.sm_percent]
        if not busy:
            raise self._error("NOT_FOUND")
        return [SimpleNamespace(pid=self._pid(one), smUtil=one.sm_percent, timeStamp=now_us) for one in busy]

    def _rows(self, *, draw: bool) -> list[SimpleNamespace]:
        listed = [one for one in self._listed if one.draws is draw]
        return [SimpleNamespace(pid=self._pid(one), usedGpuMemory=one.mib and one.mib * 2**20) for one in listed]

    def _pid(self, one: OnGpu) -> int:
        if one.pid is not None:
            return one.pid
        assert self._other_pid is not None, "the test must start the other process"
        return self._other_pid
