"""PyTorch's scaled_dot_product_attention, one named backend at a time, so that none stands in for another."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.inputs import Problem

BACKENDS = {
    "sdpa-cudnn": SDPBackend.CUDNN_ATTENTION,
    "sdpa-flash": SDPBackend.FLASH_ATTENTION,
    "sdpa-efficient": SDPBackend.EFFICIENT_ATTENTION,
    "sdpa-math": SDPBackend.MATH,
}


class UnsupportedError(Exception):
    """The baseline refuses this case; the message is its own reason."""


class NotPresentError(Exception):
    """The baseline is not on this machine."""


def attend(problem: Problem, name: str) -> Tensor:
    """Causal attention of the last S of T tokens: [B, S, Hq, Dv]. RuntimeError where the backend refuses.

    `is_causal` aligns at the top left, so that it is right only for S = T; one query at the end sees every key.
    """
    q, k, v = (x.transpose(1, 2) for x in (problem.q, problem.k, problem.v))  # [B, H, tokens, D]
    if q.shape[2] not in (1, k.shape[2]):
        raise ValueError(f"q must hold one query or as many as the {k.shape[2]} keys; got {q.shape[2]}")
    causal = q.shape[2] > 1
    with sdpa_kernel(BACKENDS[name]):
        o = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
    return o.transpose(1, 2)


def require(problem: Problem, name: str) -> None:
    """Run it once. Raises NotPresentError or UnsupportedError with the reasons that PyTorch gives in its warnings."""
    if problem.q.device.type == "cpu" and name in ("sdpa-cudnn", "sdpa-efficient"):
        raise NotPresentError(f"{name} exists on CUDA devices only")
    with refusals_named(), torch.no_grad():
        attend(problem, name)


@contextmanager
def refusals_named() -> Iterator[None]:
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
            mine = [reason for reason in reasons if "not used because" not in reason]
            raise UnsupportedError("; ".join(mine) or _one_line(str(error))) from error


def _one_line(message: str) -> str:
    """PyTorch's text without the place in its own source."""
    return " ".join(message.partition("(Triggered internally")[0].split())
