"""The kernels for autograd in an eager call; `ops.py` is the same for a graph. Neither has a second gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nsa.geometry import Layout
from nsa.gradients import without_second_gradient
from nsa.triton_backend import attention, compressed_window, compression, gated_sum, selected


class CompressedWindowAttention(torch.autograd.Function):
    """`compressed_window.attend`."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, ...]:
        output = compressed_window.attend(*inputs)
        CompressedWindowAttention.save(ctx, inputs, output)
        return output

    @staticmethod
    def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        (q, k, v, *places, _, min_programs, scale), (o, lse, read, finite) = inputs, output
        ctx.save_for_backward(q, k, v, finite, o, lse, *places)
        ctx.numbers = min_programs, scale
        ctx.mark_non_differentiable(read, finite)
        ctx.set_materialize_grads(False)

    @staticmethod
    @without_second_gradient
    def backward(ctx: Any, do: Tensor | None, dlse: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        gradients = compressed_window.backward(do, dlse, *ctx.saved_tensors, *ctx.numbers)
        return *gradients, *7 * (None,)


class Compress(torch.autograd.Function):
    """`compression.mean`."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        output = compression.mean(*inputs)
        Compress.save(ctx, inputs, output)
        return output

    @staticmethod
    def save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        del output
        x, *places, l, d = inputs
        ctx.save_for_backward(*places)
        ctx.length, ctx.numbers = x.shape[1], (l, d)

    @staticmethod
    @without_second_gradient
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
        return compression.mean_backward(do, ctx.length, *ctx.saved_tensors, *ctx.numbers), *6 * (None,)


class SelectedAttention(torch.autograd.Function):
    """`selected.forward`."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, block_indices: Tensor, layout: Layout, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        o, lse, read, _ = selected.forward(q, k, v, block_indices, layout, scale)
        ctx.save_for_backward(q, k, v, o, lse, block_indices)
        ctx.more = layout, scale
        ctx.mark_non_differentiable(read)
        ctx.set_materialize_grads(False)
        return o, lse, read

    @staticmethod
    @without_second_gradient
    def backward(ctx: Any, do: Tensor | None, dlse: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        gradients = selected.backward(do, dlse, *ctx.saved_tensors, *ctx.more)
        return *gradients, *3 * (None,)


class GatedSum(torch.autograd.Function):
    """`gated_sum.forward`."""

    @staticmethod
    def forward(ctx: Any, *inputs: Tensor) -> Tensor:
        ctx.save_for_backward(*inputs)
        return gated_sum.forward(*inputs)

    @staticmethod
    @without_second_gradient
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor, ...]:
        return gated_sum.backward(do, *ctx.saved_tensors)


class Attention(torch.autograd.Function):
    """`attention.forward`: q, the keys and values of `attention.Inputs` one after the other, gates, layout, scale.

    The outputs of the branches are for the backward pass alone, which overwrites them unless the graph is kept.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, *more: Any) -> attention.Output:
        *tensors, gates, layout, scale = more
        output = attention.forward(q, attention.paired(tensors), gates, layout, scale)
        ctx.save_for_backward(q, *tensors, gates, *attention.Saved.of(output))
        ctx.more = layout, scale
        ctx.mark_non_differentiable(*output[attention.NUM_DIFFERENTIABLE :])
        ctx.set_materialize_grads(False)
        return output

    @staticmethod
    @without_second_gradient
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        q, *tensors = ctx.saved_tensors
        last = not graph_is_kept()
        ctx.maybe_clear_saved_tensors()
        num = attention.NUM_KEYS_AND_VALUES
        given, gates, saved = attention.paired(tensors[:num]), tensors[num], tensors[num + 1 :]
        del tensors
        upstream, (layout, scale) = gradients[: attention.NUM_DIFFERENTIABLE], ctx.more
        dq, of_given, dgates = attention.backward(upstream, q, given, gates, saved, layout, scale, last)
        return dq, *attention.flat(of_given), dgates, None, None


def graph_is_kept() -> bool:
    """Whether the backward pass that runs was called with retain_graph=True, so that another may follow."""
    return torch._C._autograd._get_current_graph_task_keep_graph()
