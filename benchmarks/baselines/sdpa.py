"""PyTorch's scaled_dot_product_attention, one named backend at a time, so that none stands in for another."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.baselines.baseline import Baseline, UnsupportedError, needs_cuda
from benchmarks.cases.inputs import Problem

BACKENDS = {
    "sdpa-cudnn": SDPBackend.CUDNN_ATTENTION,
    "sdpa-flash": SDPBackend.FLASH_ATTENTION,
    "sdpa-efficient": SDPBackend.EFFICIENT_ATTENTION,
    "sdpa-math": SDPBackend.MATH,
}
KERNELS = {
    "sdpa-cudnn": ("_scaled_dot_product_cudnn_attention",),
    "sdpa-flash": ("_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu"),
    "sdpa-efficient": ("_scaled_dot_product_efficient_attention",),
}
"""The operator that each runs; "sdpa-math" is made of several."""
_CUDA_ONLY = ("sdpa-cudnn", "sdpa-efficient")
_WITHOUT_GROUPS = ("sdpa-efficient",)
"""Kernels that take as many key heads as query heads: repeating them is part of what such a call costs."""


def attend(problem: Problem, name: str) -> Tensor:
    """Causal attention of the last S of T tokens: [B, S, Hq, Dv]. RuntimeError where the backend refuses.

    `is_causal` aligns at the top left, so that it is right only for S = T; one query at the end sees every key.
    """
    q, k, v = (x.transpose(1, 2) for x in (problem.q, problem.k, problem.v))  # [B, H, tokens, D]
    if q.shape[2] not in (1, k.shape[2]):
        raise ValueError(f"q must hold one query or as many as the {k.shape[2]} keys; got {q.shape[2]}")
    grouped = name not in _WITHOUT_GROUPS
    if not grouped:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    with sdpa_kernel(BACKENDS[name]):
        o = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=q.shape[2] > 1, enable_gqa=grouped)
    return o.transpose(1, 2)


@contextmanager
def refusals_named(name: str) -> Iterator[None]:
    """Turn PyTorch's "no kernel" into UnsupportedError with the reasons that it gives in its warnings."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            yield
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            if "No available kernel" not in str(error) and "No viable backend" not in str(error):
                raise
            reasons = [_one_line(str(warning.message)) for warning in said]
            mine = [reason for reason in reasons if "not used because" not in reason and "disabled" not in reason]
            raise UnsupportedError(f"{name}: {'; '.join(mine) or _one_line(str(error))}") from error


def _one_line(message: str) -> str:
    """PyTorch's text without the place in its own source."""
    return " ".join(message.partition("(Triggered internally")[0].split())


def _absent(name: str, device: str) -> str | None:
    return needs_cuda(device) if name in _CUDA_ONLY else None


BASELINES = [
    Baseline(name, partial(attend, name=name), partial(_absent, name), refusals_named, kernels=KERNELS.get(name, ()))
    for name in BACKENDS
]
