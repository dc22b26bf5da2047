"""The three branches of one rank, with what travels beneath them: forward, and backward with the keys gathered again.

The compressed keys come first, since everything waits for them. Keys and values of the selected branch, the bulk, are
on their way beneath compressed attention and the choice of blocks. Between the passes a rank holds its own rows alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from nsa.backends import ParallelBackend
from nsa.parallel.exchange import Halo
from nsa.parallel.plan import Plan, Queries


class HaloRows(torch.autograd.Function):
    """x [B, own rows, H, D] -> [B, needed rows, H, D]; gradients go back to the ranks that own the rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, halo: Halo) -> Tensor:
        ctx.halo = halo
        return halo.start(x).wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.halo.start_sum(_wide(gradient)).wait().to(gradient.dtype), None


class ParallelBranches(torch.autograd.Function):
    """(o, lse) of the compressed, the selected and the window branch, then the blocks and the keys read by each.

    q [B, S, Hq, Dk], k_cmp [B, own blocks, Hkv, Dk], k_sel and k_win [B, S, Hkv, Dk], values likewise; S is the rank's.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k_cmp: Tensor, v_cmp: Tensor, k_sel: Tensor, v_sel: Tensor, k_win: Tensor, v_win: Tensor,
        plan: Plan, run: ParallelBackend, scale: float,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        compressed = [plan.slots_gather.start(x) for x in (k_cmp, v_cmp)]
        selected = [plan.tokens_gather.start(x) for x in (k_sel, v_sel)]
        window = [plan.window_halo.start(x) for x in (k_win, v_win)]
        keys, vals = (x.wait() for x in compressed)
        parts: list[list[Tensor]] = []
        for piece in plan.queries:
            rows, own = padded(q[:, piece.rows], piece), piece.slots
            o, lse, read = run.compressed_attention(rows, keys[:, own], vals[:, own], piece.layout, scale)
            chosen = run.select_blocks(rows, keys[:, own], piece.layout, scale, lse)
            chosen = padded(unpadded(chosen, piece), piece, -1)  # padding chooses nothing, so that nothing is read
            parts.append([o, lse, chosen, read])
        del keys, vals
        keys, vals = (x.wait() for x in selected)
        for piece, part in zip(plan.queries, parts, strict=True):
            rows, own = padded(q[:, piece.rows], piece), piece.keys
            o, lse, read = run.selected_attention(rows, keys[:, own], vals[:, own], part[2], piece.layout, scale)
            part += [o, lse, read]
        del keys, vals
        keys, vals = (x.wait() for x in window)
        for piece, part in zip(plan.queries, parts, strict=True):
            near = window_keys(keys, piece), window_keys(vals, piece)
            part += run.window_attention(padded(q[:, piece.rows], piece), *near, piece.window, scale)
        joined = [[unpadded(x, piece) for x in part] for piece, part in zip(plan.queries, parts, strict=True)]
        if not joined:
            joined = [_nothing(q, v_sel, plan)]
        o_cmp, lse_cmp, chosen, read_cmp, o_sel, lse_sel, read_sel, o_win, lse_win, read_win = (
            torch.cat(column, 1) for column in zip(*joined, strict=True)
        )
        ctx.save_for_backward(
            q, k_cmp, v_cmp, k_sel, v_sel, k_win, v_win, o_cmp, lse_cmp, o_sel, lse_sel, o_win, lse_win, chosen
        )
        ctx.plan, ctx.run, ctx.scale = plan, run, scale
        ctx.mark_non_differentiable(chosen, read_cmp, read_sel, read_win)
        return o_cmp, lse_cmp, o_sel, lse_sel, o_win, lse_win, chosen, read_cmp, read_sel, read_win

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        with torch.autocast(upstream[0].device.type, enabled=False):
            return *_gradients(ctx.saved_tensors, upstream, ctx.plan, ctx.run, ctx.scale), None, None, None


def _gradients(
    saved: tuple[Tensor, ...], upstream: tuple[Tensor, ...], plan: Plan, run: ParallelBackend, scale: float
) -> list[Tensor]:
    """Of q and of the six keys and values, each in its own type."""
    q, k_cmp, v_cmp, k_sel, v_sel, k_win, v_win, o_cmp, lse_cmp, o_sel, lse_sel, o_win, lse_win, chosen = saved
    do_cmp, dlse_cmp, do_sel, dlse_sel, do_win, dlse_win = upstream[:6]
    window = [plan.window_halo.start(x) for x in (k_win, v_win)]
    selected = [plan.tokens_gather.start(x) for x in (k_sel, v_sel)]
    compressed = [plan.slots_gather.start(x) for x in (k_cmp, v_cmp)]

    keys, vals = (x.wait() for x in window)
    dq_win, sums = torch.empty_like(q), [_zeros(x) for x in (keys, vals)]
    for piece in plan.queries:
        given = _given(piece, do_win, dlse_win, q)
        near = window_keys(keys, piece), window_keys(vals, piece)
        dq, *gradients = run.window_attention_backward(
            *given, *near, *_gave(piece, o_win, lse_win), piece.window, scale
        )
        dq_win[:, piece.rows] = unpadded(dq, piece)
        begin, count = piece.window_before, piece.window_rows.stop - piece.window_rows.start
        _add(sums, piece.window_rows, [x[:, begin : begin + count] for x in gradients])
    of_window = [plan.window_halo.start_sum(x) for x in sums]

    keys, vals = (x.wait() for x in selected)
    dq_sel, sums = torch.empty_like(q), [_zeros(x) for x in (keys, vals)]
    for piece in plan.queries:
        given, blocks = _given(piece, do_sel, dlse_sel, q), padded(chosen[:, piece.rows], piece, -1)
        dq, *gradients = run.selected_attention_backward(
            *given, keys[:, piece.keys], vals[:, piece.keys], *_gave(piece, o_sel, lse_sel), blocks, piece.layout, scale
        )
        dq_sel[:, piece.rows] = unpadded(dq, piece)
        _add(sums, piece.keys, gradients)
    of_selected = [plan.tokens_gather.start_sum(x) for x in sums]

    keys, vals = (x.wait() for x in compressed)
    dq_cmp, sums = torch.empty_like(q), [_zeros(x) for x in (keys, vals)]
    for piece in plan.queries:
        given = _given(piece, do_cmp, dlse_cmp, q)
        dq, *gradients = run.compressed_attention_backward(
            *given, keys[:, piece.slots], vals[:, piece.slots], *_gave(piece, o_cmp, lse_cmp), piece.layout, scale
        )
        dq_cmp[:, piece.rows] = unpadded(dq, piece)
        _add(sums, piece.slots, gradients)
    of_compressed = [plan.slots_gather.start_sum(x) for x in sums]

    dq = run.add_gradients(dq_cmp, dq_sel, dq_win)
    return [dq, *(x.wait().to(q.dtype) for x in (*of_compressed, *of_selected, *of_window))]


def _add(sums: list[Tensor], rows: slice, gradients: list[Tensor]) -> None:
    """What a piece gives to the keys and values of these rows."""
    for total, gradient in zip(sums, gradients, strict=True):
        total[:, rows] += gradient


def _given(piece: Queries, do: Tensor, dlse: Tensor, q: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A piece's upstream gradients and queries."""
    own = piece.rows
    return padded(do[:, own], piece), padded(dlse[:, own], piece), padded(q[:, own], piece)


def _gave(piece: Queries, o: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """What the forward pass gave; an lse of infinity makes all probabilities of padding 0."""
    return padded(o[:, piece.rows], piece), padded(lse[:, piece.rows], piece, torch.inf)


def padded(x: Tensor, piece: Queries, value: float = 0.0) -> Tensor:
    """x [B, queries of the piece, …] with the piece's padding."""
    if not piece.before and not piece.behind:
        return x
    return pad(x, [0, 0] * (x.dim() - 2) + [piece.before, piece.behind], value=value)


def unpadded(x: Tensor, piece: Queries) -> Tensor:
    """The inverse of `padded`."""
    return x[:, piece.before : x.shape[1] - piece.behind]


def window_keys(halo_rows: Tensor, piece: Queries) -> Tensor:
    """The keys of `piece.window`, 0 where no window reaches."""
    needed = halo_rows[:, piece.window_rows]
    if not piece.window_before and not piece.behind:
        return needed
    return pad(needed, [0, 0, 0, 0, piece.window_before, piece.behind])


def _zeros(x: Tensor) -> Tensor:
    return torch.zeros(x.shape, dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _nothing(q: Tensor, v: Tensor, plan: Plan) -> list[Tensor]:
    """What a rank without tokens gives."""
    o = q.new_zeros(*q.shape[:3], v.shape[3])
    lse = q.new_zeros(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))
    read = q.new_zeros(q.shape[0], 0, v.shape[2], dtype=torch.int32)
    chosen = read.new_zeros(q.shape[0], 0, v.shape[2], plan.config.n_sel)
    return [o, lse, chosen, read, o, lse, read, o, lse, read]
