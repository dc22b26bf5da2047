"""What NVML tells of PyTorch's current GPU: its driver, its limits, how it is set, and who else uses it.

Each field stands alone: a virtual GPU, a consumer's card, an old driver or a missing right leave some of them out, and
None is what is not told.
"""

from __future__ import annotations

import hashlib
import os
import time
from dataclasses import dataclass
from functools import cache
from typing import Any

import psutil
import torch

_MIB = 2**20
_LEAST_SLOWDOWN_C = 60
"""No GPU slows down below; boards since 2022 tell how far they are from it in its place, a small number."""
_CAPPED = 0.95
"""A power limit below this share of the board's own makes it another machine. A smaller difference is a condition of
the records (`gpu_clocks`), under which they are not compared either."""
_STEP_W = 10
"""Of the limit in a machine's name: operators set tens of watts, and drivers report a few tenths more or less."""
_UTILISATION_OF_S = 2.0
"""How far back a process's use of the multiprocessors is asked for; NVML averages it over up to a second."""


@dataclass(frozen=True)
class ClockLimits:
    """What the device may do at most, as it is set now. None where NVML does not say."""

    max_sm_mhz: int | None
    max_memory_mhz: int | None
    power_limit_w: float | None
    """The limit in force, which an operator may have lowered."""

    def __str__(self) -> str:
        return f"SM {self.max_sm_mhz} MHz, memory {self.max_memory_mhz} MHz, {self.power_limit_w} W"


@dataclass(frozen=True)
class GpuSettings:
    """How the GPU is set up, which a run does not change. None where NVML does not say."""

    power_limit_w: float | None
    """The limit in force."""
    default_power_limit_w: float | None
    """The board's own; the one in force is lower where the board is capped."""
    persistence: bool | None
    """Whether the driver stays loaded while no process uses the GPU."""
    display: bool | None
    """Whether the GPU draws a screen."""
    may_lock_clocks: bool | None
    """Whether this user may fix the clocks."""
    virtual: bool | None
    """Whether it is a vGPU, whose multiprocessors other guests use in turn."""
    board: str | None = None
    """Tells GPUs of one kind apart: the start of a hash of its UUID. None in records from before it was kept."""

    @property
    def capped(self) -> bool:
        """Whether its power limit is below the board's own."""
        limits = self.power_limit_w, self.default_power_limit_w
        return limits[0] is not None and limits[1] is not None and limits[0] < limits[1]

    @property
    def capped_w(self) -> int | None:
        """Its power limit, to `_STEP_W`, where that is well below the board's own; else None, also where NVML does not
        say: some drivers say 0 W."""
        limit_w, own_w = self.power_limit_w, self.default_power_limit_w
        if limit_w is None or own_w is None or limit_w <= 0 or limit_w >= _CAPPED * own_w:
            return None
        return max(_STEP_W * round(limit_w / _STEP_W), _STEP_W)


@dataclass(frozen=True)
class GpuProcess:
    """A process that uses the GPU."""

    pid: int
    """As NVML tells it: in a container that is the host's number."""
    name: str
    memory_mib: float | None
    sm_percent: int | None
    """How busy it kept the multiprocessors of late; None where that is not told."""
    draws: bool
    """Whether it uses the GPU for a screen or for graphics, and for no computation."""

    def __str__(self) -> str:
        known = [f"pid {self.pid}"]
        known += [] if self.memory_mib is None else [f"{self.memory_mib:.0f} MiB"]
        known += [] if self.sm_percent is None else [f"SMs {self.sm_percent} % busy"]
        return f"{self.name} ({', '.join(known)})"


def limits() -> ClockLimits | None:
    """Of PyTorch's current GPU; None without NVML."""
    if device() is None:
        return None
    return ClockLimits(
        _ask("nvmlDeviceGetMaxClockInfo", "NVML_CLOCK_SM"),
        _ask("nvmlDeviceGetMaxClockInfo", "NVML_CLOCK_MEM"),
        _watts("nvmlDeviceGetEnforcedPowerLimit"),
    )


def driver() -> str | None:
    """Version of the NVIDIA driver; None without NVML."""
    found = device()
    return None if found is None else str(found[0].nvmlSystemGetDriverVersion())


def settings() -> GpuSettings | None:
    """Of PyTorch's current GPU; None without NVML."""
    if device() is None:
        return None
    restricted = _ask("nvmlDeviceGetAPIRestriction", "NVML_RESTRICTED_API_SET_APPLICATION_CLOCKS")
    as_root = hasattr(os, "geteuid") and os.geteuid() == 0
    virtualisation, virtual = _ask("nvmlDeviceGetVirtualizationMode"), _constant("NVML_GPU_VIRTUALIZATION_MODE_VGPU")
    return GpuSettings(
        _watts("nvmlDeviceGetEnforcedPowerLimit"),
        _watts("nvmlDeviceGetPowerManagementDefaultLimit"),
        _flag("nvmlDeviceGetPersistenceMode"),
        _flag("nvmlDeviceGetDisplayActive"),
        True if as_root else None if restricted is None else not restricted,
        None if virtualisation is None or virtual is None else virtualisation == virtual,
        hashlib.sha256(_uuid().encode()).hexdigest()[:12],
    )


def temperature_c() -> int | None:
    """Of the GPU now; None where it is not told."""
    return _ask("nvmlDeviceGetTemperature", "NVML_TEMPERATURE_GPU")


def slowdown_c() -> int | None:
    """Temperature from which the GPU lowers its clocks; None where it is not told, or where a distance from it is."""
    found = _ask("nvmlDeviceGetTemperatureThreshold", "NVML_TEMPERATURE_THRESHOLD_SLOWDOWN")
    return found if found is not None and found >= _LEAST_SLOWDOWN_C else None


def processes() -> list[GpuProcess] | None:
    """Every process on this GPU, or on this slice of it, ours too; None where NVML does not tell which compute."""
    computing = _ask_slice("nvmlDeviceGetComputeRunningProcesses")
    drawing = _ask_slice("nvmlDeviceGetGraphicsRunningProcesses") or []
    if computing is None:
        return None
    busy = _sm_percent() if computing or drawing else {}
    found: dict[int, GpuProcess] = {}
    for draws, listed in ((True, drawing), (False, computing)):
        for one in listed:
            memory_mib = None if one.usedGpuMemory is None else one.usedGpuMemory / _MIB
            percent = None if busy is None else busy.get(one.pid, 0)
            found[one.pid] = GpuProcess(one.pid, _process_name(one.pid), memory_mib, percent, draws)
    return list(found.values())


def _sm_percent() -> dict[int, int] | None:
    """Of each process that used the multiprocessors of late, the most; None where NVML does not tell."""
    found = device()
    if found is None:
        return None
    nvml, handle = found
    since_us = int((time.time() - _UTILISATION_OF_S) * 1e6)
    try:
        samples = nvml.nvmlDeviceGetProcessUtilization(handle, since_us)
    except nvml.NVMLError as error:
        return {} if getattr(error, "value", None) == _constant("NVML_ERROR_NOT_FOUND") else None  # none was busy
    except AttributeError:
        return None
    busy: dict[int, int] = {}
    for sample in samples:
        if sample.timeStamp >= since_us:
            busy[sample.pid] = max(busy.get(sample.pid, 0), int(sample.smUtil))
    return busy


def _process_name(pid: int) -> str:
    try:
        return str(psutil.Process(pid).name())
    except psutil.Error:  # of another user, of another namespace, or gone
        return "a process"


def _watts(function: str) -> float | None:
    milliwatts = _ask(function)
    return None if milliwatts is None else milliwatts / 1e3


def _flag(function: str) -> bool | None:
    value = _ask(function)
    return None if value is None else bool(value)


def _ask(function: str, what: str | None = None) -> Any:
    """What NVML says of the board; `what` is the name of a constant. None where it does not say: not supported, no
    right, or a library or a driver from before that function."""
    found = device()
    return None if found is None else _asked(found[0], found[1], function, what)


def _ask_slice(function: str) -> Any:
    """The same of the MIG slice where this GPU is one."""
    found = device()
    if found is None:
        return None
    return _asked(found[0], _slice_handle() or found[1], function, None)


def _asked(nvml: Any, handle: Any, function: str, what: str | None) -> Any:
    try:
        arguments = () if what is None else (getattr(nvml, what),)
        return getattr(nvml, function)(handle, *arguments)
    except (AttributeError, nvml.NVMLError):
        return None


def _constant(name: str) -> Any:
    found = device()
    return None if found is None else getattr(found[0], name, None)


@cache
def device() -> tuple[Any, Any] | None:
    """(NVML, its handle of PyTorch's current GPU), by UUID: the two may count the devices differently.

    Of a MIG slice the board's handle: clocks, power and temperature are the board's.
    """
    try:
        import pynvml

        pynvml.nvmlInit()
        found = _slice_handle()
        if found is not None:
            return pynvml, pynvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(found)
        return pynvml, pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{_uuid()}")
    except Exception:  # whatever keeps NVML away, the figures stand without it
        return None


@cache
def _slice_handle() -> Any | None:
    """NVML's handle of PyTorch's current GPU where that is a MIG slice; else None."""
    try:
        import pynvml

        return pynvml.nvmlDeviceGetHandleByUUID(f"MIG-{_uuid()}")
    except Exception:  # there is no slice of that name
        return None


def _uuid() -> str:
    return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
