"""What the figures depend on beside the case: device, driver, versions, commit, sources."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import re
import subprocess
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Fingerprint:
    """Identity of one run. None where a part cannot be known on this machine."""

    utc: str
    """When the run began, ISO 8601, UTC, with milliseconds: it tells runs apart."""
    machine: str
    """The name in gpus.toml: "h200", "cpu", "gpu" for one that is not listed."""
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
    """git commit of the working tree; in a copy without git (an image), what NSA_COMMIT says; else None."""
    dirty: bool | None
    """Whether tracked or new files outside results/ differ from that commit."""
    nsa_sha256: str
    """Hash of nsa/**/*.py: which implementation was measured, with or without git."""
    benchmarks_sha256: str
    """Hash of benchmarks/**/*.py and gpus.toml: how it was measured."""

    def __post_init__(self) -> None:
        # both become names of files, so that a record from elsewhere must not lead out of the results
        if not re.fullmatch(r"[a-z0-9-]+", self.machine):
            raise ValueError(f"fingerprint.machine must be of a-z, 0-9 and '-'; got {self.machine!r}")
        if not re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z", self.utc, re.ASCII):
            raise ValueError(f"fingerprint.utc must be like 2026-01-02T03:04:05.678Z; got {self.utc!r}")


def take(machine: str, device: str) -> Fingerprint:
    """Read the fingerprint of this process on this device type ("cuda" or "cpu")."""
    on_gpu = device == "cuda"
    cpu = _cpu_name()
    return Fingerprint(
        utc=datetime.now(timezone.utc).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
        machine=machine,
        device=torch.cuda.get_device_name() if on_gpu else cpu,
        driver=_driver() if on_gpu else None,
        cuda=torch.version.cuda if on_gpu else None,
        torch=torch.__version__,
        triton=_version("triton"),
        python=platform.python_version(),
        platform=platform.platform(),
        cpu=cpu,
        threads=torch.get_num_threads(),
        omp_wait_policy=os.environ.get("OMP_WAIT_POLICY"),
        load=round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        commit=_git("rev-parse", "HEAD") or os.environ.get("NSA_COMMIT"),
        dirty=_dirty(),
        nsa_sha256=sources_sha256(ROOT / "nsa"),
        benchmarks_sha256=sources_sha256(ROOT / "benchmarks"),
    )


def sources_sha256(folder: Path) -> str:
    """One hash over the names and contents of the Python and TOML files below a folder."""
    digest = hashlib.sha256()
    for path in sorted(p for p in folder.rglob("*") if p.suffix in (".py", ".toml")):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(folder).as_posix()}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()[:16]


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _driver() -> str | None:
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # NVML is missing or refuses: the driver is unknown, the figures are not
        return None
    try:
        return str(pynvml.nvmlSystemGetDriverVersion())
    finally:
        pynvml.nvmlShutdown()


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, timeout=20, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _dirty() -> bool | None:
    """The runs themselves land under results/, which must not make the next run look changed."""
    status = _git("status", "--porcelain", "--", ".", ":(exclude)results")
    return None if status is None else bool(status)
