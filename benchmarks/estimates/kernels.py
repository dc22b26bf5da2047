"""What each kernel of a call takes on an architecture, from compiling it there: instructions, registers, shared memory.

The launches are those of `ahead_of_time.recorded`, so that tiles, warps and stages are the architecture's table's. Both
ways of the selected branch are compiled, whichever a length would take. Needs Triton, and no GPU.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import triton

from benchmarks.estimates import sass
from benchmarks.estimates.sass import Counts
from harness import schema
from nsa.io import atomic_write
from nsa.triton_backend import dispatch, hopper
from nsa.triton_backend.ahead_of_time import Heads, call, recorded

ARCHITECTURES = (80, 86, 89, 90)
HEADS = ((16, 128, 128), (4, 128, 128), (6, 64, 64), (16, 192, 128))
"""(query heads per kv head, Dk, Dv) of the cases that are estimated."""
COUNTED = (
    "compressed_window._forward", "compressed_window._backward_q", "compressed_window._backward_kv",
    "scores._group_probabilities", "topk._topk", "selected._forward", "selected._backward_q",
    "selected_kv_major._forward", "selected_kv_major._backward", "hopper.compressed_window._forward",
    "hopper.compressed_window._backward_q", "hopper.scores._group_probabilities", "hopper.selected._forward",
    "hopper.selected._backward_q",
)  # fmt: skip
"""Others only move bytes."""
LENGTH = dispatch.KV_MAJOR_MIN_QUERIES
REGISTERS_PER_SM = 65536
WARPS_PER_SM = {80: 64, 86: 48, 89: 48, 90: 64}
SHARED_KIB_PER_SM = {80: 164, 86: 100, 89: 100, 90: 228}
"""CUDA programming guide, "technical specifications per compute capability"."""
RESERVED_SHARED_BYTES = 1024
"""Of each program, by the system."""
PROGRAMS_PER_SM = {80: 32, 86: 16, 89: 24, 90: 32}


@dataclass(frozen=True)
class Kernel:
    """One kernel of a call on one architecture."""

    architecture: int
    group: int
    dk: int
    dv: int
    name: str
    """File and function: "compressed_window._forward"."""
    by_block: bool
    """Whether the selected branch's call went by block; of `selected_kv_major._backward`, whether it gives dq too."""
    counts: Counts
    num_warps: int
    registers: int
    """Per thread."""
    spilled_bytes: int
    """Per thread."""
    shared_bytes: int
    programs_per_sm: int


def compiled(architectures: Sequence[int], heads: Sequence[tuple[int, int, int]]) -> Iterator[Kernel]:
    """Compile and count kernel after kernel; of Hopper those of `hopper/` and the others."""
    for architecture in architectures:
        for group, dk, dv in heads:
            for by_block in (False, True):
                yield from _of_call(architecture, Heads(group, dk, dv), by_block, portable=False)
            if architecture == 90:
                yield from _of_call(architecture, Heads(group, dk, dv), False, portable=True)


def _of_call(architecture: int, heads: Heads, by_block: bool, *, portable: bool) -> Iterator[Kernel]:
    with ExitStack() as patches:
        launches = patches.enter_context(recorded(architecture))
        patches.enter_context(mock.patch.object(dispatch, "sooner_by_block", return_value=by_block))
        if portable:
            patches.enter_context(mock.patch.object(hopper, "AVAILABLE", False))
        call(heads, LENGTH, LENGTH)
    names = set[str]()
    for launch in launches:
        of_selected = launch.name.startswith(("selected", "hopper.selected"))
        if launch.name not in COUNTED or launch.name in names or (by_block and not of_selected):
            continue
        names.add(launch.name)
        needs, counts = launch.needs(), sass.count(sass.parse(sass.disassemble(launch.compile().asm["cubin"])))
        fitting = programs_per_sm(architecture, needs.registers, needs.shared_bytes, needs.num_warps)
        yield Kernel(
            architecture, heads.group, heads.dk, heads.dv, launch.name, by_block, counts, needs.num_warps,
            needs.registers, needs.spilled_bytes, needs.shared_bytes, fitting,
        )  # fmt: skip


def programs_per_sm(architecture: int, registers: int, shared_bytes: int, num_warps: int) -> int:
    """How many programs fit on a multiprocessor: registers are given to warps in steps of 8 per thread."""
    by_registers = REGISTERS_PER_SM // (32 * num_warps * (-(-registers // 8) * 8))
    by_shared = SHARED_KIB_PER_SM[architecture] * 1024 // (shared_bytes + RESERVED_SHARED_BYTES)
    by_warps = WARPS_PER_SM[architecture] // num_warps
    return min(by_registers, by_shared, by_warps, PROGRAMS_PER_SM[architecture])


@dataclass(frozen=True)
class KernelTable:
    """The file of all kernels."""

    triton: str
    """The version that compiled them."""
    kernels: tuple[Kernel, ...]

    def find(self, architecture: int, heads: tuple[int, int, int], name: str, by_block: bool = False) -> Kernel:
        """One of them. Raises KeyError where it was not compiled."""
        for one in self.kernels:
            if (one.architecture, (one.group, one.dk, one.dv), one.name, one.by_block) == (
                architecture, heads, name, by_block,
            ):  # fmt: skip
                return one
        raise KeyError(f"{name} of {heads} on sm{architecture}, by_block={by_block}")


def path(results: Path) -> Path:
    """Where the table stands under a folder of results."""
    return results / "estimates" / "kernels.json"


def write(results: Path, kernels: Sequence[Kernel]) -> Path:
    """Replace the table, a kernel per line."""
    lines = ",\n".join(json.dumps(dataclasses.asdict(one)) for one in kernels)
    text = f'{{"triton": {json.dumps(triton.__version__)}, "kernels": [\n{lines}\n]}}\n'
    file = path(results)
    file.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(file, text.encode())
    return file


def read(results: Path) -> KernelTable:
    """The table. Raises FileNotFoundError, and ValueError naming the file and what is wrong with it."""
    file = path(results)
    try:
        return schema.build(KernelTable, json.loads(file.read_text(encoding="utf-8")), "table")
    except (ValueError, TypeError) as error:
        raise ValueError(f"{file}: {error}") from error
