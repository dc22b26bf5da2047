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
    assert len(needs) == 8
    limit = SHARED_MEMORY_KIB[architecture] * 1024
    assert not {name: need for name, need in needs.items() if need["shared_bytes"] > limit}
    streams = {name for name, need in needs.items() if need["loads_ahead"]}
    assert streams == {"decode_kernels._compressed", "decode_kernels._selected_window"}
    waiting, leading = ({name for name, need in needs.items() if need[k]} for k in ("waits", "launches_dependents"))
    early = architecture >= 90  # programmatic dependent launch
    assert waiting == (needs.keys() - {"decode_kernels._compressed"} if early else set())
    assert leading == (needs.keys() - {"decode_kernels._merge", "decode_kernels._merge of few"} if early else set())
    probabilities = ("_group_probabilities", "_choose of few", "_choose of fewest")
    before_waiting = {"_choose": 1, **dict.fromkeys(probabilities, 1)}  # lengths
    before_waiting |= {"_merge": 3, "_merge of few": 3}  # gates
    found = {name: needs[f"decode_kernels.{name}"]["loads_before_waiting"] for name in before_waiting}
    assert not early or found == before_waiting
    # the heads of a group, in one order whatever the length
    assert all(needs[f"decode_kernels.{name}"]["one_thread_adds"] for name in probabilities)
    if CALLS[call][:4] == (1, 16, 128, 128):  # three programs on an SM
        used = [needs[name]["registers"] for name in streams]
        assert all(one["used"] <= 168 and one["stack_bytes"] <= 16 for one in used)
