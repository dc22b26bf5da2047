"""The `flash-attn` packages: version 2 (CUDA), and 4 (CuTe), which lives beside it in one namespace.

Both take [B, tokens, heads, D] with fewer key heads, and align causal queries at the end of the keys.
"""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import Any

from torch import Tensor

from benchmarks.baselines.baseline import Baseline, needs_cuda, not_installed
from benchmarks.cases.inputs import Problem

VERSION_2 = "flash-attn"
VERSION_4 = "flash-attn-4"
_MODULES = {VERSION_2: "flash_attn", VERSION_4: "flash_attn.cute"}


def attend_2(problem: Problem) -> Tensor:
    """FlashAttention-2 from its own package; PyTorch's copy of it is "sdpa-flash"."""
    o: Tensor = _function(VERSION_2)(problem.q, problem.k, problem.v, causal=True)
    return o


def attend_4(problem: Problem) -> Tensor:
    """FlashAttention-4, which returns (o, lse)."""
    o: Tensor = _function(VERSION_4)(problem.q, problem.k, problem.v, causal=True)[0]
    return o


def absent(name: str, device: str) -> str | None:
    """Why a version is not on this machine. The other one alone leaves `flash_attn` an empty namespace."""
    if reason := needs_cuda(device):
        return reason
    try:
        _function(name)
    except (ImportError, AttributeError) as error:
        return not_installed(error, name)
    return None


def _function(name: str) -> Any:
    return import_module(_MODULES[name]).flash_attn_func


BASELINES = [
    Baseline(VERSION_2, attend_2, partial(absent, VERSION_2)),
    Baseline(VERSION_4, attend_4, partial(absent, VERSION_4)),
]
