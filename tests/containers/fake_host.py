"""Engines and drivers for a machine that has neither: scripts on PATH that answer like them and keep what was asked."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from containers.host import HostGpu

A100 = HostGpu("NVIDIA A100-SXM4-80GB", (8, 0), "580.82.07")
RTX_3090 = HostGpu("NVIDIA GeForce RTX 3090", (8, 6), "580.82.07")
A6000 = HostGpu("NVIDIA RTX A6000", (8, 6), "570.10.01")
V100 = HostGpu("Tesla V100-SXM2-32GB", (7, 0), "580.82.07")


def program(monkeypatch: pytest.MonkeyPatch, folder: Path, name: str, script: str) -> Path:
    """A program of this name, first on PATH; each call's words stand as a line in <name>.asked."""
    folder.mkdir(exist_ok=True)
    asked = folder / f"{name}.asked"
    path = folder / name
    path.write_text(f'#!/bin/bash\nprintf "%s\\n" "$*" >> {asked}\n{script}\n')
    path.chmod(0o755)
    if str(folder) not in os.environ["PATH"].split(os.pathsep):
        monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    asked.touch()
    return asked


ENGINE = """
case "$1 $2" in
    "version --format") echo 26.1.5 ;;
    "image inspect") [ -e "$0.images" ] && grep -qx -- "$5" "$0.images" && echo sha256:0123 ;;
    "build "*) while [ $# -gt 0 ]; do [ "$1" = --tag ] && echo "$2" >> "$0.images"; shift; done ;;
    "run "*) exit "${ENGINE_RUN_CODE:-0}" ;;
esac
"""
"""Builds at once, remembers what it built, and runs everything with ENGINE_RUN_CODE."""


def nvidia_smi(monkeypatch: pytest.MonkeyPatch, folder: Path, *gpus: HostGpu) -> None:
    """A driver that shows these GPUs."""
    rows = [f"{gpu.name}, {'.'.join(map(str, gpu.compute_capability))}, {gpu.driver}" for gpu in gpus]
    program(monkeypatch, folder, "nvidia-smi", "cat <<'END'\n" + "\n".join(rows) + "\nEND")
