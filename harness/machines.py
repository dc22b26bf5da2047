"""The machines by name: how each is recognised, what its data sheet promises, its suite and its image.

The table is machines.toml. Nothing here imports PyTorch but `visible_gpu`: noxfile.py and the host's side of the
containers run where there is none.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

TABLE = Path(__file__).with_name("machines.toml")
UNKNOWN_GPU = "gpu"
CPU = "cpu"
_SUITE_OF_UNKNOWN = "24gb"


class WrongMachineError(Exception):
    """The machine that was asked for is not the one that was found."""


@dataclass(frozen=True)
class Gpu:
    """A GPU as the driver names it."""

    name: str
    compute_capability: tuple[int, int]


@dataclass(frozen=True)
class Machine:
    """What the figures are measured on."""

    id: str
    """The name in machines.toml ("h200"), "gpu" for one that is not listed, "cpu"."""
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
class Image:
    """How the image of a family is built."""

    packages: str
    """Its lock in docker/lock/: "cuda", "hopper"."""
    flash_attn_sm: int
    """The architecture that flash-attn 2 is built for."""


@dataclass(frozen=True)
class Board:
    """One board of a family, and its limits."""

    title: str
    pattern: str
    """A regular expression that is found in the device's name."""
    bf16_tflops: float
    memory_tb_per_s: float
    memory_gb: float
    suite: str


@dataclass(frozen=True)
class Family:
    """One entry of the table."""

    id: str
    title: str
    compute_capability: tuple[int, int]
    boards: tuple[Board, ...]
    image: Image | None
    """None where no image is built for it."""

    def board(self, gpu: Gpu) -> Board | None:
        """The board that this GPU is; None where it is none of this family."""
        if gpu.compute_capability != self.compute_capability:
            return None
        return next((board for board in self.boards if re.search(board.pattern, gpu.name)), None)


def families() -> Mapping[str, Family]:
    """Every entry by its name, in the table's order."""
    return _read(TABLE)


@cache
def _read(path: Path) -> Mapping[str, Family]:
    with path.open("rb") as file:
        return {name: _family(name, entry) for name, entry in tomllib.load(file).items()}


def _family(name: str, entry: Mapping[str, Any]) -> Family:
    major, minor = entry["compute_capability"]
    boards = tuple(Board(**board) for board in entry["boards"])
    image = Image(**entry["image"]) if "image" in entry else None
    return Family(name, entry["title"], (major, minor), boards, image)


def known_ids() -> list[str]:
    """Every name that `--gpu` takes, in the table's order."""
    return [*families(), UNKNOWN_GPU, CPU]


def image_families() -> list[str]:
    """The families that have an image, and sessions of their own."""
    return [family.id for family in families().values() if family.image is not None]


def recognise(gpu: Gpu | None) -> Machine:
    """The machine that holds this GPU; the CPU where there is none."""
    if gpu is None:
        return Machine(CPU, "CPU", CPU, CPU)
    for family in families().values():
        if (board := family.board(gpu)) is not None:
            limits = (board.bf16_tflops, board.memory_tb_per_s, board.memory_gb)
            return Machine(family.id, board.title, "cuda", board.suite, *limits)
    return Machine(UNKNOWN_GPU, gpu.name, "cuda", _SUITE_OF_UNKNOWN)


def visible_gpu() -> Gpu | None:
    """The GPU that PyTorch would use, or None."""
    import torch  # see above

    if not torch.cuda.is_available():
        return None
    return Gpu(torch.cuda.get_device_name(), torch.cuda.get_device_capability())


def machine(required: str | None, gpu: Gpu | None) -> Machine:
    """The machine to measure on. Raises WrongMachineError where another one is required; a CPU is there always."""
    if required == CPU:
        return recognise(None)
    here = recognise(gpu)
    if required is not None and here.id != required:
        seen = "no GPU that PyTorch can use" if gpu is None else gpu.name
        raise WrongMachineError(f"this session needs {named(required)}; found: {seen}")
    return here


def named(required: str) -> str:
    """How a message names a machine that is wanted."""
    return "a GPU that is not listed" if required == UNKNOWN_GPU else f"an {families()[required].title}"
