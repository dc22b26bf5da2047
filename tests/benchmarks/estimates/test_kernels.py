"""A kernel that is compiled and counted here, and how many programs fit on a multiprocessor."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

from benchmarks.estimates import kernels


def test_a_compiled_kernel_multiplies_what_its_tile_says() -> None:
    """16 rows and 32 keys of 128 channels per step, by one warp: two products; exp2 of each score and of two rows."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.benchmarks.estimates.compile_one"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    counts, steps = found["counts"], found["counts"]["tensor_flop"] / (2 * 16 * 32 * (128 + 128))
    assert steps >= 1
    assert steps == int(steps)
    assert counts["mufu"] >= steps * 16 * 32 / 32
    assert counts["shared_bytes"] >= steps * 32 * (128 + 128) * 2
    assert counts["tensor"] == steps * 16 * 32 * (128 + 128) / (16 * 8 * 16)
    assert 1 <= found["programs_per_sm"] <= 32


@pytest.mark.parametrize(
    ("architecture", "registers", "shared_bytes", "num_warps", "programs"),
    [
        (80, 255, 0, 4, 2),  # 65536 registers / (256 · 128)
        (80, 32, 60 * 1024, 4, 2),  # 164 KiB / 61
        (86, 32, 60 * 1024, 4, 1),  # 100 KiB / 61
        (86, 32, 0, 8, 6),  # 48 warps
        (89, 32, 0, 1, 24),
        (80, 169, 0, 4, 2),  # 176 per thread
    ],
)
def test_the_scarcest_limits_the_programs(
    architecture: int, registers: int, shared_bytes: int, num_warps: int, programs: int
) -> None:
    assert kernels.programs_per_sm(architecture, registers, shared_bytes, num_warps) == programs
