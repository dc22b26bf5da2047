"""NSA of `flash-linear-attention`: compression blocks that do not overlap, the same forced blocks, phi = mean.

Its semantics are those of this project with l = d = l' = 64, so that it meets the same oracle with other settings; its
figures are of other work than NSA's with the paper's l = 32, d = 16. Its window comes from `flash-attn`.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from benchmarks.baselines import flash
from benchmarks.baselines.baseline import Baseline, needs_cuda, not_installed
from benchmarks.cases.inputs import Problem
from nsa import NSAConfig

NAME = "fla-nsa"
CONFIG = NSAConfig(l=64, d=64, l_sel=64, n_sel=16, w=512)


def attend(problem: Problem) -> Tensor:
    """All three branches and the gated sum: [B, S, Hq, Dv]."""
    compressed, selected, window = problem.gates.unbind(-1)  # [B, S, Hq] each
    o: Tensor = _parallel().parallel_nsa(
        problem.q,
        problem.k,
        problem.v,
        g_cmp=compressed,
        g_slc=selected,
        g_swa=window,
        block_counts=CONFIG.n_sel,
        block_size=CONFIG.l_sel,
        window_size=CONFIG.w,
    )
    return o


def block_indices(problem: Problem) -> Tensor:
    """The blocks that `attend` selects, in the order and with the padding that the correctness checks expect."""
    parallel, scale = _parallel(), problem.q.shape[-1] ** -0.5
    k, v = (parallel.mean_pooling(x, CONFIG.l, None) for x in (problem.k, problem.v))
    sizes = {"TK": problem.k.shape[1], "block_size": CONFIG.l_sel, "scale": scale}
    _, lse = parallel.parallel_nsa_compression(q=problem.q, k=k, v=v, **sizes)
    chosen: Tensor = parallel.parallel_nsa_topk(q=problem.q, k=k, lse=lse, block_counts=CONFIG.n_sel, **sizes)
    beyond = torch.iinfo(torch.int32).max
    ordered = torch.where(chosen < 0, beyond, chosen).sort(-1).values
    return torch.where(ordered == beyond, -1, ordered)


def absent(device: str) -> str | None:
    """Why it, or the package of its window, is not on this machine."""
    if reason := needs_cuda(device):
        return reason
    try:
        _parallel()
    except ImportError as error:
        return not_installed(error, "flash-linear-attention")
    window = flash.absent(flash.VERSION_2, device)
    return window and f"takes its window from {flash.VERSION_2}, which {window}"


def _parallel() -> Any:
    return import_module("fla.ops.nsa.parallel")


BASELINES = [Baseline(NAME, attend, absent, config=CONFIG, block_indices=block_indices)]
