"""What the Triton backend can serve."""

from __future__ import annotations

import importlib
import os

import torch
import triton
from torch import Tensor

MAX_HEAD_DIM = 256
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MIN_CAPABILITY = (8, 0)


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter (TRITON_INTERPRET=1), on any device and slowly."""
    if knobs := getattr(triton, "knobs", None):
        return bool(knobs.runtime.interpret)
    return os.environ.get("TRITON_INTERPRET", "0") == "1"  # before Triton 3.4


def why_not(q: Tensor, v: Tensor) -> str | None:
    """Why these tensors cannot be served, or None if they can."""
    if q.dtype not in DTYPES:
        return f"dtype {q.dtype} is not float32, bfloat16 or float16"
    if max(q.shape[-1], v.shape[-1]) > MAX_HEAD_DIM:
        return f"head sizes {q.shape[-1]} and {v.shape[-1]}: at most {MAX_HEAD_DIM} is supported"
    return _why_not_here(q.device, q.dtype)


@torch.compiler.assume_constant_result
def _why_not_here(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why this machine cannot serve; asked once per graph where one is traced."""
    if interpreted():
        has_bfloat16 = hasattr(importlib.import_module("triton.runtime.interpreter").InterpreterBuilder, "get_bf16")
        lacks = dtype == torch.bfloat16 and not has_bfloat16
        return "dtype torch.bfloat16 is not in Triton's interpreter" if lacks else None
    if device.type != "cuda":
        return f"device {device} is not an NVIDIA GPU (TRITON_INTERPRET=1 runs the kernels on a CPU, slowly)"
    capability = torch.cuda.get_device_capability(device)
    if capability < MIN_CAPABILITY:
        return f"compute capability {capability[0]}.{capability[1]} is below {MIN_CAPABILITY[0]}.{MIN_CAPABILITY[1]}"
    return None
