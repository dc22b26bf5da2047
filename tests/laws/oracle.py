"""An oracle that is not the code under test: dense attention under masks that are counted out token by token.

It takes nothing from `nsa` but the numbers in a config. Wherever it compares positions it does so as
[queries, keys] tensors, so it is only for sizes at which S·T fits in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from nsa.config import BRANCHES
from tests.laws.cases import Case, Inputs

Attention = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""o of q, k, v and a mask, as `attend` takes them."""
_AT_ONCE = 2**26
"""Scores that may be in memory together: 0.5 GiB in float64."""


def query_tokens(case: Case, device: torch.device) -> tuple[Tensor, Tensor]:
    """(token, first token of its document) of each query, int64 [S]."""
    tokens = torch.arange(case.offset, case.keys, device=device)
    starts = torch.zeros_like(tokens)
    for start, end in pairwise(case.bounds):
        starts[(tokens >= start) & (tokens < end)] = start
    return tokens, starts


def compressed_blocks(case: Case) -> list[tuple[int, int]]:
    """(first token, first token of the document) of every full compression block, in the order of the slots."""
    l, d = case.config.l, case.config.d
    bounds = pairwise(case.bounds)
    return [(first, start) for start, end in bounds for first in range(start, end, d) if first + l <= end]


def compressed_mask(case: Case, device: torch.device) -> Tensor:
    """bool [S, blocks]: token t sees the blocks of its document that end at or before it."""
    tokens, starts = query_tokens(case, device)
    blocks = torch.tensor(compressed_blocks(case), dtype=torch.int64, device=device).view(-1, 2)
    first, document = blocks.unbind(-1)
    return (first + case.config.l - 1 <= tokens[:, None]) & (document == starts[:, None])


def window_mask(case: Case, device: torch.device) -> Tensor:
    """bool [S, T]: the band of the w tokens t−w+1 … t, cut at the start of the document."""
    tokens, starts = query_tokens(case, device)
    keys = torch.arange(case.keys, device=device)
    return (keys <= tokens[:, None]) & (keys > tokens[:, None] - case.config.w) & (keys >= starts[:, None])


def selected_mask(case: Case, block_indices: Tensor) -> Tensor:
    """bool [B, Hkv, S, T]: tokens at or before t in one of the blocks of its document that are listed."""
    device, size = block_indices.device, case.config.l_sel
    tokens, starts = query_tokens(case, device)
    most = -(-case.keys // size) if case.keys else 0
    inside = (block_indices >= 0) & (block_indices < most)
    listed = torch.zeros(*block_indices.shape[:3], most + 1, dtype=torch.bool, device=device)
    listed.scatter_(-1, torch.where(inside, block_indices, most).long(), True)
    keys = torch.arange(case.keys, device=device)
    visible = (keys <= tokens[:, None]) & (keys >= starts[:, None])
    block_of_key = torch.where(visible, (keys - starts[:, None]) // size, most)  # [S, T]
    listed[..., most] = False
    batch, _, num_kv_heads, _ = block_indices.shape
    index = block_of_key.expand(batch, num_kv_heads, *block_of_key.shape)
    return listed.transpose(1, 2).gather(-1, index)


def overlap(case: Case, device: torch.device) -> Tensor:
    """float64 [blocks, selection blocks]: tokens that each pair shares, both counted in the block's document, / d."""
    config = case.config
    first = torch.tensor([a - start for a, start in compressed_blocks(case)], dtype=torch.int64, device=device)
    chosen = torch.arange(-(-case.keys // config.l_sel), device=device) * config.l_sel
    ends = torch.minimum((first + config.l)[:, None], chosen + config.l_sel)
    shared = (ends - torch.maximum(first[:, None], chosen)).clamp(min=0)
    return shared.double() / config.d


def compress(case: Case, x: Tensor) -> Tensor:
    """The mean of each full block of x [B, T, H, D] -> [B, blocks, H, D], in the dtype of x."""
    first = torch.tensor([a for a, _ in compressed_blocks(case)], dtype=torch.int64, device=x.device)
    return x[:, first[:, None] + torch.arange(case.config.l, device=x.device)].mean(2)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Dense masked attention in the dtype of the inputs, without any trick.

    q [B,S,Hq,Dk], k [B,T,Hkv,Dk], v [B,T,Hkv,Dv], mask [(B, Hkv,) S, T] -> (o [B,S,Hq,Dv], lse [B,S,Hq],
    p [B,Hq,S,T]); a row that sees nothing gives 0 and -inf.
    """
    k, v, mask = _per_query_head(q, k, v, mask)
    scores = torch.einsum("bshd,bthd->bhst", q, k) * q.shape[-1] ** -0.5
    if scores.shape[-1] == 0:
        p, lse = scores, scores.new_full(scores.shape[:-1], -torch.inf)
    else:
        empty = ~mask.any(-1, keepdim=True)
        shown = scores.masked_fill(~mask & ~empty, -torch.inf)  # an empty row sees all for now, so no NaN arises
        p = shown.softmax(-1).masked_fill(empty, 0)
        lse = shown.logsumexp(-1).masked_fill(empty[..., 0], -torch.inf)
    return torch.einsum("bhst,bthd->bshd", p, v), lse.transpose(1, 2), p


def dense(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """`attend`, the output alone."""
    return _in_pieces(lambda *piece: attend(*piece)[0], q, k, v, mask)


def sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """The same by PyTorch's own attention, in the dtype of the inputs: what the error budgets are measured on."""
    if k.shape[1] == 0 or q.shape[1] == 0:
        return q.new_zeros(*q.shape[:3], v.shape[-1])
    return _in_pieces(_sdpa, q, k, v, mask)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    k, v, mask = _per_query_head(q, k, v, mask)
    empty = ~mask.any(-1, keepdim=True)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    o = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=(mask | empty).expand(*q.shape[:3], -1))
    return o.masked_fill(empty, 0).transpose(1, 2)


def _in_pieces(attention: Attention, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Attention, where the scores are many some query heads of one group at a time, and again in the backward pass.

    A group's keys and values are float32 at least, so that their gradients are rounded once, not once per piece.
    """
    of_a_head, group = q.shape[0] * q.shape[1] * k.shape[1], q.shape[2] // k.shape[2]
    if of_a_head * q.shape[2] <= _AT_ONCE:
        return attention(q, k, v, mask)
    heads, outputs = max(min(_AT_ONCE // of_a_head, group), 1), []
    for h, own in enumerate(q.split(group, 2)):
        keys, values = (x[:, :, h : h + 1].to(torch.promote_types(x.dtype, torch.float32)) for x in (k, v))
        own_mask = mask[:, h : h + 1] if mask.dim() == 4 else mask
        for piece in own.split(heads, 2):
            outputs.append(checkpoint(attention, piece, keys, values, own_mask, use_reentrant=False))
    return torch.cat(outputs, 2)


def _per_query_head(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Keys and values in the type of q and mask [B|1, Hq|1, S, T], repeated for the query heads of each group."""
    group = q.shape[2] // k.shape[2]
    mask = mask.repeat_interleave(group, 1) if mask.dim() == 4 else mask[None, None]
    k, v = (x.repeat_interleave(group, 2).to(q.dtype) for x in (k, v))
    return k, v, mask


def forward(case: Case, floats: Sequence[Tensor], branch: str, block_indices: Tensor, attention: Attention) -> Tensor:
    """One branch, or all of them gated, over the blocks that were chosen: o [B, S, Hq, Dv]."""
    q, k, v, gates = floats
    device = q.device
    if branch == "compressed":
        return attention(q, compress(case, k), compress(case, v), compressed_mask(case, device))
    if branch == "selected":
        return attention(q, k, v, selected_mask(case, block_indices))
    if branch == "window":
        return attention(q, k, v, window_mask(case, device))
    branches = [forward(case, floats, name, block_indices, attention) for name in BRANCHES]
    return sum((gates[..., i, None] * o for i, o in enumerate(branches)), torch.zeros_like(branches[0]))


def pytorch_and_truth(case: Case, x: Inputs, branch: str, block_indices: Tensor) -> tuple[Tensor, Tensor]:
    """(PyTorch's output in the case's dtype, the float64 truth)."""
    wide = [a.double() for a in x.floats()]
    return (
        forward(case, x.floats(), branch, block_indices, sdpa),
        forward(case, wide, branch, block_indices, dense),
    )


def gradients(
    case: Case, x: Inputs, branch: str, block_indices: Tensor, upstream: Tensor, attention: Attention
) -> tuple[Tensor, ...]:
    """Gradients with respect to q, k, v, gates, in the dtype of `upstream`."""
    leaves = tuple(leaf.detach().to(upstream.dtype).requires_grad_() for leaf in x.floats())
    o = forward(case, leaves, branch, block_indices, attention)
    if not o.requires_grad:
        return tuple(torch.zeros_like(leaf) for leaf in leaves)
    return torch.autograd.grad(o, leaves, upstream, allow_unused=True, materialize_grads=True)


def block_scores(case: Case, q: Tensor, k_cmp: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    """Eq. 9 and 10, read geometrically: [B, S, Hkv, selection blocks] from q and the compressed keys."""
    blocks = len(compressed_blocks(case))
    k = k_cmp[:, :blocks].to(dtype)
    p = attend(q.to(dtype), k, k, compressed_mask(case, q.device))[2]  # [B, Hq, S, blocks]
    per_group = p.unflatten(1, (k.shape[2], -1)).sum(2)
    return (per_group @ overlap(case, q.device).to(dtype)).transpose(1, 2)


def forced_blocks(case: Case, device: torch.device) -> tuple[Tensor, Tensor]:
    """(forced, candidate), bool [S, selection blocks]: what every query must take, and what it may take."""
    config = case.config
    tokens, starts = query_tokens(case, device)
    current = ((tokens - starts) // config.l_sel)[:, None]
    block = torch.arange(-(-case.keys // config.l_sel), device=device)
    candidate = block <= current
    forced = (block < config.init_blocks) | (block > current - config.local_blocks)
    return forced & candidate, candidate


def chosen_blocks(case: Case, block_indices: Tensor) -> Tensor:
    """bool [B, S, Hkv, selection blocks]: whether each block is among the indices."""
    blocks = torch.arange(-(-case.keys // case.config.l_sel), device=block_indices.device)
    return (block_indices[..., None] == blocks).any(-2)
