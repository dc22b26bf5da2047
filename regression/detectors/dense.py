"""Attention with its masks written out: the truth in float64, and what faults are made of.

Masks are made here from the definitions, not from `nsa.geometry`, and no function of a backend is called: this is
an oracle that is not the code under test.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from nsa.config import BRANCHES
from regression.contract import Bound
from regression.detectors.calls import Call

FORWARD = 2.0
"""How many times PyTorch's own error, in the same dtype and against float64, is allowed."""


def per_query_head(x: Tensor, heads: int) -> Tensor:
    """Keys, values [B, T, Hkv, D] or a mask [B, Hkv, S, T], repeated for the query heads, as [B, Hq, ...]."""
    if x.dtype == torch.bool:
        return x.repeat_interleave(heads // x.shape[1], 1)
    return x.repeat_interleave(heads // x.shape[2], 2).transpose(1, 2)


def scores(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """q · k of every pair: [B, Hq, S, T]."""
    return q.transpose(1, 2) @ per_query_head(k, q.shape[2]).mT * scale


def outputs(p: Tensor, v: Tensor) -> Tensor:
    """Probabilities [B, Hq, S, T] over v [B, T, Hkv, D] -> [B, S, Hq, D]."""
    return (p @ per_query_head(v, p.shape[1])).transpose(1, 2)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """(o, lse [B, S, Hq], keys read [B, S, Hkv]) with mask [B, Hkv, S, T]; a row that sees nothing gives 0 and -inf."""
    s = scores(q, k, scale).masked_fill(~per_query_head(mask, q.shape[2]), -torch.inf)
    lse = s.logsumexp(-1)
    p = (s - lse.masked_fill(lse == -torch.inf, 0)[..., None]).exp()
    return outputs(p, v), lse.transpose(1, 2), mask.sum(-1, dtype=torch.int32).transpose(1, 2)


def mask(call: Call, branch: str, block_indices: Tensor) -> Tensor:
    """bool [B, Hkv, S, keys of the branch]: what each query may see; True means attend."""
    (batch, queries), (num_keys, kv_heads), config = call.q.shape[:2], call.k.shape[1:3], call.config
    t = torch.arange(num_keys - queries, num_keys, device=call.q.device)[:, None]
    if branch == "compressed":
        ends = torch.arange(0, max(num_keys - config.l + 1, 0), config.d, device=t.device) + config.l - 1
        return (ends <= t).expand(batch, kv_heads, queries, -1)
    s = torch.arange(num_keys, device=t.device)
    if branch == "window":
        return ((s <= t) & (s > t - config.w)).expand(batch, kv_heads, queries, -1)
    chosen = (block_indices.transpose(1, 2)[..., None] == s // config.l_sel).any(-2)
    return chosen & (s <= t)


def _branch(call: Call, branch: str, block_indices: Tensor, *, wide: bool) -> Tensor:
    """One branch in float64, or by PyTorch's own attention in the call's dtype."""
    seen = mask(call, branch, block_indices)
    q, k, v = (x.double() if wide else x for x in (call.q, call.k, call.v))
    if seen.shape[-1] == 0:
        return q.new_zeros(*q.shape[:3], v.shape[-1])
    if branch == "compressed":
        k, v = (x.unfold(1, call.config.l, call.config.d).mean(-1) for x in (k, v))
    if wide:
        return attend(q, k, v, seen, q.shape[-1] ** -0.5)[0]
    heads = q.shape[2]
    shown = per_query_head(seen, heads)
    empty = ~shown.any(-1, keepdim=True)
    k, v = per_query_head(k, heads), per_query_head(v, heads)
    o = scaled_dot_product_attention(q.transpose(1, 2), k, v, attn_mask=shown | empty)
    return o.masked_fill(empty, 0).transpose(1, 2)


def _forward(call: Call, branch: str, block_indices: Tensor, *, wide: bool) -> Tensor:
    if branch != "whole":
        return _branch(call, branch, block_indices, wide=wide)
    each = [_branch(call, name, block_indices, wide=wide) for name in BRANCHES]
    gates = call.gates.to(each[0].dtype)
    return sum((gates[..., i, None] * o for i, o in enumerate(each)), torch.zeros_like(each[0]))


def error(o: Tensor, call: Call, branch: str, block_indices: Tensor) -> Bound:
    """How far the output `o` of a branch, over these blocks, is from the truth, and how far it may be.

    The budget is a multiple of PyTorch's own error on the same inputs, and one unit in the last place of the
    largest value, since PyTorch's error can be 0 by luck.
    """
    with torch.no_grad():
        truth, pytorch = (_forward(call, branch, block_indices, wide=wide) for wide in (True, False))
        floor = torch.finfo(call.q.dtype).eps * call.v.abs().max().item() * (3 if branch == "whole" else 1)
        own = (pytorch.double() - truth).abs().max().item()
        value = (o.double() - truth).abs().max().item()
    return Bound(value, FORWARD * own + floor, "greatest error against float64")
