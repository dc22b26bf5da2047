"""The gated sum of the branches (Eq. 5): one pass over the three outputs instead of six."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa.triton_backend.launch import ROWS, on_device
from nsa.triton_backend.tile import kernel, load_rows, store_rows
from nsa.triton_backend.tuning import padded


@kernel
def _forward(O_CMP, O_SEL, O_WIN, GATES, OUT, num_rows, DV: tl.constexpr, DVP: tl.constexpr, BR: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    real = row < num_rows
    acc = tl.zeros([BR, DVP], tl.float32)
    for branch in tl.static_range(3):
        base = O_CMP if branch == 0 else (O_SEL if branch == 1 else O_WIN)
        gate = tl.load(GATES + row * 3 + branch, mask=real, other=0.0).to(tl.float32)
        acc += gate[:, None] * load_rows(base, row * DV, real, DV, DVP).to(tl.float32)
    store_rows(OUT, row * DV, real, acc, DV, DVP)


@kernel
def _backward(
    O_CMP, O_SEL, O_WIN, GATES, DO, D_CMP, D_SEL, D_WIN, D_GATES, num_rows,
    DV: tl.constexpr, DVP: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    real = row < num_rows
    do = load_rows(DO, row * DV, real, DV, DVP).to(tl.float32)
    for branch in tl.static_range(3):
        base = O_CMP if branch == 0 else (O_SEL if branch == 1 else O_WIN)
        out = D_CMP if branch == 0 else (D_SEL if branch == 1 else D_WIN)
        gate = tl.load(GATES + row * 3 + branch, mask=real, other=0.0).to(tl.float32)
        o = load_rows(base, row * DV, real, DV, DVP).to(tl.float32)
        store_rows(out, row * DV, real, gate[:, None] * do, DV, DVP)
        d_gate = tl.sum(do * o, axis=1)
        tl.store(D_GATES + row * 3 + branch, d_gate.to(D_GATES.dtype.element_ty), mask=real)


def forward(o_cmp: Tensor, o_sel: Tensor, o_win: Tensor, gates: Tensor) -> Tensor:
    """o [B, S, Hq, Dv] from three outputs of that shape and gates [B, S, Hq, 3]."""
    o_cmp, o_sel, o_win, gates = (x.contiguous() for x in (o_cmp, o_sel, o_win, gates))
    out = torch.empty_like(o_cmp)
    num_rows, dv = gates.numel() // 3, out.shape[-1]
    if num_rows:
        with on_device(out):
            _forward[triton.cdiv(num_rows, ROWS),](o_cmp, o_sel, o_win, gates, out, num_rows, dv, padded(dv), ROWS)
    return out


def backward(
    do: Tensor, o_cmp: Tensor, o_sel: Tensor, o_win: Tensor, gates: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of the outputs and of the gates."""
    given = [x.contiguous() for x in (o_cmp, o_sel, o_win, gates)]
    d_cmp, d_sel, d_win, d_gates = gradients = [torch.empty_like(x) for x in given]
    num_rows, dv = gates.numel() // 3, do.shape[-1]
    if num_rows:
        with on_device(do):
            _backward[triton.cdiv(num_rows, ROWS),](
                *given, do.contiguous(), *gradients, num_rows, dv, padded(dv), ROWS
            )  # fmt: skip
    return d_cmp, d_sel, d_win, d_gates
