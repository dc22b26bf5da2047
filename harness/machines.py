"""The machines by name: how each is recognised, what its data sheet promises, its suite and its image.

A machine is a board, not a family: boards of one name differ in memory and bandwidth, a MIG slice has a share of its
board, and one whose power limit was lowered is slower where it computes most. The table is machines.toml.

Nothing here imports PyTorch but `visible_gpu`: noxfile.py and the host's side of the containers run where there is
none.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
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
_MIG = re.compile(r"^(.+) MIG ((?:\d+c\.)?\d+g\.(\d+)gb\S*)$")
"""As CUDA names a slice: "NVIDIA A100-SXM4-80GB MIG 3g.40gb"."""
_OF_SLICE = "-mig-"
_CAPPED = re.compile(r"-capped-[1-9]\d*w$", re.ASCII)
_MEMORY_SLICES = 8
_VGPU = re.compile(r"-\d+(-\d+)?([ABCQ]\d?|CME)$", re.ASCII)
"""How the names of vGPU profiles end: "GRID A100-40C", "NVIDIA A100-3-20C", "NVIDIA A100-1-5CME", "NVIDIA A16-1B4"."""
_LAPTOP = re.compile(r"\b(Laptop|Mobile|Max-Q)\b")


class WrongMachineError(Exception):
    """The machine that was asked for is not the one that was found."""


@dataclass(frozen=True)
class Gpu:
    """A GPU as the driver names it."""

    name: str
    compute_capability: tuple[int, int]
    sms: int | None = field(default=None, kw_only=True)
    """Multiprocessors that can be used; None where only the driver's name is known."""
    capped_w: int | None = field(default=None, kw_only=True)
    """Its power limit, where that is well below the board's own (`harness.nvml.GpuSettings.capped_w`); else None."""

    def __str__(self) -> str:
        return self.name if self.capped_w is None else f"{self.name}, capped to {self.capped_w} W"


@dataclass(frozen=True)
class Machine:
    """What the figures are measured on."""

    id: str
    """The board's in machines.toml ("h200", "a100-80gb-sxm"), with its slice behind it ("...-mig-3g-40gb"), and behind
    that a power limit well below the board's own ("...-capped-200w"); of a GPU that is not listed "gpu-" and its name;
    "cpu"."""
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
    family: str | None = None
    """The entry of machines.toml ("a100"); None for the CPU and for a GPU that is not listed."""

    def fits(self, asked: str) -> bool:
        """Whether it is what was asked for: its own id, its family, or "gpu" for one that is not listed."""
        return asked in (self.id, self.family or (CPU if self.device == CPU else UNKNOWN_GPU))


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
    id: str
    """What its records are kept under."""
    sms: int | None = None
    """Multiprocessors of the whole board; None where neither MIG divides it nor an estimate needs it."""
    sm_clock_mhz: int | None = None
    """Boost clock; None where no estimate needs it."""
    l2_mib: int | None = None
    """L2, MiB; None where no estimate needs it."""


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
    boards = tuple(Board(**{"id": name, **board}) for board in entry["boards"])
    image = Image(**entry["image"]) if "image" in entry else None
    return Family(name, entry["title"], (major, minor), boards, image)


def known_ids() -> list[str]:
    """Every name that stands in the table, families first, with "gpu" and "cpu"."""
    boards = [board.id for family in families().values() for board in family.boards]
    return list(dict.fromkeys([*families(), *boards, UNKNOWN_GPU, CPU]))


def is_id(text: str) -> bool:
    """Whether a machine can have this name: also a slice of a board, a capped one, and a GPU that is not listed."""
    uncapped = _CAPPED.sub("", text)
    whole, slice_of, part = uncapped.partition(_OF_SLICE)
    listed = whole in known_ids() and whole not in (UNKNOWN_GPU, CPU)
    own = listed and bool(part or not slice_of)
    return text in known_ids() or own or re.fullmatch(r"gpu-[a-z0-9-]+", text) is not None


def whole_board(machine_id: str) -> str:
    """The board that a slice is of, or that was capped; any other machine as it is."""
    return _CAPPED.sub("", machine_id).partition(_OF_SLICE)[0]


def is_slice(machine_id: str) -> bool:
    """Whether it is a MIG slice of a board."""
    return _OF_SLICE in machine_id


def same_family(machine_id: str, family: str) -> bool:
    """Whether a machine is this entry of the table, or one of its boards as a whole and at its own power limit."""
    boards = families()[family].boards if family in families() else ()
    return machine_id in (family, *(board.id for board in boards))


def memory_gb(device: str) -> float | None:
    """What the board of this device name holds by its data sheet, or what its slice holds by its name."""
    if (mig := _MIG.fullmatch(device)) is not None:
        return float(mig[3])
    boards = (board for family in families().values() for board in family.boards)
    return next((board.memory_gb for board in boards if re.search(board.pattern, device)), None)


def is_virtual(device: str) -> bool:
    """Whether a device's name is that of a vGPU profile."""
    return _VGPU.search(device) is not None


def image_families() -> list[str]:
    """The families that have an image, and sessions of their own."""
    return [family.id for family in families().values() if family.image is not None]


def recognise(gpu: Gpu | None) -> Machine:
    """The machine that holds this GPU; the CPU where there is none."""
    if gpu is None:
        return Machine(CPU, "CPU", CPU, CPU)
    found = _uncapped(gpu)
    if gpu.capped_w is None or _LAPTOP.search(gpu.name):
        return found  # a laptop moves its limit by itself, with its mains, fans and CPU: each would be a new machine
    return replace(found, id=f"{found.id}-capped-{gpu.capped_w}w", title=f"{found.title}, capped to {gpu.capped_w} W")


def _uncapped(gpu: Gpu) -> Machine:
    """The machine as it is at its own power limit."""
    mig = _MIG.fullmatch(gpu.name)
    whole = gpu if mig is None else replace(gpu, name=mig[1])
    for family in families().values():
        if (board := family.board(whole)) is not None:
            limits = (board.bf16_tflops, board.memory_tb_per_s, board.memory_gb)
            if mig is not None:
                return _slice(family, board, mig[2], float(mig[3]), gpu.sms)
            return Machine(board.id, board.title, "cuda", board.suite, *limits, family.id)
    return Machine(f"{UNKNOWN_GPU}-{_slug(gpu.name)}", gpu.name, "cuda", _SUITE_OF_UNKNOWN)


def _slice(family: Family, board: Board, profile: str, memory_gb: float, sms: int | None) -> Machine:
    """One slice of a board: its share of the multiprocessors, and of the memory in whole eighths, with their bandwidth.

    The profile "3g.40gb" names neither share: of an A100's 108 multiprocessors 42, and four eighths of 80 GB.
    """
    tflops = None if sms is None or board.sms is None else board.bf16_tflops * sms / board.sms
    eighths = min(max(round(_MEMORY_SLICES * memory_gb / board.memory_gb), 1), _MEMORY_SLICES)
    tb_per_s = board.memory_tb_per_s * eighths / _MEMORY_SLICES
    name, title = f"{board.id}{_OF_SLICE}{_slug(profile)}", f"{board.title} MIG {profile}"
    return Machine(name, title, "cuda", largest_suite(memory_gb), tflops, tb_per_s, memory_gb, family.id)


def largest_suite(memory_gb: float) -> str:
    """The suite for the most memory that is no more than this."""
    suites = {int(b.suite.removesuffix("gb")): b.suite for f in families().values() for b in f.boards}
    return suites.get(max((gb for gb in suites if gb <= memory_gb), default=0), _SUITE_OF_UNKNOWN)


def why_not_of(machine_id: str, device: str, processor: str | None, capped_w: int | None) -> str | None:
    """Why no record of this device can have this id; None where it follows from the device's name and power limit.

    `processor`: the host's, by the same record, which is the device of a CPU. A GPU that is listed today may have been
    none when it was measured, and keeps the id that it had then.
    """
    if machine_id == CPU:
        if device == processor and not _boards_named(device):
            return None
        return f"machine {CPU!r} must have the host's processor as its device, cpu {processor!r}; got {device!r}"
    uncapped = _CAPPED.sub("", machine_id)
    ids = _boards_named(device)
    if slug := _slug(device):
        ids.append(f"{UNKNOWN_GPU}-{slug}")
    if uncapped not in ids:
        wanted = " or ".join(ids) if ids else "none"
        return f"machine {machine_id!r} does not follow from the device's name {device!r}: that is {wanted}"
    if uncapped != machine_id and machine_id != f"{uncapped}-capped-{capped_w}w":
        limit = "no limit well below its own" if capped_w is None else f"{capped_w} W"
        return f"machine {machine_id!r} is capped, and the record's power limits say {limit}"
    return None


def _boards_named(device: str) -> list[str]:
    """Ids of the listed boards whose name this is, as a whole or with its slice."""
    mig = _MIG.fullmatch(device)
    name, slice_of = (device, "") if mig is None else (mig[1], f"{_OF_SLICE}{_slug(mig[2])}")
    named = (next((b for b in f.boards if re.search(b.pattern, name)), None) for f in families().values())
    return [f"{board.id}{slice_of}" for board in named if board is not None]


def _slug(name: str) -> str:
    """ "NVIDIA GeForce RTX 5090" -> "geforce-rtx-5090"."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower().removeprefix("nvidia ")).strip("-")


def visible_gpu() -> Gpu | None:
    """The GPU that PyTorch would use, or None."""
    import torch  # see above

    from harness import nvml  # which imports it too

    if not torch.cuda.is_available():
        return None
    seen = torch.cuda.get_device_properties(torch.cuda.current_device())
    settings = nvml.settings()
    capped_w = None if settings is None else settings.capped_w
    return Gpu(seen.name, (seen.major, seen.minor), sms=seen.multi_processor_count, capped_w=capped_w)


def machine(required: str | None, gpu: Gpu | None) -> Machine:
    """The machine to measure on. Raises WrongMachineError where another one is required; a CPU is there always."""
    if required == CPU:
        return recognise(None)
    here = recognise(gpu)
    if required is not None and not here.fits(required):
        seen = "no GPU that PyTorch can use" if gpu is None else gpu
        raise WrongMachineError(f"this session needs {named(required)}; found: {seen}")
    return here


def named(required: str) -> str:
    """How a message names a machine that is wanted."""
    if required in families():
        return f"an {families()[required].title}"
    if (capped := _CAPPED.search(required)) is not None:
        return f"{named(required[: capped.start()])}, capped to {capped[0].rpartition('-')[2][:-1]} W"
    titles = {board.id: board.title for family in families().values() for board in family.boards}
    if (board := titles.get(whole_board(required))) is not None:
        return f"an {board}" if required in titles else f"the slice {required.partition(_OF_SLICE)[2]} of an {board}"
    return "a GPU that is not listed" + ("" if required == UNKNOWN_GPU else f", {required}")
