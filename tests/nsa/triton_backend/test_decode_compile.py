"""Every decode kernel compiles for the GPUs people run it on, loads ahead, waits for the launch before, and fits."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

SHARED_MEMORY_KIB = {80: 163, 86: 99, 89: 99, 90: 227}  # per block: A100, RTX 3090, RTX 4090, H100
CALLS = {
    "a token, in pages": (1, 16, 128, 128, 64),
    "a token, side by side": (1, 16, 128, 128, 0),
    "eight tokens of the paper's heads": (8, 16, 192, 128, 64),
    "a wide group of wide heads": (1, 64, 192, 128, 64),
    "a small group": (4, 4, 64, 64, 64),
}
CI = {
    (80, "a wide group of wide heads"),
    (86, "eight tokens of the paper's heads"),
    (90, "a token, in pages"),
}


@pytest.mark.parametrize(
    ("architecture", "call"),
    [
        pytest.param(a, call, marks=() if (a, call) in CI else pytest.mark.nightly)
        for a in SHARED_MEMORY_KIB
        for call in CALLS
    ],
)
def test_the_decode_kernels_compile_and_fit_in_shared_memory(architecture: int, call: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.nsa.triton_backend.compile_decode", *map(str, (architecture, *CALLS[call]))]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    needs = json.loads(done.stdout.splitlines()[-1])
    assert len(needs) == 6
    limit = SHARED_MEMORY_KIB[architecture] * 1024
    assert not {name: need for name, need in needs.items() if need["shared_bytes"] > limit}
    streams = {name for name, need in needs.items() if need["loads_ahead"]}
    assert streams == {"decode_kernels._compressed", "decode_kernels._selected_window"}
    waiting, leading = ({name for name, need in needs.items() if need[k]} for k in ("waits", "launches_dependents"))
    early = architecture >= 90  # programmatic dependent launch
    assert waiting == (needs.keys() - {"decode_kernels._compressed"} if early else set())
    assert leading == (needs.keys() - {"decode_kernels._merge"} if early else set())
    lengths_alone = {
        "decode_kernels._group_probabilities": 1,
        "decode_kernels._choose": 1,
        "decode_kernels._merge": 3,
    }  # gates
    lengths_alone["decode_kernels._choose of few scores"] = 1
    assert not early or lengths_alone.items() <= {n: need["loads_before_waiting"] for n, need in needs.items()}.items()
