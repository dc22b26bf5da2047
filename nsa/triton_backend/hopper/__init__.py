"""Forward, dq and scores again with Hopper's own instructions, in Gluon: TMA brings tiles while others are multiplied.

They serve 16-bit heads of 128 that TMA can read where they lie, on an architecture whose table has a launch for them
("hopper.interval_forward", ..., measured with 16 heads per group). All else takes the kernels of the folder above,
which say what is computed; nothing but how differs here. Gluon is an experiment of Triton's: only versions that were
tried serve.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from nsa.triton_backend import support, tuning

TRIED = ("3.6.", "3.7.")
"""Versions of Triton."""
AVAILABLE = triton.__version__.startswith(TRIED)
if AVAILABLE:
    from nsa.triton_backend.hopper import interval, interval_backward, scores, selected  # noqa: F401 - for the callers

CHANNELS = 128
ALIGNMENT = 16  # bytes, of addresses and steps (CUDA driver API, cuTensorMapEncodeTiled)


def serves(kernel: str, group: int, *read: Tensor) -> bool:
    """Whether "interval_forward", ... can be launched for groups of so many heads and tensors [B, T, H, D] that TMA
    is to read."""
    table, name = tuning.table(tuning.architecture(read[0].device)), f"hopper.{kernel}"
    if not AVAILABLE or support.interpreted() or name not in table.narrow:
        return False
    rows = table.of(name, "narrow", group).rows
    return triton.next_power_of_2(group) <= rows and all(map(_readable, read))


def _readable(x: Tensor) -> bool:
    """Whether it has a type and the channels that these kernels take, and TMA can read it where it lies."""
    steps = [x.stride(i) * x.itemsize for i in range(3) if x.shape[i] > 1]
    aligned = x.data_ptr() % ALIGNMENT == 0 and all(step > 0 and step % ALIGNMENT == 0 for step in steps)
    known = x.dtype in (torch.bfloat16, torch.float16) and x.shape[3] == CHANNELS
    return known and x.numel() > 0 and x.stride(3) == 1 and aligned
