"""The host's GPU as its driver names it, the image that fits it, and whether that image can run on that driver."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from harness import machines

CPU, ANY_GPU = machines.CPU, machines.UNKNOWN_GPU
OLDEST_DRIVER = {12: (525, 60, 13), 13: (580, 65, 6)}
"""CUDA's major version -> the oldest Linux driver that runs any minor version of it (CUDA compatibility guide)."""
DEVICE = Path("/dev/nvidia0")
NO_DRIVER, NO_GPU = "nvidia-smi: not installed", "nvidia-smi: no GPU"
_QUERY = ("nvidia-smi", "--query-gpu=name,compute_cap,driver_version", "--format=csv,noheader")


class HostError(Exception):
    """This host cannot run what was asked for; the message says what it has and what to do."""


@dataclass(frozen=True)
class HostGpu(machines.Gpu):
    """One GPU, as nvidia-smi prints it."""

    driver: str


def gpus() -> tuple[list[HostGpu], str]:
    """Every GPU of the host, and what nvidia-smi said where there is none."""
    if shutil.which(_QUERY[0]) is None:
        return [], NO_DRIVER
    try:
        done = subprocess.run(_QUERY, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        return [], f"nvidia-smi: {type(error).__name__}"
    if done.returncode:
        return [], f"nvidia-smi: {' '.join((done.stdout + done.stderr).split()) or f'exit code {done.returncode}'}"
    return [_gpu(line) for line in done.stdout.splitlines() if line.strip()], NO_GPU


def _gpu(row: str) -> HostGpu:
    found = re.fullmatch(r"\s*(.+?)\s*,\s*(\d+)\.(\d+)\s*,\s*(\d[\d.]*)\s*", row)
    if found is None:
        raise HostError(f"nvidia-smi shows a GPU that does not answer: {row.strip()!r}. Look at `nvidia-smi` and dmesg")
    name, major, minor, driver = found.groups()
    return HostGpu(name, (int(major), int(minor)), driver)


def image_for(gpu: HostGpu) -> str:
    """The image that fits this GPU: its family's, or that of a family with its architecture. Raises HostError."""
    with_image = machines.image_families()
    if (own := machines.recognise(gpu).family) in with_image:
        return str(own)
    for family in with_image:
        if machines.families()[family].compute_capability == gpu.compute_capability:
            return family
    major, minor = gpu.compute_capability
    raise HostError(
        f"no image for {gpu.name} (sm{major}{minor}); there are images for {', '.join(with_image)}. Use --engine none"
    )


@dataclass(frozen=True)
class Target:
    """What a session runs on."""

    family: str
    """The image's: "a100", "cpu"."""
    expect: str
    """The GPU that must be seen inside: a family, "gpu" for any, "cpu" for none."""
    gpu: HostGpu | None


def require(asked: str) -> None:
    """Refuse a session whose GPU is not here, before anything is installed for it. Raises HostError.

    A driver without nvidia-smi is left to PyTorch, which will look itself.
    """
    here, why_none = gpus()
    if asked == CPU or (not here and why_none == NO_DRIVER and DEVICE.exists()):
        return
    if not here:
        raise HostError(_none_of(asked, why_none))
    board = machines.whole_board(asked)  # of a slice: nvidia-smi's first columns do not name it
    if asked != ANY_GPU and not any(machines.recognise(gpu).fits(board) for gpu in here):
        raise HostError(f"this session needs {title(asked)}; found: {', '.join(gpu.name for gpu in here)}")


def _none_of(asked: str | None, why_none: str) -> str:
    return f"this session needs {title(asked)}; this host has no GPU that its driver shows ({why_none})"


def target(asked: str | None, found: tuple[list[HostGpu], str] | None = None) -> Target:
    """The image for the family asked for, by default for what is there. Raises HostError naming what was seen."""
    known = (CPU, ANY_GPU, *machines.image_families())
    if asked is not None and asked not in known:
        raise ValueError(f"--family must be one of {', '.join(known)}; got {asked!r}")
    if asked == CPU:
        return Target(CPU, CPU, None)
    here, why_none = gpus() if found is None else found
    if asked is None and not here and why_none not in (NO_DRIVER, NO_GPU):
        raise HostError(f"the GPU's driver is broken: {why_none}. Mend it, or use --family cpu")
    if asked is None and not here:
        return Target(CPU, CPU, None)
    if not here:
        raise HostError(_none_of(asked, why_none))
    if asked in (None, ANY_GPU):
        return Target(image_for(here[0]), machines.recognise(here[0]).family or ANY_GPU, here[0])
    for gpu in here:
        if machines.recognise(gpu).family == asked:
            return Target(str(asked), str(asked), gpu)
    raise HostError(f"this session needs {title(asked)}; found: {', '.join(gpu.name for gpu in here)}")


def title(asked: str | None) -> str:
    """ "an NVIDIA A100", "a GPU"."""
    return "a GPU" if asked in (None, ANY_GPU) else machines.named(asked)


def check_driver(gpu: HostGpu, cuda: str) -> None:
    """Raises HostError where the driver is too old for the image's CUDA."""
    major = int(cuda.partition(".")[0])
    oldest = OLDEST_DRIVER.get(major, max(OLDEST_DRIVER.values()))
    if tuple(map(int, re.findall(r"\d+", gpu.driver)[:3])) < oldest:
        wanted = f"{oldest[0]}.{oldest[1]:02d}.{oldest[2]:02d}"
        raise HostError(
            f"driver {gpu.driver} of {gpu.name} is too old for the image's CUDA {cuda}, which needs {wanted} or newer."
            " Upgrade the host's driver, or run without nox, in an environment whose PyTorch is built for this driver"
        )
