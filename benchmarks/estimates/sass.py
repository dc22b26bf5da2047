"""Instructions of a kernel's inner loop, counted in its disassembly (SASS).

A loop is what a branch backwards encloses. Of the loops that multiply on tensor cores and enclose no other such loop,
the one with the fewest instructions per operation is counted: the one without masks, in which a long call spends its
time. A kernel without tensor cores is counted from beginning to end.
"""

from __future__ import annotations

import importlib.resources
import re
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass

NVDISASM = "backends/nvidia/bin/nvdisasm"
"""In Triton's package."""
_LABEL = re.compile(r"^(\.L\w*):")
_INSTRUCTION = re.compile(
    r"^\s+(?:/\*[0-9a-f]+\*/\s+)?(?P<predicate>@!?U?P\w+\s+)?(?P<name>[A-Z][A-Z0-9_.a-z]*)(?P<rest>.*);"
)
_TARGET = re.compile(r"`\((\.L\w*)\)")
_SYNCHRONOUS = re.compile(r"HMMA\.(?P<shape>16816|1688|884)\b")
_WARPGROUP = re.compile(r"HGMMA\.(\d+)x(\d+)x(\d+)")
_MULTIPLY_ADDS = {"16816": 16 * 8 * 16, "1688": 16 * 8 * 8, "884": 8 * 8 * 4}
_FP32 = {"FADD", "FMUL", "FFMA"}
_SHARED = {"LDS", "STS", "LDSM", "STSM", "LDGSTS", "ATOMS"}
_GLOBAL = {"LDG", "STG", "LDGSTS", "UBLKCP", "UTMALDG", "UTMASTG"}
_BARRIERS = {"BAR", "DEPBAR", "LDGDEPBAR", "WARPSYNC", "SYNCS", "WARPGROUP", "BSYNC", "BSSY", "MEMBAR", "ERRBAR"}
_CONTROL = {"BRA", "EXIT", "NOP", "CALL", "RET", "BREAK"}


@dataclass(frozen=True)
class Instruction:
    """One line of the disassembly."""

    name: str
    """With its suffixes: "LDG.E.128"."""
    rest: str
    label: str | None
    """The label in front of it."""

    @property
    def base(self) -> str:
        return self.name.partition(".")[0]

    @property
    def target(self) -> str | None:
        """Where a branch leads."""
        found = _TARGET.search(self.rest) if self.base == "BRA" else None
        return found[1] if found else None


@dataclass(frozen=True)
class Counts:
    """Instructions of one warp: in one pass of the inner loop, or in a kernel without tensor cores as a whole."""

    tensor_flop: float
    """Operations on tensor cores; 0 without them. Of a warpgroup's instruction a quarter is each warp's."""
    synchronous_flop: float
    """Those of them by mma.sync, which Hopper runs below its peak."""
    tensor: int
    mufu: int
    """exp2, reciprocals, ..."""
    fp32: int
    integer: int
    """Integers, comparisons, conversions, moves, and minimum and maximum of floats."""
    shuffle: int
    shared: int
    shared_bytes: int
    """Through shared memory, by loads, stores and copies from global memory."""
    global_: int
    barrier: int

    @property
    def issued(self) -> int:
        """All of them; a copy from global to shared memory is counted as shared alone."""
        return (
            self.tensor
            + self.mufu
            + self.fp32
            + self.integer
            + self.shuffle
            + self.shared
            + self.global_
            + self.barrier
        )


def disassemble(cubin: bytes) -> str:
    """A cubin's SASS, by the nvdisasm that Triton brings. Raises CalledProcessError."""
    command = str(importlib.resources.files("triton") / NVDISASM)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([command, "-c", file.name], capture_output=True, text=True, check=True).stdout


def parse(text: str) -> list[Instruction]:
    """The instructions of the disassembly of one kernel, in their order."""
    found: list[Instruction] = []
    label = None
    for line in text.splitlines():
        if (named := _LABEL.match(line)) is not None:
            label = named[1]
        elif (one := _INSTRUCTION.match(line)) is not None:
            found.append(Instruction(one["name"], one["rest"], label))
            label = None
    return found


def count(instructions: Sequence[Instruction]) -> Counts:
    """Of the inner loop, or of everything without one. Raises ValueError where there is nothing."""
    if not instructions:
        raise ValueError("no instruction in the disassembly")
    counted = [_counts(instructions[begin:end]) for begin, end in _tensor_loops(instructions)]
    return min(counted, key=lambda one: one.issued / one.tensor_flop) if counted else _counts(instructions)


def _tensor_loops(instructions: Sequence[Instruction]) -> list[tuple[int, int]]:
    """(first, past the last) instruction of each innermost loop with tensor cores.

    Behind the last EXIT stand only waits that were moved out of line, whose way back encloses no loop.
    """
    places = {one.label: i for i, one in enumerate(instructions) if one.label}
    end = max((i for i, one in enumerate(instructions) if one.base == "EXIT"), default=len(instructions))
    loops = set()
    for i, one in enumerate(instructions[:end]):
        begin = places.get(one.target or "")
        if begin is not None and begin <= i and any(_multiply_adds(x) for x in instructions[begin : i + 1]):
            loops.add((begin, i + 1))
    return [a for a in loops if not any(a != b and a[0] <= b[0] and b[1] <= a[1] for b in loops)]


def _multiply_adds(one: Instruction) -> tuple[float, bool] | None:
    """(multiply-adds of one warp, whether by mma.sync); None for any other instruction."""
    if (synchronous := _SYNCHRONOUS.match(one.name)) is not None:
        return float(_MULTIPLY_ADDS[synchronous["shape"]]), True
    if (group := _WARPGROUP.match(one.name)) is not None:
        return int(group[1]) * int(group[2]) * int(group[3]) / 4, False
    return None


def _counts(instructions: Sequence[Instruction]) -> Counts:
    kinds = dict.fromkeys(("tensor", "mufu", "fp32", "integer", "shuffle", "shared", "global_", "barrier"), 0)
    flop = synchronous_flop = 0.0
    shared_bytes = 0
    for one in instructions:
        if (product := _multiply_adds(one)) is not None:
            flop += 2 * product[0]
            synchronous_flop += 2 * product[0] * product[1]
        if one.base in _SHARED:
            shared_bytes += _shared_bytes(one)
        if (kind := _kind(one)) is not None:
            kinds[kind] += 1
    return Counts(flop, synchronous_flop, shared_bytes=shared_bytes, **kinds)


def _kind(one: Instruction) -> str | None:
    if _multiply_adds(one) is not None:
        return "tensor"
    for kind, bases in (("shared", _SHARED), ("global_", _GLOBAL), ("barrier", _BARRIERS), ("fp32", _FP32)):
        if one.base in bases:
            return kind
    named = {"MUFU": "mufu", "SHFL": "shuffle"}
    return None if one.base in _CONTROL else named.get(one.base, "integer")


def _shared_bytes(one: Instruction) -> int:
    """Of a whole warp."""
    if one.base in ("LDSM", "STSM"):
        return 128 * int(one.name.rpartition(".")[2]) if one.name[-1] in "24" else 128
    width = next((bits for bits in (128, 64) if f".{bits}" in one.name), 32)
    return 32 * width // 8
