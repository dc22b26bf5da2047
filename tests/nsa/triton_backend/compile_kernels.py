"""Compile every kernel of a call and of RoPE for one architecture, without a GPU, and print what each needs as JSON.

Run as a process of its own, without Triton's interpreter, with the compute capability, G, Dk and Dv:
`python -m tests.nsa.triton_backend.compile_kernels 86 16 128 128`. A kernel's name is followed by which of its
versions it is; "forward" behind the sizes leaves the backward pass out, "portable" the kernels of `hopper/`, and
"float32" is of that type in place of bfloat16. "by-block" compiles the selected branch's loop over blocks alone, as
where L2 holds no head, in several chunks of queries. The selected branch of short sequences and that of long ones are
both compiled, queries that share their blocks, all of them or those of few blocks, and others, calls by plan and
others.
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections import Counter
from unittest import mock

import torch

from nsa.rope import rotate_both
from nsa.triton_backend import dispatch, hopper, selected_kv_major, traffic
from nsa.triton_backend.ahead_of_time import Heads, Launch, call, recorded

OF_BLOCKS = (
    "selected_kv_major.", "partial_sums.", "hopper.selected_kv_major.", "hopper.selected_keys_and_values."
)  # fmt: skip
LENGTH = 2048  # from there on small groups take the KV-stationary forward
BY_QUERY = ("hopper.selected._forward", "hopper.selected._backward_q")


def rotate(group: int, dk: int, *, backward: bool) -> None:
    """RoPE of the queries and keys of a layer."""
    q, k = (torch.zeros(1, 8, heads, dk, dtype=torch.bfloat16, requires_grad=True) for heads in (2 * group, 6))
    rotated = rotate_both(q, k, None, 10000.0, "triton")
    if backward:
        torch.autograd.grad(rotated, (q, k), [torch.zeros_like(x) for x in rotated])


def partly_shared(heads: Heads, *, backward: bool) -> list[Launch]:
    """The launches of the selected branch in a sequence where some queries share their blocks and some do not."""
    with (
        recorded(90) as launches,
        mock.patch.object(dispatch, "SHARED_MIN_QUERIES", LENGTH),
        mock.patch.object(traffic, "expected_union", return_value=math.inf),
    ):
        call(heads, LENGTH, LENGTH, backward=backward)
    shared = [launch for launch in launches if launch.name.startswith("hopper.shared_blocks")]
    return shared and [*shared, *(launch for launch in launches if launch.name in BY_QUERY)]


def main() -> None:
    architecture, group, dk, dv = map(int, sys.argv[1:5])
    hopper.AVAILABLE &= "portable" not in sys.argv
    if "by-block" in sys.argv:
        selected_kv_major.BACKWARD_SCRATCH = 2**22
    by_block = {"return_value": True} if "by-block" in sys.argv else {"wraps": dispatch.sooner_by_block}
    backward, dtype = "forward" not in sys.argv, torch.float32 if "float32" in sys.argv else torch.bfloat16
    with recorded(architecture) as launches, mock.patch.object(dispatch, "sooner_by_block", **by_block):
        planned = dispatch.MOST_PLANNED_BYTES
        calls = [(LENGTH, 0), (LENGTH + 1, planned)]
        if dk < hopper.CHANNELS:  # with larger ones no plan serves
            calls.append((LENGTH + 1, 0))
        for least, most_planned in calls:
            with (  # `least` is of `selected_masked.py` and `hopper/shared_blocks.py`
                mock.patch.object(dispatch, "MASKED_MIN_QUERIES", least),
                mock.patch.object(dispatch, "SHARED_MIN_QUERIES", least),
                mock.patch.object(dispatch, "MOST_PLANNED_BYTES", most_planned),
            ):
                call(Heads(group, dk, dv, dtype=dtype), LENGTH, LENGTH, backward=backward)
        rotate(group, dk, backward=backward)
    if architecture == 90 and "by-block" not in sys.argv:
        launches += partly_shared(Heads(group, dk, dv, dtype=dtype), backward=backward)
    needs, versions = {}, Counter[str]()
    for launch in launches:
        if "by-block" in sys.argv and not launch.name.startswith(OF_BLOCKS):
            continue
        versions[launch.name] += 1
        needs[f"{launch.name} {versions[launch.name]}"] = dataclasses.asdict(launch.needs())
    print(json.dumps(needs))


if __name__ == "__main__":
    main()
