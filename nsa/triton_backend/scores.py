"""Probabilities of the compressed blocks, summed over the heads of a group (Eq. 8 and 10): what a choice is made of.

A tile of blocks × queries is one product. Visibility is not checked here: `topk.py` reads only what a query
sees, so that no tile needs a mask and what is not finite stays in its own block's column.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from nsa.config import NSAConfig
from nsa.geometry import Layout
from nsa.triton_backend import compressed_window, hopper, topk, tuning
from nsa.triton_backend.dispatch import Variant, variant
from nsa.triton_backend.launch import ENOUGH_PROGRAMS, LOG2E, finite_keys, strides, unit_stride
from nsa.triton_backend.launching.relaunch import on_device
from nsa.triton_backend.tile import kernel, load_rows, product, rows_of
from nsa.triton_backend.tuning import cdiv

CHUNK = 4096  # queries whose probabilities exist at a time, or fewer where these would pass
SCRATCH = 2**26  # elements
TILES_PER_SPLIT = 4  # of blocks, at least, where several programs share a tile of queries


@kernel
def _group_probabilities(
    Q, K, LSE, LO, HI, P, q_b, q_s, q_h, k_b, k_s, k_h, first_query, count, S, SLOTS, HQ, HKV, G, to_base_2, splits,
    DK: tl.constexpr, DKP: tl.constexpr, BT: tl.constexpr, GP: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """P [B, count, Hkv, slots] of `count` queries from `first_query` on, written for the slots that a tile sees."""
    # the last queries see the most blocks, so they start first
    tile, split = tl.num_programs(0) // splits - 1 - tl.program_id(0) // splits, tl.program_id(0) % splits
    h, b = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    first_token, end_query = first_query + tile * BT, first_query + count
    last_token = tl.minimum(first_token + BT, end_query) - 1
    token, g, real = rows_of(first_token, end_query, G, BT * GP, GP)
    q = load_rows(Q + b * q_b, token * q_s + (h * G + g) * q_h, real, DK, DKP)
    lse = tl.load(LSE + (b * S + token) * HQ + h * G + g, mask=real, other=float("inf")) * 1.4426950408889634
    k_base = K + b * k_b + h * k_h
    query = first_token + tl.arange(0, BT)
    out = ((b * count + query - first_query) * HKV + h) * SLOTS

    first, end = tl.load(LO + first_token), tl.load(HI + last_token)
    per_split = tl.cdiv(tl.cdiv(end - first, BN), splits) * BN
    first += split * per_split
    end = tl.minimum(end, first + per_split)
    place = tl.arange(0, BN)
    for at in range(first, end, BN):
        slot = at + place
        k = load_rows(k_base + tl.cast(at, tl.int64) * k_s, place * k_s, slot < end, DK, DKP)
        p = tl.exp2(product(k, q) * to_base_2 - lse[None, :])  # [blocks, rows]
        p = tl.sum(tl.reshape(p, [BN, BT, GP]), axis=2)
        inside = (slot < end)[:, None] & (query < end_query)[None, :]
        tl.store(P + out[None, :] + slot[:, None], p, mask=inside)


def select_blocks(
    q: Tensor, k_cmp: Tensor, layout: Layout, scale: float, lse: Tensor | None = None, bits: Tensor | None = None
) -> Tensor:
    """int32 [B, S, Hkv, n]; see `nsa.select_blocks`. Scores of a bounded number of queries exist at a time.

    `bits` int64 [B, S, Hkv], for at most 64 blocks: written, bit j for a chosen block j.
    """
    q, k_cmp = unit_stride(q), unit_stride(k_cmp)
    (batch, length, heads, dk), (slots, num_kv_heads) = q.shape, k_cmp.shape[1:3]
    lo, hi = layout.compressed_interval
    if lse is None:
        values = k_cmp[..., : hopper.CHANNELS]  # an lse needs none; more are not served by `hopper/`
        lse = compressed_window.forward(q, k_cmp, values, lo, hi, finite_keys(k_cmp, values), scale)[1]
    lse = lse.float().contiguous()
    out = torch.empty(batch, length, num_kv_heads, layout.config.n_sel, dtype=torch.int32, device=q.device)
    if out.numel() == 0:
        return out
    on_hopper = variant("scores", q, k_cmp, k_cmp) is Variant.HOPPER
    shape = tuning.shape("hopper.scores" if on_hopper else "scores", q, k_cmp)
    chunk = min(CHUNK, max(SCRATCH // (batch * num_kv_heads * max(slots, 1)), shape.tokens), length)
    summed = on_hopper and layout.cu_seqlens is None and _summed_weights(layout.config)
    width = cdiv(layout.max_blocks, topk.READ_AT_ONCE) * topk.READ_AT_ONCE if summed else slots
    p = q.new_empty(batch, chunk, num_kv_heads, width, dtype=torch.float32)
    for first in range(0, length, chunk):
        count = min(chunk, length - first)
        tiles = cdiv(count, shape.tokens)
        splits = cdiv(ENOUGH_PROGRAMS, tiles * num_kv_heads * batch)
        splits = max(min(splits, layout.compressed_span(first, first + count)[1] // (TILES_PER_SPLIT * shape.keys)), 1)
        with on_device(q):
            if on_hopper:
                hopper.scores.group_probabilities(
                    q, k_cmp, lse, (lo, hi), p, first, count, splits, shape, scale * LOG2E, summed
                )
            elif slots:
                _group_probabilities[tiles * splits, num_kv_heads, batch](
                    q, k_cmp, lse, lo, hi, p, *strides(q), *strides(k_cmp),
                    first, count, length, slots, heads, num_kv_heads, heads // num_kv_heads, scale * LOG2E, splits,
                    dk, shape.dk, shape.tokens, shape.group, shape.keys, **shape.launch,
                )  # fmt: skip
            topk.choose(p, layout, first, count, out, summed, bits)
    return out


def _summed_weights(config: NSAConfig) -> bool:
    """Whether the kernel of `hopper/` can sum the probabilities to scores."""
    return topk.weights(config) == (-1, hopper.scores.SUMMED_WEIGHTS)
