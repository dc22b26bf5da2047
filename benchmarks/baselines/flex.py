"""PyTorch's FlexAttention, compiled, with a causal block mask: what a user gets who writes a mask and no kernel."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from benchmarks.baselines.baseline import Baseline
from benchmarks.cases.inputs import Problem


def attend(problem: Problem) -> Tensor:
    """Causal attention of the last S of T tokens: [B, S, Hq, Dv]."""
    q, k, v = (x.transpose(1, 2) for x in (problem.q, problem.k, problem.v))  # [B, H, tokens, D]
    mask = _causal(q.shape[2], k.shape[2], q.device)
    o: Tensor = _compiled(q.shape, k.shape, v.shape, q.dtype, q.device)(q, k, v, block_mask=mask, enable_gqa=True)
    return o.transpose(1, 2)


@cache
def _causal(num_queries: int, num_keys: int, device: torch.device) -> BlockMask:
    """Made once per shape: its cost is not the kernel's."""

    def may_see(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return key <= query + (num_keys - num_queries)

    return create_block_mask(may_see, None, None, num_queries, num_keys, device=str(device))


@cache
def _compiled(*case: object) -> Callable[..., Any]:
    """One compilation per case, the earlier ones forgotten: past the limit of recompilations PyTorch would run the
    unfused fallback, which is another implementation."""
    torch.compiler.reset()
    return torch.compile(flex_attention, dynamic=False)


BASELINES = [Baseline("flex", attend)]
