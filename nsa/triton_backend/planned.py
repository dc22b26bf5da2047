"""A whole call and its backward pass by plans (`launching/plan.py`), for calls that the host takes longer to start than
the GPU to run.

All that the backward pass needs lies in one allocation beside the inputs, and lives until that has run: where tensors
are large, `autograd.Attention` serves, which frees each behind its last use.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from nsa.config import NSAConfig
from nsa.geometry import Layout
from nsa.gradients import without_second_gradient
from nsa.triton_backend import attention, autograd, dispatch, gated_sum, places
from nsa.triton_backend.attention import NUM_KEYS_AND_VALUES, Output, Saved
from nsa.triton_backend.launching import relaunch
from nsa.triton_backend.launching.plan import Plan, Tensors
from nsa.triton_backend.launching.plans import Plans
from nsa.triton_backend.launching.recording import Memory

AVAILABLE = isinstance(gated_sum._forward, relaunch.Kernel)
"""Whether launches can be recorded: neither in the interpreter nor with a version of Triton that was not tried."""
NUM_SAVED = 5
"""Fields of `Output` up to the last that the backward pass needs of those that may be results."""

Numbers = tuple[int, int, NSAConfig, float]
"""Queries, keys, the configuration and the scale."""


def _layout(device: torch.device, cu_seqlens: Tensor | None, numbers: Numbers) -> Layout:
    queries, keys, config, _ = numbers
    return Layout(queries, keys, config, device, cu_seqlens)


def _forward(given: Tensors, numbers: Numbers) -> Tensors:
    """(q, `attention.flat`, gates, cu_seqlens) -> (`Output`, what kernels read of the layout)."""
    q, *tensors, gates, cu_seqlens = given
    assert q is not None
    assert gates is not None
    layout = _layout(q.device, cu_seqlens, numbers)
    output = attention.forward(q, attention.paired(tensors), gates, layout, numbers[-1])
    return *output, *places.flat(layout)


NUM_PLACES = len(places.SINGLES) + 2 * len(places.PAIRS)
OBSERVED = Output._fields[: Output._fields.index("o_compressed")]
"""What `nsa.attention.Aux` tells of."""


def _plans_of_forward(results: Sequence[str]) -> Plans:
    """Those that give these fields of `Output`, and keep what else of it the backward pass needs."""

    def memory(name: str) -> Memory:
        if name in results:
            return Memory.RESULT
        return Memory.KEPT if name in Saved._fields else Memory.WORKSPACE

    return Plans(_forward, [*map(memory, Output._fields), *NUM_PLACES * [Memory.KEPT]])


def _backward(given: Tensors, numbers: Numbers, plan: Plan, last: bool) -> Tensors:
    """(dq, those of `attention.flat`, of the gates) of (do, dlse, q, `attention.flat`, gates, cu_seqlens, what `plan`
    gave of `Saved`, what it kept)."""
    *upstream, q = given[:5]
    *tensors, gates, cu_seqlens = given[5 : 5 + NUM_KEYS_AND_VALUES + 2]
    *saved, kept = given[5 + NUM_KEYS_AND_VALUES + 2 :]
    assert q is not None
    assert gates is not None
    assert kept is not None
    views = [view.of(kept) for view in plan.views]
    layout = places.knowing(_layout(q.device, cu_seqlens, numbers), views[-NUM_PLACES:])
    saved_all = [*(x for x in saved if x is not None), *views[:-NUM_PLACES]]
    inputs = attention.paired(tensors)
    dq, of_given, dgates = attention.backward(upstream, q, inputs, gates, saved_all, layout, numbers[-1], last)
    return dq, *attention.flat(of_given), dgates


FORWARD, OBSERVED_FORWARD = _plans_of_forward(("o",)), _plans_of_forward(OBSERVED)
BACKWARD = Plans(_backward, (2 + NUM_KEYS_AND_VALUES) * [Memory.RESULT])


def serves(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether calls of these queries [B, S, Hq, Dk], keys [B, T, Hkv, Dk] and values [B, T, Hkv, Dv] go by plans.

    Where kernels of `hopper/` serve, there would be none.
    """
    if not AVAILABLE or not 0 < max(q.numel(), k.numel()) * q.itemsize <= dispatch.MOST_PLANNED_BYTES or not q.numel():
        return False
    group = q.shape[2] // k.shape[2]
    return not dispatch.hopper_serves("compressed_window_forward", group, k, v)


def attend(
    q: Tensor, given: Sequence[Tensor | None], gates: Tensor, layout: Layout, scale: float, observed: bool
) -> tuple[Tensor, ...] | None:
    """o, or the `OBSERVED` fields of `attention.Output`; None for a call that is not served.

    Arguments as of `autograd.Attention`.
    """
    k, v, *_ = given
    assert k is not None
    assert v is not None
    if not serves(q, k, v):
        return None
    tensors = (q, *given, gates, layout.cu_seqlens)
    numbers = layout.num_queries, layout.num_keys, layout.config, scale
    with torch.no_grad():
        found = (OBSERVED_FORWARD if observed else FORWARD).keeping(tensors, numbers)
    if found is None:
        return None
    output: tuple[Tensor, ...] = _Attention.apply(*found, numbers, *tensors)
    return output


def attend_if_planned(
    q: Tensor,
    selected: attention.Pair,
    window: attention.Pair,
    compressed: attention.Pair,
    pools: bool,
    gates: Tensor,
    config: NSAConfig,
    scale: float,
) -> Tensor | None:
    """See `nsa.backends.AttendIfPlanned`.

    The key of a plan holds shapes, dtypes, config and scale, which were checked at its first call; the caller has
    checked the rest.
    """
    if not AVAILABLE or q.numel() * q.itemsize > dispatch.MOST_PLANNED_BYTES:
        return None
    tensors = (q, *attention.flat(attention.Inputs.of(selected, window, compressed, pools)), gates, None)
    numbers = q.shape[1], q.shape[1], config, scale
    found = FORWARD.if_planned(tensors, numbers)
    if found is None:
        return None
    output: tuple[Tensor, ...] = _Attention.apply(*found, numbers, *tensors)
    return output[0]


class _Attention(torch.autograd.Function):
    """`autograd.Attention`, of (q, `attention.flat`, gates, cu_seqlens) and what a plan has made of them."""

    @staticmethod
    def forward(
        ctx: Any, results: list[Tensor | None], kept: Tensor, plan: Plan, numbers: Numbers, *given: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        ctx.save_for_backward(*given, *results[1:NUM_SAVED], kept)
        ctx.more = numbers, plan
        ctx.mark_non_differentiable(*results[attention.NUM_DIFFERENTIABLE :])
        ctx.set_materialize_grads(False)
        return tuple(results)

    @staticmethod
    @without_second_gradient
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        do, *others = gradients
        dlse = others[: attention.NUM_DIFFERENTIABLE - 1] or 3 * [None]
        given, (numbers, plan) = ctx.saved_tensors, ctx.more
        found = BACKWARD((do, *dlse, *given), numbers, plan, not autograd.graph_is_kept())
        return *4 * (None,), *found, None
