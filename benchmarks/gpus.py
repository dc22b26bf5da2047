"""Which machine this is, what its data sheet promises and what it is measured with. The table is gpus.toml."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

UNKNOWN_GPU = "gpu"
CPU = "cpu"
_SUITE_OF_UNKNOWN = "24gb"


class WrongMachineError(Exception):
    """The machine that was asked for is not the one that was found."""


@dataclass(frozen=True)
class Machine:
    """What the figures are measured on."""

    id: str
    """The name in gpus.toml ("h200"), "gpu" for one that is not listed, "cpu"."""
    title: str
    """As it is shown: the board's name, or the device's own where the board is not listed."""
    device: str
    """PyTorch's device type: "cuda" or "cpu"."""
    suite: str
    """Which suite of shapes it is measured with."""
    bf16_tflops: float | None = None
    """Data sheet, dense, TFLOP/s; None where unknown."""
    memory_tb_per_s: float | None = None
    """Data sheet, TB/s; None where unknown."""
    memory_gb: float | None = None
    """Data sheet, GB; None where unknown."""


@dataclass(frozen=True)
class Found:
    """A GPU as the driver names it."""

    name: str
    compute_capability: tuple[int, int]


@cache
def _table() -> Mapping[str, Any]:
    with (Path(__file__).parent / "gpus.toml").open("rb") as file:
        return tomllib.load(file)


def known_ids() -> list[str]:
    """Every name that `--gpu` takes, in the table's order."""
    return [*_table()["families"], UNKNOWN_GPU, CPU]


def suite(name: str) -> Mapping[str, Any]:
    """The shapes of one suite, as written in the table."""
    found: Mapping[str, Any] = _table()["suites"][name]
    return found


def recognise(found: Found | None) -> Machine:
    """The machine that holds this GPU; the CPU where there is none."""
    if found is None:
        return Machine(CPU, "CPU", CPU, CPU)
    for board in _table()["board"]:
        if re.search(board["pattern"], found.name) and tuple(board["compute_capability"]) == found.compute_capability:
            return Machine(
                board["id"],
                board["title"],
                "cuda",
                board["suite"],
                board["bf16_tflops"],
                board["memory_tb_per_s"],
                board["memory_gb"],
            )
    return Machine(UNKNOWN_GPU, found.name, "cuda", _SUITE_OF_UNKNOWN)


def visible_gpu() -> Found | None:
    """The GPU that PyTorch would use, or None."""
    if not torch.cuda.is_available():
        return None
    return Found(torch.cuda.get_device_name(), torch.cuda.get_device_capability())


def machine(required: str | None, found: Found | None) -> Machine:
    """The machine to measure on. Raises WrongMachineError where another one is required; a CPU is there always."""
    if required == CPU:
        return recognise(None)
    here = recognise(found)
    if required is not None and here.id != required:
        seen = "no GPU that PyTorch can use" if found is None else found.name
        raise WrongMachineError(f"this session needs {named(required)}; found: {seen}")
    return here


def named(required: str) -> str:
    """How a message names a machine that is wanted."""
    return "a GPU that is not listed" if required == UNKNOWN_GPU else f"an {_table()['families'][required]}"
