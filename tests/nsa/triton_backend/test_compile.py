"""Every kernel compiles for the GPUs people run it on, and fits their shared memory, shown without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

SHARED_MEMORY_KIB = {86: 99, 90: 227}  # per block: RTX 3090 (an A100 has 163), H100


@pytest.mark.parametrize("architecture", [86, 90])
def test_every_kernel_compiles_and_fits_in_shared_memory(architecture: int) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.nsa.triton_backend.compile_kernels", str(architecture)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    shared_bytes = json.loads(done.stdout.splitlines()[-1])
    assert len(shared_bytes) == 11
    too_large = {k: b for k, b in shared_bytes.items() if b > SHARED_MEMORY_KIB[architecture] * 1024}
    assert not too_large, f"bytes of shared memory over {SHARED_MEMORY_KIB[architecture]} KiB: {too_large}"
