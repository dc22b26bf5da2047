"""What an image runs first: is this the GPU that the image was made for, and can PyTorch use it? Then the command.

The image is made for NSA_FAMILY ("a100", "cpu"; set in the Dockerfile); the session that starts it may expect another
GPU, NSA_EXPECT ("gpu" is any).

Before the command it puts the kernels that were compiled with the image into Triton's cache.

Exit code 2, with what was seen, where the GPU is missing or another one: a suite that quietly ran on the CPU would be
green and worth nothing; 2 also for an unknown NSA_* variable. Else the command's own.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import NoReturn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # started by its path, in any working directory
from harness import environment, machines

COMPILED = Path("/opt/triton")
"""Kernels that were compiled with the image (docker/Dockerfile): folders by Triton's key."""


def devices() -> str:
    """What there is of a GPU in here, for a message."""
    return ", ".join(sorted(str(path) for path in Path("/dev").glob("nvidia[0-9]*"))) or "no /dev/nvidia0"


def refusal(expected: str) -> str | None:
    """Why this is not the machine that was asked for; None where it is."""
    wanted = "a GPU" if expected == machines.UNKNOWN_GPU else machines.named(expected)
    found = machines.visible_gpu()
    if found is None:
        return (
            f"this session needs {wanted}; PyTorch {version('torch')} sees no GPU in the container ({devices()}). Start"
            " it with --gpus all (podman: --device nvidia.com/gpu=all) on a host that has the NVIDIA driver and"
            " container toolkit"
        )
    if expected == machines.UNKNOWN_GPU:
        return None
    try:
        machines.machine(expected, found)
    except machines.WrongMachineError as error:
        return str(error)
    return None


def share_kernels(compiled: Path, cache: Path) -> int:
    """Copy the kernels that the cache lacks into it, each whole or not at all; how many.

    The cache is a volume that outlives images: what it holds stays. OSError where it cannot be written.
    """
    missing = [folder for folder in sorted(compiled.glob("*/")) if not (cache / folder.name).exists()]
    for folder in missing:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache, prefix=".new-") as unfinished:
            shutil.copytree(folder, Path(unfinished, folder.name))
            try:
                os.rename(Path(unfinished, folder.name), cache / folder.name)
            except OSError:
                if not (cache / folder.name).exists():  # else another container was faster
                    raise
    return len(missing)


def main(command: Sequence[str]) -> NoReturn:
    """Look, then become the command."""
    try:
        environment.check()
    except ValueError as error:
        print(f"docker/entry.py: {error}", file=sys.stderr)
        sys.exit(2)
    told = environment.read()
    expected = told.expect or told.family or machines.CPU
    if expected != machines.CPU and (why := refusal(expected)) is not None:
        print(f"docker/entry.py: {why}", file=sys.stderr)
        sys.exit(2)
    try:
        share_kernels(COMPILED, Path(os.environ.get("TRITON_CACHE_DIR", "/cache/triton")))
    except OSError as error:
        print(f"docker/entry.py: kernels will be compiled anew: {error}", file=sys.stderr)
    try:
        os.execvp(command[0], list(command))
    except OSError as error:
        print(f"docker/entry.py: {command[0]}: {error.strerror}", file=sys.stderr)
        sys.exit(127)  # as shells say it


if __name__ == "__main__":
    main(sys.argv[1:])
