"""A whole call, forward and backward: the kernels of all branches, with nothing of PyTorch's in between but a sort.

What the branches share is done once: places, means and finite flags before them; behind them one kernel that reads do
and the three outputs (`gated_sum.py`), one that adds the gradients of queries, one those of keys and values. The parts
alone, which `nsa.triton_backend` serves too, launch the same kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from nsa.geometry import Layout
from nsa.triton_backend import compressed_window, compression, gated_sum, scores, selected
from nsa.triton_backend.compressed_window import ENOUGH_OF_WINDOW
from nsa.triton_backend.launch import ENOUGH_PROGRAMS, finite_keys, unit_stride
from nsa.triton_backend.launching.lanes import COMPRESSED, QUERIES, WINDOW, beside, hold, lane
from nsa.triton_backend.partial_sums import add_parts
from nsa.triton_backend.places import located
from nsa.triton_backend.selected_masked import Masks

ENOUGH_BESIDE = 128
"""In place of ENOUGH_OF_WINDOW in a short call, whose dq fills the GPU beside dk and dv in a CUDA graph: forward and
backward of 2 x 2048 tokens (12/2 heads of 64) took 363 µs on an H200 in place of 371. Longer calls were not tried."""
MOST_PARTS = 8
"""Of compressed keys' gradients that `compression.gradients` adds up itself: each token reads all of them, twice."""

Pair = tuple[Tensor, Tensor]


class Inputs(NamedTuple):
    """Keys and values [B, T, Hkv, D] of each branch. None stands for the same tensors as the selected branch's."""

    selected: Pair
    window: Pair | None
    source: Pair | None
    """What is compressed."""
    compressed: Pair | None
    """[B, slots, Hkv, D], which the caller compressed; `source` is then None."""

    @classmethod
    def of(cls, selected: Pair, window: Pair, compressed: Pair, pools: bool) -> Inputs:
        """Those of a whole call; see `nsa.backends.WholeCall`."""

        def unless_selected(pair: Pair) -> Pair | None:
            return None if pair[0] is selected[0] and pair[1] is selected[1] else pair

        of_compressed = (unless_selected(compressed), None) if pools else (None, compressed)
        return cls(selected, unless_selected(window), *of_compressed)

    @property
    def all_are_one(self) -> bool:
        """Whether every branch reads the same tensors."""
        return self.window is None and self.source is None and self.compressed is None


NUM_KEYS_AND_VALUES = 2 * len(Inputs._fields)
"""Tensors of `flat`."""


def flat(pairs: Inputs) -> list[Tensor | None]:
    """All of them, one after the other."""
    return [x for pair in pairs for x in ((None, None) if pair is None else pair)]


def paired(tensors: Sequence[Tensor | None]) -> Inputs:
    """The other way round."""
    k, v, *others = tensors
    assert k is not None
    assert v is not None
    pairs = zip(others[::2], others[1::2], strict=True)
    return Inputs((k, v), *(None if k is None or v is None else (k, v) for k, v in pairs))


class Output(NamedTuple):
    """What a call gives, and what its backward pass needs beside that."""

    o: Tensor
    lse_compressed: Tensor
    lse_selected: Tensor
    lse_window: Tensor
    block_indices: Tensor
    read_compressed: Tensor
    read_selected: Tensor
    read_window: Tensor
    o_compressed: Tensor
    o_selected: Tensor
    o_window: Tensor
    k_compressed: Tensor
    v_compressed: Tensor
    """Both without rows where the caller gave them."""
    finite_compressed: Tensor
    finite_window: Tensor
    bits: Tensor
    finite_selected: Tensor
    """These two of `selected_masked.py`, without rows where it did not serve the call; the latter also where the flags
    are those of the window."""


NUM_DIFFERENTIABLE = 4
"""The first so many of an output."""


class Saved(NamedTuple):
    """What the backward pass needs of an `Output`: neither o, which its caller may free, nor the counts."""

    lse_compressed: Tensor
    lse_selected: Tensor
    lse_window: Tensor
    block_indices: Tensor
    o_compressed: Tensor
    o_selected: Tensor
    o_window: Tensor
    k_compressed: Tensor
    v_compressed: Tensor
    finite_compressed: Tensor
    finite_window: Tensor
    bits: Tensor
    finite_selected: Tensor

    @classmethod
    def of(cls, output: Sequence[Tensor]) -> Saved:
        return cls(*output[1:5], *output[8:])


def forward(q: Tensor, given: Inputs, gates: Tensor, layout: Layout, scale: float) -> Output:
    """o [B, S, Hq, Dv] of q [B, S, Hq, Dk] and gates [B, S, Hq, 3]; scale > 0."""
    layout, q = located(layout), unit_stride(q)
    k, v = map(unit_stride, given.selected)
    k_win, v_win = (k, v) if given.window is None else map(unit_stride, given.window)
    first_key, _ = layout.window_span(0, layout.num_queries)
    # the selected branch may read every key, and so needs a flag for each where it reads the window's
    flagged_from = 0 if given.window is None else first_key
    if given.compressed is None:
        source = (k, v) if given.source is None else given.source
        k_cmp, v_cmp, finite_cmp, finite = compression.prepare(
            *source, *layout.slot_tokens, layout.config.l, layout.config.d, (k_win, v_win), flagged_from
        )
    else:
        k_cmp, v_cmp = map(unit_stride, given.compressed)
        finite_cmp, finite = finite_keys(k_cmp, v_cmp), finite_keys(k_win, v_win, flagged_from)
    assert v_cmp is not None
    assert finite_cmp is not None
    assert finite is not None
    bits = k.new_empty(*q.shape[:2], k.shape[2], dtype=torch.int64) if selected.makes_masks(q, k, v, layout) else None
    with beside(WINDOW, q):
        with lane(WINDOW):
            window = layout.window_interval
            o_win, lse_win, read_win = compressed_window.forward(q, k_win, v_win, *window, finite, scale)
            finite_sel = finite if given.window is None else selected.finite_keys_of(q, k, v, layout)
        interval = layout.compressed_interval
        o_cmp, lse_cmp, read_cmp = compressed_window.forward(q, k_cmp, v_cmp, *interval, finite_cmp, scale)
        blocks = scores.select_blocks(q, k_cmp, layout, scale, lse_cmp, bits)
    whole = o_cmp, o_win, gates.contiguous(), torch.empty_like(o_cmp)
    masks = Masks(bits, finite_sel)
    o_sel, lse_sel, read_sel, masks = selected.forward(q, k, v, blocks, layout, scale, masks, whole)
    if given.compressed is not None:
        k_cmp, v_cmp = k.new_empty(0), v.new_empty(0)
    own_flags = None if given.window is None else masks.finite
    return Output(
        whole[-1], lse_cmp, lse_sel, lse_win, blocks, read_cmp, read_sel, read_win, o_cmp, o_sel, o_win, k_cmp, v_cmp,
        finite_cmp, finite, *(finite.new_empty(0) if x is None else x for x in (masks.bits, own_flags)),
    )  # fmt: skip


def backward(
    gradients: Sequence[Tensor | None],
    q: Tensor, given: Inputs, gates: Tensor, tensors: list[Tensor], layout: Layout, scale: float,
    last: bool = False,
) -> tuple[Tensor, Inputs, Tensor]:  # fmt: skip
    """(dq, those of `given`, of the gates) from those of o and of the three lse, where None is 0.

    `tensors` are the fields of `Saved`; the list is emptied, so that each is freed behind its last use. `last`: nobody
    needs them again, and the gradients of the branches' outputs take the place of these.
    """
    saved = Saved(*tensors)
    tensors.clear()
    layout, q = located(layout), unit_stride(q)
    k, v = map(unit_stride, given.selected)
    k_win, v_win = (k, v) if given.window is None else map(unit_stride, given.window)
    own = saved.k_compressed, saved.v_compressed
    k_cmp, v_cmp = own if given.compressed is None else map(unit_stride, given.compressed)
    finite_cmp, finite_win, blocks = saved.finite_compressed, saved.finite_window, saved.block_indices
    finite_sel = finite_win if given.window is None else _known(saved.finite_selected)
    masks = selected.masks_of_backward(q, k, v, blocks, layout, Masks(_known(saved.bits), finite_sel))
    do, *dlse = gradients
    branches = saved.o_compressed, saved.o_selected, saved.o_window
    rows, dgates = gated_sum.backward_branches(
        torch.zeros_like(saved.o_window) if do is None else do, branches, gates, saved[:3], dlse, last
    )
    del saved, own, branches
    enough_of_window = ENOUGH_OF_WINDOW if masks.bits is None else ENOUGH_BESIDE
    with beside(QUERIES, q):
        hold(*(x for of_branch in rows for x in of_branch))  # else a branch's do is freed behind it
        with lane(WINDOW):
            dq_win, *window_parts = compressed_window.gradients(
                q, k_win, v_win, finite_win, *rows.pop(), *layout.window_interval, *layout.window_queries,
                enough_of_window, scale,
            )  # fmt: skip
            of_window = add_parts(window_parts, q.dtype)
        del window_parts
        with lane(COMPRESSED):
            dq_cmp, *parts = compressed_window.gradients(
                q, k_cmp, v_cmp, finite_cmp, *rows.pop(0), *layout.compressed_interval, *layout.compressed_queries,
                ENOUGH_PROGRAMS, scale,
            )  # fmt: skip
            parts = _added_if_many(parts, given, q.dtype)
            of_compressed = None if given.all_are_one else _of_compressed(given, parts, layout, k.dtype)
        more_dq = dq_cmp, dq_win
        dq, dk, dv = selected.gradients(q, k, v, *rows.pop(), blocks, layout, scale, more_dq, masks=masks)
    if of_compressed is None:
        of_all = _of_compressed(given, parts, layout, k.dtype, (dk, dv, *of_window))
        return dq, Inputs(of_all, None, None, None), dgates
    return dq, _of_inputs(given, of_compressed, (dk, dv), of_window), dgates


def _known(x: Tensor) -> Tensor | None:
    """What has rows."""
    return x if x.numel() else None


def _added_if_many(parts: list[Tensor], given: Inputs, dtype: torch.dtype) -> list[Tensor]:
    """Parts of compressed keys' gradients; one, their sum, where the caller gave these keys or the parts are many."""
    if given.compressed is None and len(parts[0]) <= MOST_PARTS:
        return parts
    return [x[None] for x in add_parts(parts, torch.float32 if given.compressed is None else dtype)]


def _of_compressed(
    given: Inputs, parts: list[Tensor], layout: Layout, dtype: torch.dtype, others: Sequence[Tensor] | None = None
) -> Pair:
    """(dk, dv) of what is compressed, or of the compressed keys and values where the caller gave these.

    `others`: gradients of the other branches, to be added.
    """
    if given.compressed is not None:
        return parts[0][0], parts[1][0]
    places = compression.places(layout)
    dk, dv = compression.gradients(parts, others, layout.num_keys, places, layout.config.l, layout.config.d, dtype)
    return dk, dv


def _of_inputs(given: Inputs, compressed: Pair, selected: Pair, window: Pair) -> Inputs:
    """What the branches give to keys and values, added where two of them read the same tensors."""
    if given.window is None:
        selected, of_window = (selected[0] + window[0], selected[1] + window[1]), None
    else:
        of_window = window
    if given.compressed is not None:
        return Inputs(selected, of_window, None, compressed)
    if given.source is not None:
        return Inputs(selected, of_window, compressed, None)
    return Inputs((selected[0] + compressed[0], selected[1] + compressed[1]), of_window, None, None)
