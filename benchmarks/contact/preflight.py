"""Can this machine be measured? What is read of it before anything runs there, and what that means.

`read` asks the machine once; `findings` judges what it said, without asking anything, so that a test can describe any
machine. A finding that refuses says what is responsible and what to do.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from benchmarks.contact.cause import Cause
from benchmarks.timing import gpu_watch
from benchmarks.timing.gpu_watch import GpuWatch
from harness import environment, fingerprint, nvml
from harness.machines import Machine
from harness.peak import MIB

LEAST_CAPABILITY = (8, 0)
"""Of the Triton kernels."""
LEAST_DISK_MIB = 2048.0
MOST_IN_USE = 0.1
"""Of the GPU's memory, before this suite has taken any: a display and a context need less."""
BUSY_CORES = 0.25
"""Share of the host's cores that other work may keep busy without being mentioned."""
_DRIVER_FILE = Path("/proc/driver/nvidia/version")
"""There wherever the kernel has loaded NVIDIA's driver, whether it works or not."""


@dataclass(frozen=True)
class MachineFacts:
    """What a machine says of itself. None is unknown."""

    machine: Machine
    asked_for_cpu: bool
    """Whether the CPU is measured on purpose."""
    device: str
    """The GPU's or the CPU's own name."""
    image: str | None
    """The container image; None outside one."""
    driver: str | None
    driver_loaded: bool
    """Whether the kernel has NVIDIA's driver."""
    compute_capability: tuple[int, int] | None
    memory_mib: float
    """Of the device that is measured."""
    in_use_mib: float | None
    """Of it, before this suite has taken any; None on a CPU."""
    other_processes: int | None
    """Processes of others that compute on the GPU, or on this slice of it."""
    idle_processes: int
    """Others that hold memory of it and do not compute."""
    triton: str | None
    torch: str
    free_disk_mib: float
    """Where the records go."""
    load: float | None
    """Processes that wanted a core in the last minute."""
    cores: int
    c_compiler: str | None
    """What Triton builds its launcher with."""
    python_headers: bool
    """Whether this Python's, which the launcher includes, are there."""
    virtual: bool = False
    """Whether the GPU is a vGPU."""


@dataclass(frozen=True)
class PreflightFinding:
    """One thing that was looked at."""

    name: str
    message: str
    """What was found."""
    cause: Cause | None = None
    """Whose matter it is where the machine cannot be measured so; None where it can."""
    do: str = ""
    """What to do about it."""

    @property
    def refused(self) -> bool:
        return self.cause is not None


def read(machine: Machine, out: Path, *, asked_for_cpu: bool) -> MachineFacts:
    """Ask this machine; `out` is the folder of the records, which is there."""
    on_gpu = machine.device == "cuda"
    computing, idle = _other_processes() if on_gpu else (None, 0)  # before this process has a context of its own there
    free, total = torch.cuda.mem_get_info() if on_gpu else (None, psutil.virtual_memory().total)
    return MachineFacts(
        machine=machine,
        asked_for_cpu=asked_for_cpu,
        device=fingerprint.device_name(machine),
        image=environment.read().image,
        driver=nvml.driver() if on_gpu else None,
        driver_loaded=_DRIVER_FILE.exists(),
        compute_capability=torch.cuda.get_device_capability() if on_gpu else None,
        memory_mib=total / MIB,
        in_use_mib=None if free is None else (total - free) / MIB,
        other_processes=computing,
        idle_processes=idle,
        triton=None if importlib.util.find_spec("triton") is None else importlib.import_module("triton").__version__,
        torch=torch.__version__,
        free_disk_mib=shutil.disk_usage(out).free / MIB,
        load=os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        cores=os.cpu_count() or 1,
        c_compiler=_c_compiler(),
        python_headers=_python_headers(),
        virtual=on_gpu and gpu_watch.is_virtual(machine, nvml.settings()),
    )


def _c_compiler() -> str | None:
    """The one that Triton takes (`triton.runtime.build`)."""
    asked = os.environ.get("CC")
    candidates = ("gcc", "clang") if asked is None else (asked,)
    return next((path for name in candidates if (path := shutil.which(name))), None)


def _python_headers() -> bool:
    """Whether they are where Triton looks for them (`triton.runtime.build`)."""
    scheme = sysconfig.get_default_scheme()
    if scheme == "posix_local":  # Debian's, for what is installed beside its own packages
        scheme = "posix_prefix"
    return Path(sysconfig.get_path("include", scheme), "Python.h").is_file()


def _other_processes() -> tuple[int | None, int]:
    """How many compute on the GPU and how many are idle there, as a session's watch counts them."""
    if nvml.processes() is None:
        return None, 0
    watch = GpuWatch()
    return len(watch.computing()), len(watch.idle())


def findings(facts: MachineFacts) -> list[PreflightFinding]:
    """Everything that was looked at, in the order in which a person would look."""
    return [_engine(facts), *(_gpu(facts) if facts.machine.device == "cuda" else _cpu(facts)), _disk(facts)]


def _engine(facts: MachineFacts) -> PreflightFinding:
    where = f"in the image {facts.image}" if facts.image else "in the host's environment, not in an image"
    return PreflightFinding("engine", where)


def _gpu(facts: MachineFacts) -> Iterator[PreflightFinding]:
    found = facts.machine
    listed = "" if found.family is not None else ", not listed: no known limits, the suite for 24 GB"
    if facts.virtual:
        do = "pass a whole GPU or a MIG slice through to this machine, or measure its CPU with --gpu cpu"
        yield PreflightFinding("GPU", f"{facts.device}, a vGPU: other guests use it in turn", Cause.MACHINE, do)
    else:
        yield PreflightFinding("GPU", f"{facts.device} ({found.id}{listed})")
    yield PreflightFinding("driver", facts.driver or "unknown: NVML does not answer")
    major, minor = facts.compute_capability or (0, 0)
    capability = f"{major}.{minor}"
    if (major, minor) < LEAST_CAPABILITY:
        needed = "the Triton kernels need {}.{} or newer".format(*LEAST_CAPABILITY)
        yield PreflightFinding(
            "compute capability",
            f"{capability}; {needed}",
            Cause.MACHINE,
            "measure its CPU with --gpu cpu, or another GPU",
        )
    else:
        yield PreflightFinding("compute capability", capability)
    if facts.triton is None:
        do = "install the Triton that this PyTorch was built for: pip install triton"
        yield PreflightFinding("Triton", "not installed", Cause.TRITON, do)
    else:
        yield PreflightFinding("Triton", f"{facts.triton}, PyTorch {facts.torch}")
    yield _compiler(facts)
    yield _memory(facts)
    yield _other_work(facts)


def _compiler(facts: MachineFacts) -> PreflightFinding:
    """What Triton builds its launcher with, before the first kernel runs."""
    if facts.c_compiler is None:
        do = "apt install build-essential (Fedora: dnf install gcc), or set CC to a compiler that is there"
        return PreflightFinding("C compiler", "none found: Triton builds its launcher with one", Cause.MACHINE, do)
    if not facts.python_headers:
        do = "apt install python3-dev (Fedora: dnf install python3-devel), for this very Python"
        message = f"{facts.c_compiler}, but no Python.h: Triton's launcher includes it"
        return PreflightFinding("C compiler", message, Cause.MACHINE, do)
    return PreflightFinding("C compiler", f"{facts.c_compiler}, and Python's headers")


def _memory(facts: MachineFacts) -> PreflightFinding:
    used_mib = facts.in_use_mib or 0.0
    message = f"{used_mib:,.0f} of {facts.memory_mib:,.0f} MiB in use"
    if used_mib <= MOST_IN_USE * facts.memory_mib:
        return PreflightFinding("memory", message)
    do = "end what holds it (nvidia-smi names it), move the display to another card, then run this again"
    return PreflightFinding("memory", message, Cause.MACHINE, do)


def _other_work(facts: MachineFacts) -> PreflightFinding:
    others, idle = facts.other_processes, facts.idle_processes
    if not others:
        message = "unknown: NVML does not answer" if others is None else "none computes on the GPU"
        note = f"; {idle} idle process{'es hold' if idle > 1 else ' holds'} memory of it" if idle else ""
        return PreflightFinding("other work", message + note)
    message = f"{others} other process{'es compute' if others > 1 else ' computes'} on the GPU"
    return PreflightFinding("other work", message, Cause.MACHINE, "end it or wait for its end, then run this again")


def _cpu(facts: MachineFacts) -> Iterator[PreflightFinding]:
    if facts.driver_loaded and not facts.asked_for_cpu:
        yield PreflightFinding(
            "GPU",
            f"this machine has NVIDIA's driver, and PyTorch {facts.torch} can use no GPU",
            Cause.DRIVER,
            "run nvidia-smi: if it fails, repair the driver (after an update a reboot usually does); if it works,"
            " install a PyTorch for CUDA that is as old as this driver. --gpu cpu measures the CPU on purpose",
        )
    yield PreflightFinding("CPU", f"{facts.device}, {facts.cores} cores, {facts.memory_mib:,.0f} MiB")
    busy = facts.load is not None and facts.load > BUSY_CORES * facts.cores
    note = "; other work makes figures of a CPU NOT TRUSTWORTHY: better wait for its end" if busy else ""
    yield PreflightFinding("load", ("unknown" if facts.load is None else f"{facts.load:.2g}") + note)


def _disk(facts: MachineFacts) -> PreflightFinding:
    message = f"{facts.free_disk_mib:,.0f} MiB free for the records"
    if facts.free_disk_mib >= LEAST_DISK_MIB:
        return PreflightFinding("disk", message)
    do = f"make room for {LEAST_DISK_MIB:,.0f} MiB, or name another folder with --out"
    return PreflightFinding("disk", message, Cause.MACHINE, do)
