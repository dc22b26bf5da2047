"""Decode, last launch: the shares of each branch become its output, and the branches their gated sum (Eq. 5)."""

from __future__ import annotations

import triton
import triton.language as tl

from nsa.triton_backend.tile import LN2, kernel


@triton.jit
def _branch(O_PART, LSE_PART, row, first, count, stride, channel, inside, DV: tl.constexpr, SPLITS: tl.constexpr):
    """(o [Dv], lse base e) of the shares first … first + count of one row; 0 and -inf where none saw a key."""
    split = tl.arange(0, SPLITS)
    share = row * stride + first + split
    lse = tl.load(LSE_PART + share, mask=split < count, other=float("-inf"))
    top = tl.max(lse, axis=0)
    top = tl.where(top == float("-inf"), 0.0, top)
    weight = tl.exp2(lse - top)
    total = tl.sum(weight, axis=0)
    written = (lse > float("-inf"))[:, None] & inside[None, :]  # what saw nothing adds nothing; NaN is in the weight
    o = tl.load(O_PART + share[:, None] * DV + channel[None, :], mask=written, other=0.0)
    something = tl.where(total == 0.0, 1.0, total)
    o = tl.sum(weight[:, None] * o, axis=0) * (1.0 / something)
    return o, tl.where(total == 0.0, float("-inf"), (top + tl.log2(something)) * LN2)


@kernel
def _merge(
    O_CMP, LSE_CMP, O_NEAR, LSE_NEAR, GATES, OUT, LSE, gate_b, gate_s, gate_h, gate_n, S, HQ, rows, splits,
    SELECTED_SPLITS: tl.constexpr, WINDOW_SPLITS: tl.constexpr, CMP: tl.constexpr, SEL: tl.constexpr, WIN: tl.constexpr,
    DV: tl.constexpr, DVP: tl.constexpr,
):  # fmt: skip
    """OUT [B, S, Hq, Dv] and LSE [3, B, S, Hq]; a program per row (b, s, head)."""
    row = tl.program_id(0).to(tl.int64)
    near: tl.constexpr = SELECTED_SPLITS + WINDOW_SPLITS
    channel = tl.arange(0, DVP)
    inside = channel < DV
    gates = GATES + row // (S * HQ) * gate_b + row // HQ % S * gate_s + row % HQ * gate_h
    acc = tl.zeros([DVP], tl.float32)
    for branch in tl.static_range(3):
        if branch == 0:
            o, lse = _branch(O_CMP, LSE_CMP, row, 0, splits, splits, channel, inside, DV, CMP)
        elif branch == 1:
            o, lse = _branch(O_NEAR, LSE_NEAR, row, 0, SELECTED_SPLITS, near, channel, inside, DV, SEL)
        else:
            o, lse = _branch(O_NEAR, LSE_NEAR, row, SELECTED_SPLITS, WINDOW_SPLITS, near, channel, inside, DV, WIN)
        # each branch is rounded as the prefill stores it
        acc += tl.load(gates + branch * gate_n).to(tl.float32) * o.to(OUT.dtype.element_ty).to(tl.float32)
        tl.store(LSE + branch * rows + row, lse)
    tl.store(OUT + row * DV + channel, acc.to(OUT.dtype.element_ty), mask=inside)
