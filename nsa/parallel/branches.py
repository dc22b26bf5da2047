"""The three branches of one rank, with what travels beneath them: forward, and backward with the keys gathered again.

The compressed keys come first, since everything waits for them. Keys and values of the selected branch, the bulk, are
on their way beneath compressed attention and the choice of blocks. Between the passes a rank holds its own rows, and
the few of other ranks that its windows reach.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from nsa.backends import ParallelBackend
from nsa.gradients import without_second_gradient
from nsa.parallel.exchange import Halo
from nsa.parallel.plan import Plan, Queries


class HaloRows(torch.autograd.Function):
    """x [B, own rows, H, D] -> [B, needed rows, H, D]; gradients go back to the ranks that own the rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, halo: Halo) -> Tensor:
        ctx.halo = halo
        return halo.joined(x, halo.start(x).wait())

    @staticmethod
    @without_second_gradient
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.halo.start_sum(gradient, gradient.dtype).wait(), None


class ParallelBranches(torch.autograd.Function):
    """(o, lse of the compressed, the selected and the window branch, the blocks, the keys read by each).

    q [B, S, Hq, Dk], k_cmp [B, own blocks, Hkv, Dk], k_sel and k_win [B, S, Hkv, Dk], values likewise, gates
    [B, S, Hq, 3]; S is the rank's.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k_cmp: Tensor, v_cmp: Tensor, k_sel: Tensor, v_sel: Tensor, k_win: Tensor, v_win: Tensor,
        gates: Tensor, plan: Plan, run: ParallelBackend, scale: float,
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
        near_rows = [x.wait() for x in window]
        keys, vals = (plan.window_halo.joined(*x) for x in zip((k_win, v_win), near_rows, strict=True))
        for piece, part in zip(plan.queries, parts, strict=True):
            near = window_keys(keys, piece), window_keys(vals, piece)
            part += run.window_attention(padded(q[:, piece.rows], piece), *near, piece.window, scale)
        del keys, vals
        found = [
            _OfPiece.of([unpadded(x, piece) for x in part]) for piece, part in zip(plan.queries, parts, strict=True)
        ]
        o = q.new_empty(*q.shape[:3], v_sel.shape[3])
        for piece, one in zip(plan.queries, found, strict=True):
            run.combine_into(o[:, piece.rows], one.outputs, gates[:, piece.rows])
        ctx.save_for_backward(
            q, k_cmp, v_cmp, k_sel, v_sel, k_win, v_win, gates, *near_rows,
            *(x for one in found for x in one.for_backward),
        )  # fmt: skip
        ctx.plan, ctx.run, ctx.scale = plan, run, scale
        joined = [torch.cat(column, 1) for column in zip(*(one.beside for one in found), strict=True)]
        lse_and_counts = joined or _nothing(q, v_sel, plan)
        ctx.mark_non_differentiable(*lse_and_counts[3:])
        return o, *lse_and_counts

    @staticmethod
    @without_second_gradient
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        with torch.autocast(upstream[0].device.type, enabled=False):
            return *_gradients(ctx.saved_tensors, upstream, ctx.plan, ctx.run, ctx.scale), None, None, None


class _OfPiece(NamedTuple):
    """What the branches gave for one piece, without its padding."""

    outputs: tuple[Tensor, Tensor, Tensor]
    """Of the compressed, the selected and the window branch, as everywhere below."""
    lse: tuple[Tensor, Tensor, Tensor]
    chosen: Tensor
    read: tuple[Tensor, Tensor, Tensor]

    @classmethod
    def of(cls, part: Sequence[Tensor]) -> _OfPiece:
        o_cmp, lse_cmp, chosen, read_cmp, o_sel, lse_sel, read_sel, o_win, lse_win, read_win = part
        return cls((o_cmp, o_sel, o_win), (lse_cmp, lse_sel, lse_win), chosen, (read_cmp, read_sel, read_win))

    @property
    def beside(self) -> list[Tensor]:
        """What is handed out for all pieces together."""
        return [*self.lse, self.chosen, *self.read]

    @property
    def for_backward(self) -> list[Tensor]:
        return [*self.outputs, *self.lse, self.chosen]


_SAVED_OF_PIECE = 7
"""Tensors of `_OfPiece.for_backward`."""


def _gradients(
    saved: tuple[Tensor, ...], upstream: tuple[Tensor, ...], plan: Plan, run: ParallelBackend, scale: float
) -> list[Tensor]:
    """Of q, of the six keys and values and of the gates, each in its own type."""
    q, k_cmp, v_cmp, k_sel, v_sel, k_win, v_win, gates, k_near, v_near, *of_pieces = saved
    do, *dlse = upstream[:4]
    selected = [plan.tokens_gather.start(x) for x in (k_sel, v_sel)]
    compressed = [plan.slots_gather.start(x) for x in (k_cmp, v_cmp)]

    dgates = torch.empty_like(gates)
    given: list[list[list[Tensor]]] = []  # of each piece, of each branch
    chosen: list[Tensor] = []
    pieces = plan.queries[::-1]  # as `RowSum` takes them
    saved_of_pieces = [of_pieces[i : i + _SAVED_OF_PIECE] for i in range(0, len(of_pieces), _SAVED_OF_PIECE)][::-1]
    for piece, (*kept, blocks) in zip(pieces, saved_of_pieces, strict=True):
        own = piece.rows
        of_branches, dgates[:, own] = run.gated_rows(
            do[:, own], [x[:, own] for x in dlse], kept[:3], kept[3:], gates[:, own]
        )
        given.append([[padded(x, piece, value) for x, value in branch] for branch in of_branches])
        chosen.append(padded(blocks, piece, -1))

    keys, vals = plan.window_halo.joined(k_win, k_near), plan.window_halo.joined(v_win, v_near)
    dq: list[list[Tensor]] = [[] for _ in pieces]
    sums = [RowSum(x) for x in (keys, vals)]
    for piece, rows, parts in zip(pieces, given, dq, strict=True):
        near = window_keys(keys, piece), window_keys(vals, piece)
        of_q, *gradients = run.window_attention_backward(
            rows.pop(), padded(q[:, piece.rows], piece), *near, piece.window, scale
        )
        parts.append(of_q)
        begin, count = piece.window_before, piece.window_rows.stop - piece.window_rows.start
        _add(sums, piece.window_rows, [x[:, begin : begin + count] for x in gradients])
    of_window = [plan.window_halo.start_sum(x.total(), q.dtype) for x in sums]

    keys, vals = (x.wait() for x in selected)
    sums = [RowSum(x) for x in (keys, vals)]
    for piece, rows, blocks, parts in zip(pieces, given, chosen, dq, strict=True):
        of_q, *gradients = run.selected_attention_backward(
            rows.pop(), padded(q[:, piece.rows], piece), keys[:, piece.keys], vals[:, piece.keys], blocks, piece.layout,
            scale,
        )  # fmt: skip
        parts.append(of_q)
        _add(sums, piece.keys, gradients)
    of_selected = [plan.tokens_gather.start_sum(x.total(), q.dtype) for x in sums]

    keys, vals = (x.wait() for x in compressed)
    sums = [RowSum(x) for x in (keys, vals)]
    for piece, rows, parts in zip(pieces, given, dq, strict=True):
        of_q, *gradients = run.compressed_attention_backward(
            rows.pop(), padded(q[:, piece.rows], piece), keys[:, piece.slots], vals[:, piece.slots], piece.layout, scale
        )
        parts.append(of_q)
        _add(sums, piece.slots, gradients)
    of_compressed = [plan.slots_gather.start_sum(x.total(), q.dtype) for x in sums]

    whole = torch.empty_like(q)
    for piece, parts in zip(pieces, dq, strict=True):
        dq_win, dq_sel, dq_cmp = (unpadded(x, piece) for x in parts)
        run.add_gradients(whole[:, piece.rows], dq_cmp, dq_sel, dq_win)
    return [whole, *(x.wait() for x in (*of_compressed, *of_selected, *of_window)), dgates]


class RowSum:
    """The sum, in at least float32, of what each piece gives to the rows of `like` [B, rows, H, D].

    Pieces come from the last to the first: neither begin nor end of their rows grows. So a row is written before it is
    added to, and nothing is filled with zeros that is written later.
    """

    def __init__(self, like: Tensor) -> None:
        self._shape, self._device = like.shape, like.device
        self._dtype = torch.promote_types(like.dtype, torch.float32)
        self._sum: Tensor | None = None
        self._begin = like.shape[1]
        """The rows from here on are written."""

    def add(self, rows: slice, gradient: Tensor) -> None:
        """gradient [B, those rows, H, D], which is the sum's from then on, to write to."""
        if self._sum is None and gradient.shape == self._shape and gradient.dtype == self._dtype:
            self._sum, self._begin = gradient, 0
            return
        total, begin = self._total(), self._begin
        first_added = min(rows.stop, begin)
        new = first_added - rows.start
        total[:, rows.stop : begin] = 0
        total[:, rows.start : first_added] = gradient[:, :new]
        total[:, first_added : rows.stop] += gradient[:, new:]
        self._begin = rows.start

    def total(self) -> Tensor:
        """The sum [B, rows, H, D]."""
        total = self._total()
        total[:, : self._begin] = 0
        self._begin = 0
        return total

    def _total(self) -> Tensor:
        if self._sum is None:
            self._sum = torch.empty(self._shape, dtype=self._dtype, device=self._device)
        return self._sum


def _add(sums: list[RowSum], rows: slice, gradients: list[Tensor]) -> None:
    """What a piece gives to the keys and values of these rows."""
    for total, gradient in zip(sums, gradients, strict=True):
        total.add(rows, gradient)


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


def _nothing(q: Tensor, v: Tensor, plan: Plan) -> list[Tensor]:
    """`_OfPiece.beside` of a rank without tokens."""
    lse = q.new_zeros(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))
    read = q.new_zeros(q.shape[0], 0, v.shape[2], dtype=torch.int32)
    chosen = read.new_zeros(q.shape[0], 0, v.shape[2], plan.config.n_sel)
    return [lse, lse.clone(), lse.clone(), chosen, read, read.clone(), read.clone()]
