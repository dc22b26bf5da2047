"""The gated sum of the branches (Eq. 5): one pass over the three outputs instead of six.

Backward, the same pass over do and the outputs can also make what the branches' kernels take of each row.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa.triton_backend.launch import ROWS, backward_row
from nsa.triton_backend.launching.relaunch import on_device
from nsa.triton_backend.tile import kernel, load_rows, store_rows
from nsa.triton_backend.tuning import cdiv, padded

BACKWARD_ROWS = 16  # per program: 32 of 128 channels take 159 registers, with which 12 warps fit on an SM


@triton.jit
def _gate(GATES, row, BRANCH: tl.constexpr, real):
    return tl.load(GATES + row * 3 + BRANCH, mask=real, other=0.0).to(tl.float32)[:, None]


@triton.jit
def gated(GATES, row, real, o_cmp, o_sel, o_win):
    """Eq. 5 of rows [rows, channels], in float32.

    Fused multiplications are written out: of a·b + c·d the compiler rounds one product or the other, which one differs
    from kernel to kernel, and all kernels that add up branches are to give the same bits.
    """
    total = _gate(GATES, row, 0, real) * o_cmp.to(tl.float32)
    total = tl.fma(_gate(GATES, row, 1, real), o_sel.to(tl.float32), total)
    return tl.fma(_gate(GATES, row, 2, real), o_win.to(tl.float32), total)


@kernel
def _forward(O_CMP, O_SEL, O_WIN, GATES, OUT, num_rows, DV: tl.constexpr, DVP: tl.constexpr, BR: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    real = row < num_rows
    o_cmp, o_sel = load_rows(O_CMP, row * DV, real, DV, DVP), load_rows(O_SEL, row * DV, real, DV, DVP)
    o_win = load_rows(O_WIN, row * DV, real, DV, DVP)
    store_rows(OUT, row * DV, real, gated(GATES, row, real, o_cmp, o_sel, o_win), DV, DVP)


@triton.jit
def _branch(O, GATES, do, D_O, D_GATES, LSE, DLSE, LSE_2, DELTA, row, real, BRANCH: tl.constexpr, DV: tl.constexpr,
            DVP: tl.constexpr, IN_PLACE: tl.constexpr):  # fmt: skip
    o = load_rows(O, row * DV, real, DV, DVP).to(tl.float32)
    if IN_PLACE:  # what one thread writes another may have to read
        tl.debug_barrier()
    d_gate = tl.sum(do * o, axis=1)
    tl.store(D_GATES + row * 3 + BRANCH, d_gate.to(D_GATES.dtype.element_ty), mask=real)
    d_o = (_gate(GATES, row, BRANCH, real) * do).to(D_O.dtype.element_ty)
    store_rows(D_O, row * DV, real, d_o, DV, DVP)
    if LSE is not None:
        backward_row(d_o.to(tl.float32), o, LSE, DLSE, LSE_2, DELTA, row, real)


@kernel
def _backward(
    O_CMP, O_SEL, O_WIN, GATES, DO, D_CMP, D_SEL, D_WIN, D_GATES, LSE_CMP, LSE_SEL, LSE_WIN, DLSE_CMP, DLSE_SEL,
    DLSE_WIN, LSE_2_CMP, LSE_2_SEL, LSE_2_WIN, DELTA_CMP, DELTA_SEL, DELTA_WIN, num_rows,
    DV: tl.constexpr, DVP: tl.constexpr, BR: tl.constexpr, IN_PLACE: tl.constexpr,
):  # fmt: skip
    """The gradients of outputs and gates; with LSE_CMP, ... also what `launch.backward_rows` makes of these.

    IN_PLACE: D_CMP is O_CMP, and so on.
    """
    row = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    real = row < num_rows
    do = load_rows(DO, row * DV, real, DV, DVP).to(tl.float32)
    _branch(O_CMP, GATES, do, D_CMP, D_GATES, LSE_CMP, DLSE_CMP, LSE_2_CMP, DELTA_CMP, row, real, 0, DV, DVP, IN_PLACE)
    _branch(O_SEL, GATES, do, D_SEL, D_GATES, LSE_SEL, DLSE_SEL, LSE_2_SEL, DELTA_SEL, row, real, 1, DV, DVP, IN_PLACE)
    _branch(O_WIN, GATES, do, D_WIN, D_GATES, LSE_WIN, DLSE_WIN, LSE_2_WIN, DELTA_WIN, row, real, 2, DV, DVP, IN_PLACE)


def forward(o_cmp: Tensor, o_sel: Tensor, o_win: Tensor, gates: Tensor) -> Tensor:
    """o [B, S, Hq, Dv] from three outputs of that shape and gates [B, S, Hq, 3]."""
    o_cmp, o_sel, o_win, gates = (x.contiguous() for x in (o_cmp, o_sel, o_win, gates))
    out = torch.empty_like(o_cmp)
    write(o_cmp, o_sel, o_win, gates, out)
    return out


def write(o_cmp: Tensor, o_sel: Tensor, o_win: Tensor, gates: Tensor, out: Tensor) -> None:
    """The same of contiguous tensors into `out`."""
    num_rows, dv = gates.numel() // 3, out.shape[-1]
    if num_rows:
        with on_device(out):
            _forward[cdiv(num_rows, ROWS),](o_cmp, o_sel, o_win, gates, out, num_rows, dv, padded(dv), ROWS)


def backward(
    do: Tensor, o_cmp: Tensor, o_sel: Tensor, o_win: Tensor, gates: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of the outputs and of the gates."""
    (d_cmp, d_sel, d_win), d_gates = _gradients(do, (o_cmp, o_sel, o_win), gates, 12 * (None,))
    return d_cmp, d_sel, d_win, d_gates


def backward_branches(
    do: Tensor, outputs: Sequence[Tensor], gates: Tensor, lse: Sequence[Tensor], dlse: Sequence[Tensor | None],
    in_place: bool = False,
) -> tuple[list[tuple[Tensor, Tensor, Tensor]], Tensor]:  # fmt: skip
    """((gradient of the output, lse base 2, delta) of each branch, gradient of the gates), from the branches' lse and
    the gradients of these; the last two of a branch are those of `launch.backward_rows`. `in_place`: the gradients of
    the outputs take the outputs' memory."""
    lse, given = [x.contiguous() for x in lse], [None if x is None else x.contiguous() for x in dlse]
    rows = [torch.empty_like(x) for x in (*lse, *lse)]
    gradients, d_gates = _gradients(do, outputs, gates, (*lse, *given, *rows), in_place)
    return list(zip(gradients, rows[:3], rows[3:], strict=True)), d_gates


def _gradients(
    do: Tensor, outputs: Sequence[Tensor], gates: Tensor, rows: Sequence[Tensor | None], in_place: bool = False
) -> tuple[list[Tensor], Tensor]:
    outputs, gates = [x.contiguous() for x in outputs], gates.contiguous()
    gradients = outputs if in_place else [torch.empty_like(x) for x in outputs]
    d_gates = torch.empty_like(gates)
    num_rows, dv = gates.numel() // 3, do.shape[-1]
    if num_rows:
        with on_device(do):
            _backward[cdiv(num_rows, BACKWARD_ROWS),](
                *outputs, gates, do.contiguous(), *gradients, d_gates, *rows, num_rows, dv, padded(dv), BACKWARD_ROWS,
                in_place,
            )  # fmt: skip
    return gradients, d_gates
