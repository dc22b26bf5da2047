"""What each kernel of a call takes on an architecture, from compiling it there: instructions, registers, shared memory.

The launches are those of `ahead_of_time.recorded`, so that tiles, warps and stages are the architecture's table's. Both
ways of the selected branch are compiled, whichever a length would take. Needs Triton, and no GPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from unittest import mock

from benchmarks.estimates import sass
from benchmarks.estimates.kernel_table import Kernel
from nsa.triton_backend import dispatch, hopper, tuning
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


def compiled(architectures: Sequence[int], heads: Sequence[tuple[int, int, int]]) -> Iterator[Kernel]:
    """Compile and count kernel after kernel; of Hopper those of `hopper/` and the others. Raises ValueError under
    Triton's interpreter."""
    if dispatch.interpreted():
        raise ValueError("kernels cannot be compiled under Triton's interpreter: unset TRITON_INTERPRET")
    for architecture in architectures:
        for group, dk, dv in heads:
            names = set[tuple[str, bool]]()
            for by_block, portable in ((False, False), (True, False), (False, True), (True, True)):
                if not portable or architecture == 90:
                    yield from _of_call(architecture, Heads(group, dk, dv), names, by_block=by_block, portable=portable)


def _of_call(
    architecture: int, heads: Heads, names: set[tuple[str, bool]], *, by_block: bool, portable: bool
) -> Iterator[Kernel]:
    """The kernels of one call that are not among `names` yet."""
    with ExitStack() as patches:
        launches = patches.enter_context(recorded(architecture))
        patches.enter_context(mock.patch.object(dispatch, "sooner_by_block", return_value=by_block))
        patches.enter_context(
            mock.patch.object(tuning, "masked_launch", return_value=None)
        )  # only longer are estimated
        if portable:
            patches.enter_context(mock.patch.object(hopper, "AVAILABLE", False))
        call(heads, LENGTH, LENGTH)
    for launch in launches:
        named = launch.name, by_block
        if (
            launch.name not in COUNTED
            or named in names
            or (by_block and not launch.name.startswith("selected_kv_major"))
        ):
            continue
        names.add(named)
        needs, counts = launch.needs(), sass.count(sass.parse(sass.disassemble(launch.compiled().asm["cubin"])))
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
