"""Your own NSA as a contender to the bench: it meets the same oracle as ours, and is timed beside it.

    pip install --no-build-isolation --no-deps -e examples/contender
    python -m benchmarks run --quick --contenders masked-nsa --cases "prefill-forward/8x2x64/b1/s512/float32"

The entry point in pyproject.toml leads to `CONTENDER` below. This one keeps the choice of blocks and the compressed
branch of `nsa`, and computes the other two branches with plain masks: right, and slow where the text is long. Replace
`attend` by a call of your own kernels, and `block_indices` by what they choose.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import nsa
from benchmarks.baselines import Baseline
from benchmarks.cases.inputs import Problem
from benchmarks.cases.key import Key

CONFIG = nsa.NSAConfig()  # the paper's settings; with others of your own, the verdict says that it is of other work


def block_indices(problem: Problem) -> Tensor:
    """The selected blocks, int32 [B, S, Hkv, n], ascending and padded with -1.

    The oracle follows them, once it has seen that no better block was left out.
    """
    return nsa.select_blocks(problem.q, nsa.compress(problem.k, CONFIG), CONFIG, problem.k.shape[1])


def attend(problem: Problem) -> Tensor:
    """All three branches and their gated sum, [B, S, Hq, Dv]."""
    q, k, v = problem.q, problem.k, problem.v  # [B, S, Hq, Dk], [B, T, Hkv, Dk], [B, T, Hkv, Dv]
    T = k.shape[1]
    k_cmp, v_cmp = nsa.compress(k, CONFIG), nsa.compress(v, CONFIG)
    compressed, lse = nsa.compressed_attention(q, k_cmp, v_cmp, CONFIG, T)
    blocks = nsa.select_blocks(q, k_cmp, CONFIG, T, lse)

    t = torch.arange(T - q.shape[1], T, device=q.device)[:, None]  # [S, 1]: where each query stands
    key = torch.arange(T, device=q.device)  # [T]
    in_window = (key <= t) & (key > t - CONFIG.w)  # [S, T]
    # -1 pads a choice; a place of its own behind the last block takes it
    num_blocks = -(-T // CONFIG.l_sel)
    chosen = torch.zeros(*blocks.shape[:3], num_blocks + 1, dtype=torch.bool, device=q.device)
    chosen.scatter_(-1, blocks.long() % (num_blocks + 1), True)
    in_block = chosen[..., key // CONFIG.l_sel].transpose(1, 2) & (key <= t)  # [B, Hkv, S, T]
    in_block = in_block.repeat_interleave(q.shape[2] // k.shape[2], 1)  # one choice for all heads of a group

    selected, window = (masked_attention(q, k, v, mask) for mask in (in_block, in_window))
    return nsa.combine((compressed, selected, window), problem.gates)


def masked_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # [B, heads, tokens, D]
    return scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True).transpose(1, 2)


def not_served(key: Key) -> str | None:
    """Why a case is left out; the run prints it as NOT SERVED."""
    if key.num_queries * key.num_keys * key.heads > 2**31:
        return "masks of [S, T] for every head do not fit"
    return None


CONTENDER = Baseline(
    "masked-nsa",  # as in pyproject.toml
    attend,
    config=CONFIG,  # None: causal dense attention, which has no blocks
    block_indices=block_indices,
    not_served=not_served,
)
