"""What the figures depend on beside the case: device, driver, versions, commit, sources."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import cached_property
from operator import attrgetter
from pathlib import Path
from typing import ClassVar

import torch

from harness import environment, forced, nvml, repository
from harness.machines import Machine
from harness.nvml import ClockLimits, GpuSettings
from harness.peak import MeasuredPeak

MEASURING = (
    "benchmarks/atlas/choices.py", "benchmarks/baselines", "benchmarks/cases", "benchmarks/correctness",
    "benchmarks/errors.py", "benchmarks/first_step.py",
    "benchmarks/memory_worker.py", "benchmarks/parallel/measure.py",
    "benchmarks/runner.py", "benchmarks/timing", "benchmarks/watched.py",
    "benchmarks/workloads", "harness/nvml.py",
)  # fmt: skip
"""What decides how a figure comes about; a page or a command that changes makes none incomparable."""
NOT_MEASURING = (
    "benchmarks/cases/key.py", "benchmarks/cases/outcome.py", "benchmarks/timing/peak.py",
    "benchmarks/workloads/suite.py",
)  # fmt: skip
"""What lies there and does not: names of cases and outcomes, the device's limits, which cases there are."""


@dataclass(frozen=True)
class Fingerprint:
    """Identity of one run. None where a part cannot be known on this machine."""

    utc: str
    """When the run began, ISO 8601, UTC, with milliseconds: it tells runs apart."""
    machine: str
    """The machine's id (`harness.machines.Machine.id`): "h200", "a100-80gb-sxm", "gpu-geforce-rtx-5090", "cpu"."""
    device: str
    """The GPU's or the CPU's own name."""
    driver: str | None
    """NVIDIA driver; None without a GPU."""
    cuda: str | None
    """CUDA that PyTorch was built for; None without a GPU."""
    torch: str
    triton: str | None
    python: str
    platform: str
    cpu: str
    """The host's processor."""
    threads: int
    """Threads that PyTorch uses on the CPU."""
    omp_wait_policy: str | None
    """OMP_WAIT_POLICY: how these threads wait for one another; None is the runtime's default."""
    load: float | None
    """Processes that wanted a core in the minute before the run; above 0 the CPU's figures are not its best."""
    commit: str | None
    """What NSA_COMMIT says, for a copy of a commit (an image); else git's commit of the working tree; else None."""
    dirty: bool | None
    """Whether tracked or new files outside results/ differ from that commit; beside NSA_COMMIT what NSA_DIRTY says."""
    nsa_sha256: str
    """Hash of nsa/**/*.py: which implementation was measured, with or without git."""
    benchmarks_sha256: str
    """Hash of `MEASURING` without `NOT_MEASURING`: how it was measured."""
    cudnn: str | None = None
    """cuDNN that PyTorch loads, whose attention is a baseline: "9.19.0"; None without a GPU."""
    flash_attn: str | None = None
    """Versions of the flash-attn packages that are installed: "flash-attn 2.8.3, flash-attn-4 4.0.0"."""
    image: str | None = None
    """The container image, as NSA_IMAGE says; None outside one. It holds the sources, so that each commit has another:
    it is told, and what it brings (PyTorch, Triton, CUDA, Python, the system) is compared."""
    gpu_clocks: ClockLimits | None = None
    """Highest clocks and power of the GPU as it is set; None without a GPU or NVML."""
    measured_peak: MeasuredPeak | None = None
    """What the device was measured to reach at most, once per run; None where that was not measured."""
    gpu_settings: GpuSettings | None = None
    """How the GPU is set up: told, and not compared but for the power limit, which `gpu_clocks` holds too. None without
    a GPU or NVML, and in records from before it was read."""

    OLD_NAMES: ClassVar[Mapping[str, str]] = {"ceilings": "measured_peak"}

    def __post_init__(self) -> None:
        # both become names of files, so that a record from elsewhere must not lead out of the results
        if not re.fullmatch(r"[a-z0-9-]+", self.machine):
            raise ValueError(f"fingerprint.machine must be of a-z, 0-9 and '-'; got {self.machine!r}")
        if not re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z", self.utc, re.ASCII):
            raise ValueError(f"fingerprint.utc must be like 2026-01-02T03:04:05.678Z; got {self.utc!r}")

    @cached_property
    def conditions(self) -> tuple[object, ...]:
        """The values of `CONDITIONS`: fingerprints that share them give figures that can be compared."""
        return _conditions(self)


CONDITIONS = (
    "machine", "device", "driver", "cuda", "cudnn", "torch", "triton", "flash_attn", "python", "platform", "cpu",
    "threads", "omp_wait_policy", "gpu_clocks", "benchmarks_sha256",
)  # fmt: skip
"""What two figures must share to be compared. The rest is when, which NSA (what is compared), and measured itself."""


_conditions = attrgetter(*CONDITIONS)


def differences(a: Fingerprint, b: Fingerprint) -> list[str]:
    """Why records of `a` and `b` are not comparable ("driver 555 -> 560"); empty where they are.

    What a record of an older schema does not know differs from what a newer one knows, but not from another unknown.
    """
    pairs = ((name, getattr(a, name), getattr(b, name)) for name in CONDITIONS)
    return [f"{name} {_text(old)} -> {_text(new)}" for name, old, new in pairs if old != new]


def _text(value: object) -> str:
    return "unknown" if value is None else str(value)


def device_name(machine: Machine) -> str:
    """The GPU's or the CPU's own name."""
    return torch.cuda.get_device_name() if machine.device == "cuda" else _cpu_name()


def take(machine: str, device: str, measured_peak: MeasuredPeak | None = None) -> Fingerprint:
    """Read the fingerprint of this process on this device type ("cuda" or "cpu").

    Raises ValueError where the process is forced to be another GPU and `machine` does not say so.
    """
    on_gpu = device == "cuda"
    if on_gpu:
        forced.require_named(machine)
    cpu = _cpu_name()
    told = environment.read()
    return Fingerprint(
        utc=datetime.now(timezone.utc).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
        machine=machine,
        device=torch.cuda.get_device_name() if on_gpu else cpu,
        driver=nvml.driver() if on_gpu else None,
        cuda=torch.version.cuda if on_gpu else None,
        torch=torch.__version__,
        triton=_version("triton"),
        python=platform.python_version(),
        platform=platform.platform(),
        cpu=cpu,
        threads=torch.get_num_threads(),
        omp_wait_policy=os.environ.get("OMP_WAIT_POLICY"),
        load=round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        commit=told.commit or repository.commit(),
        dirty=told.dirty if told.commit else repository.dirty(),
        nsa_sha256=sources_sha256(repository.ROOT / "nsa"),
        benchmarks_sha256=sources_sha256(repository.ROOT, MEASURING, NOT_MEASURING),
        cudnn=_cudnn(torch.backends.cudnn.version()) if on_gpu else None,
        flash_attn=_flash_attn(),
        image=told.image,
        gpu_clocks=nvml.limits() if on_gpu else None,
        measured_peak=measured_peak,
        gpu_settings=nvml.settings() if on_gpu else None,
    )


def sources_sha256(folder: Path, parts: Sequence[str] = ("",), without: Sequence[str] = ()) -> str:
    """One hash over the names and contents of the Python files, and the kernels' tables, in these parts of a folder.

    By default in all of it; `without` names files that are left out.
    """
    chosen, left_out = [folder / part for part in parts], {folder / name for name in without}
    digest = hashlib.sha256()
    files = [path for part in chosen for path in ([part] if part.is_file() else _python_files(part))]
    for path in sorted(set(files) - left_out):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(folder).as_posix()}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()[:16]


def _python_files(folder: Path) -> Iterator[Path]:
    yield from folder.rglob("*.py")
    yield from folder.rglob("tables/*.json")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cudnn(number: int | None) -> str | None:
    """PyTorch gives one number, since cuDNN 9: 91900 is 9.19.0."""
    return None if number is None else f"{number // 10000}.{number // 100 % 100}.{number % 100}"


def _flash_attn() -> str | None:
    found = [f"{package} {version}" for package in ("flash-attn", "flash-attn-4") if (version := _version(package))]
    return ", ".join(found) or None


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
