"""Compile one kernel of a call on an H200, forced or not, without a GPU, and print what was generated as JSON.

Run as a process of its own, without Triton's interpreter, with NSA_FORCE_ARCH as wanted:
`NSA_FORCE_ARCH=sm86 python -m tests.nsa.triton_backend.compile_forced`. The kernel is compiled twice: with the table
that serves, and with the tiles that the table of Hopper has for it.
"""

from __future__ import annotations

import json
from unittest import mock

import triton
from triton.backends.compiler import GPUTarget

from nsa.triton_backend import hopper, tuning
from nsa.triton_backend.ahead_of_time import Heads, Launch, call, recorded

HOPPER = 90
LENGTH = 1024
"""Below `dispatch.KV_MAJOR_MIN_QUERIES`, so that the selected branch goes by query."""


KERNEL, ON_HOPPER = "compressed_window._backward_kv", "hopper.keys_and_values._backward"
"""One computation's kernel, and which has its place on Hopper."""


def generated(launch: Launch) -> dict[str, object]:
    """What the GPU that is there would be given, and the multiplications in it; or why it is refused."""
    try:
        compiled = triton.compile(launch.source, target=GPUTarget("cuda", HOPPER, 32), options=launch.options)
    except triton.runtime.errors.OutOfResources as error:
        return {"refused": str(error)}
    ptx = compiled.asm["ptx"]
    return {
        "target": next(line.split()[1] for line in ptx.splitlines() if line.startswith(".target")),
        "shared_bytes": compiled.metadata.shared,
        "instructions": [name for name in ("mma.sync", "wgmma", "cp.async.bulk") if name in ptx],
    }


def launches() -> list[Launch]:
    """Of one call, forward and backward, on a GPU of Hopper."""
    with recorded(HOPPER) as found:
        call(Heads(16, 128, 128), LENGTH, LENGTH)
    return found


def main() -> None:
    own, table = launches(), tuning.table(HOPPER)
    with mock.patch.object(tuning, "table", return_value=table), mock.patch.object(hopper, "AVAILABLE", False):
        of_hopper = launches()
    kernel, large = (next(one for one in found if one.name in (KERNEL, ON_HOPPER)) for found in (own, of_hopper))
    names = sorted({launch.name for launch in own})
    print(json.dumps({"launched": names, "kernel": generated(kernel), "of_hopper": generated(large)}))


if __name__ == "__main__":
    main()
