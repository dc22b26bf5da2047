"""The kernels as operators with shapes and gradients of their own, each one node of a torch.compile graph.

They run the kernels that `autograd.py` runs, on the same saved tensors. Calling an operator costs the host 10 to 30 us
more than calling an autograd function (schema, dispatcher), so only a graph holds them. An operator takes tensors and
numbers alone: a layout crosses as the tensors that the kernels read of it, which a graph computes once for all layers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op

from nsa.config import NSAConfig
from nsa.geometry import Layout
from nsa.triton_backend import attention as whole
from nsa.triton_backend import compressed_window, compression, gated_sum, planned, rope, scores, selected
from nsa.triton_backend.autograd import Compress, CompressedWindowAttention
from nsa.triton_backend.plans import Plans
from nsa.triton_backend.recording import Memory

FIELDS = [field.name for field in dataclasses.fields(NSAConfig) if field.name != "phi"]
"""The numbers of a configuration; phi is applied before any kernel."""
PLACES = (
    "Tensor block_indices, Tensor starts, Tensor blocks_before, Tensor block_from, Tensor block_to,"
    " Tensor? cu_seqlens, int[] numbers, float scale"
)


def _numbers(config: NSAConfig) -> list[int]:
    return [getattr(config, name) for name in FIELDS]


def _layout(q: Tensor, num_keys: int, cu_seqlens: Tensor | None, numbers: Sequence[int], **computed: Any) -> Layout:
    config = NSAConfig.from_mapping(dict(zip(FIELDS, numbers, strict=True)))
    return Layout(q.shape[1], num_keys, config, q.device, cu_seqlens).knowing(**computed)


def _gradients_of(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Empty gradients: contiguous, whatever they are the gradients of."""
    return tuple(x.new_empty(x.shape) for x in tensors)


def _attended(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Empty (o, lse, keys read)."""
    o = q.new_empty(*q.shape[:3], v.shape[3])
    return o, q.new_empty(q.shape[:3], dtype=torch.float32), q.new_empty(*q.shape[:2], v.shape[2], dtype=torch.int32)


compressed_window_attention = custom_op(
    "nsa::compressed_window_attention",
    compressed_window.attend,
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, Tensor lo, Tensor hi, Tensor seen_from, Tensor seen_to, SymInt first_key,"
    " int min_programs, float scale) -> (Tensor, Tensor, Tensor, Tensor)",
)
compressed_window_attention_backward = custom_op(
    "nsa::compressed_window_attention_backward",
    compressed_window.backward,
    mutates_args=(),
    schema="(Tensor? do, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor finite, Tensor o, Tensor lse, Tensor lo,"
    " Tensor hi, Tensor seen_from, Tensor seen_to, int min_programs, float scale) -> (Tensor, Tensor, Tensor)",
)


def _compressed_window_gradients(
    ctx: Any, do: Tensor | None, dlse: Tensor | None, *_: None
) -> tuple[Tensor | None, ...]:
    return *compressed_window_attention_backward(do, dlse, *ctx.saved_tensors, *ctx.numbers), *7 * (None,)


compressed_window_attention.register_fake(
    lambda q, k, v, *_: (*_attended(q, v), v.new_empty(v.shape[:3], dtype=torch.bool))
)
compressed_window_attention_backward.register_fake(lambda do, dlse, q, k, v, *_: _gradients_of(q, k, v))
compressed_window_attention.register_autograd(
    _compressed_window_gradients, setup_context=CompressedWindowAttention.save
)

compress = custom_op(
    "nsa::compress",
    compression.mean,
    mutates_args=(),
    schema="(Tensor x, Tensor tokens, Tensor used, Tensor? lo, Tensor? positions, int l, int d) -> Tensor",
)
compress_backward = custom_op(
    "nsa::compress_backward",
    compression.mean_backward,
    mutates_args=(),
    schema="(Tensor do, SymInt length, Tensor tokens, Tensor used, Tensor? lo, Tensor? positions, int l, int d)"
    " -> Tensor",
)
compress.register_fake(lambda x, tokens, *_: x.new_empty(x.shape[0], tokens.shape[0], *x.shape[2:]))
compress_backward.register_fake(lambda do, length, *_: do.new_empty(do.shape[0], length, *do.shape[2:]))
compress.register_autograd(
    lambda ctx, do: (compress_backward(do, ctx.length, *ctx.saved_tensors, *ctx.numbers), *6 * (None,)),
    setup_context=Compress.save,
)


@custom_op(
    "nsa::select_blocks",
    mutates_args=(),
    schema="(Tensor q, Tensor k_cmp, Tensor? lse, Tensor lo, Tensor hi, Tensor positions, SymInt num_keys,"
    " Tensor? cu_seqlens, int[] numbers, float scale) -> Tensor",
)
def _select(
    q: Tensor, k_cmp: Tensor, lse: Tensor | None, lo: Tensor, hi: Tensor, positions: Tensor, num_keys: int,
    cu_seqlens: Tensor | None, numbers: list[int], scale: float,
) -> Tensor:  # fmt: skip
    layout = _layout(q, num_keys, cu_seqlens, numbers, compressed_interval=(lo, hi), positions=positions)
    return scores.select_blocks(q, k_cmp, layout, scale, lse)


@_select.register_fake
def _(q: Tensor, k_cmp: Tensor, *more: Any) -> Tensor:
    n = more[6][FIELDS.index("n_sel")]
    return q.new_empty(*q.shape[:2], k_cmp.shape[2], n, dtype=torch.int32)


def select_blocks(q: Tensor, k_cmp: Tensor, layout: Layout, scale: float, lse: Tensor | None) -> Tensor:
    """`scores.select_blocks`."""
    seen = (*layout.compressed_interval, layout.positions)
    return _select(q, k_cmp, lse, *seen, layout.num_keys, layout.cu_seqlens, _numbers(layout.config), scale)


@custom_op(
    "nsa::selected_attention",
    mutates_args=(),
    schema=f"(Tensor q, Tensor k, Tensor v, {PLACES}) -> (Tensor, Tensor, Tensor)",
)
def _selected(
    q: Tensor, k: Tensor, v: Tensor, block_indices: Tensor, starts: Tensor, blocks_before: Tensor,
    block_from: Tensor, block_to: Tensor, cu_seqlens: Tensor | None, numbers: list[int], scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    computed = {"starts": starts, "blocks_before": blocks_before, "block_tokens": (block_from, block_to)}
    layout = _layout(q, k.shape[1], cu_seqlens, numbers, **computed)
    return selected.forward(q, k, v, block_indices, layout, scale)[:3]


@custom_op(
    "nsa::selected_attention_backward",
    mutates_args=(),
    schema="(Tensor? do, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse,"
    f" {PLACES}) -> (Tensor, Tensor, Tensor)",
)
def _selected_backward(
    do: Tensor | None, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor,
    block_indices: Tensor, starts: Tensor, blocks_before: Tensor, block_from: Tensor, block_to: Tensor,
    cu_seqlens: Tensor | None, numbers: list[int], scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    computed = {"starts": starts, "blocks_before": blocks_before, "block_tokens": (block_from, block_to)}
    layout = _layout(q, k.shape[1], cu_seqlens, numbers, **computed)
    return selected.backward(do, dlse, q, k, v, o, lse, block_indices, layout, scale)


def _save_selected(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    (q, k, v, *places, numbers, scale), (o, lse, read) = inputs, output
    ctx.save_for_backward(q, k, v, o, lse, *places)
    ctx.numbers, ctx.scale = numbers, scale
    ctx.mark_non_differentiable(read)
    ctx.set_materialize_grads(False)


def _selected_gradients(ctx: Any, do: Tensor | None, dlse: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    return *_selected_backward(do, dlse, *ctx.saved_tensors, ctx.numbers, ctx.scale), *8 * (None,)


_selected.register_fake(lambda q, k, v, *_: _attended(q, v))
_selected_backward.register_fake(lambda do, dlse, q, k, v, *_: _gradients_of(q, k, v))
_selected.register_autograd(_selected_gradients, setup_context=_save_selected)


def selected_attention(
    q: Tensor, k: Tensor, v: Tensor, block_indices: Tensor, layout: Layout, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """`selected.forward`."""
    places = (layout.starts, layout.blocks_before, *layout.block_tokens, layout.cu_seqlens)
    return _selected(q, k, v, block_indices, *places, _numbers(layout.config), scale)


combine = custom_op(
    "nsa::gated_sum",
    gated_sum.forward,
    mutates_args=(),
    schema="(Tensor o_cmp, Tensor o_sel, Tensor o_win, Tensor gates) -> Tensor",
)
combine_backward = custom_op(
    "nsa::gated_sum_backward",
    gated_sum.backward,
    mutates_args=(),
    schema="(Tensor do, Tensor o_cmp, Tensor o_sel, Tensor o_win, Tensor gates) -> (Tensor, Tensor, Tensor, Tensor)",
)
combine.register_fake(lambda o_cmp, *_: o_cmp.new_empty(o_cmp.shape))
combine_backward.register_fake(lambda do, *given: _gradients_of(*given))
combine.register_autograd(
    lambda ctx, do: combine_backward(do, *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


rotate = custom_op(
    "nsa::rotate",
    rope.rotate,
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor? positions, Tensor frequencies, bool back) -> (Tensor, Tensor)",
)
rotate.register_fake(lambda q, k, *_: _gradients_of(q, k))


def _save_rotation(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    del output
    _, _, positions, frequencies, ctx.back = inputs
    ctx.save_for_backward(positions, frequencies)


def _turned_back(ctx: Any, dq: Tensor, dk: Tensor) -> tuple[Tensor | None, ...]:
    return *rotate(dq, dk, *ctx.saved_tensors, not ctx.back), None, None, None


rotate.register_autograd(_turned_back, setup_context=_save_rotation)


KEYS_AND_VALUES = (
    "Tensor k, Tensor v, Tensor? k_win, Tensor? v_win, Tensor? k_src, Tensor? v_src, Tensor? k_cmp, Tensor? v_cmp"
)
REST = "Tensor gates, Tensor? cu_seqlens, int[] numbers, float scale"
SAVED = ", ".join(f"Tensor {name}" for name in whole.Saved._fields)


@custom_op(
    "nsa::attention",
    mutates_args=(),
    schema=f"(Tensor q, {KEYS_AND_VALUES}, {REST}) -> ({', '.join(len(whole.Output._fields) * ['Tensor'])})",
)
def _attention(*inputs: Any) -> tuple[Tensor | None, ...]:
    *given, numbers, scale = inputs
    forward = _FORWARD if planned.serves(*given[:3]) else _FORWARD.function
    return tuple(forward(given, tuple(numbers), scale))


def _forward(given: Sequence[Any], numbers: tuple[int, ...], scale: float) -> Sequence[Tensor]:
    """The fields of `attention.Output`, of the tensors that the operator takes."""
    q, *tensors, gates, cu_seqlens = given
    layout = _layout(q, tensors[0].shape[1], cu_seqlens, numbers)
    output = whole.forward(q, whole.paired(tensors), gates, layout, scale)
    # an operator's shapes are the same whichever kernel served it: its backward pass makes the masks again
    return output._replace(bits=q.new_empty(0), finite_selected=q.new_empty(0))


_FORWARD = Plans(_forward, len(whole.Output._fields) * [Memory.RESULT])


@_attention.register_fake
def _(q: Tensor, *more: Any) -> tuple[Tensor, ...]:
    *tensors, _, cu_seqlens, numbers, _ = more
    given, layout = whole.paired(tensors), _layout(q, tensors[0].shape[1], cu_seqlens, numbers)
    k, v = given.selected
    (o_cmp, lse_cmp, read_cmp), (o_sel, lse_sel, read_sel), (o_win, lse_win, read_win) = (
        _attended(q, v) for _ in range(3)
    )
    slots = (k.shape[0], layout.num_slots, k.shape[2])
    pools = given.compressed is None
    return (
        o_cmp.new_empty(o_cmp.shape), lse_cmp, lse_sel, lse_win,
        q.new_empty(*q.shape[:2], k.shape[2], layout.config.n_sel, dtype=torch.int32), read_cmp, read_sel, read_win,
        o_cmp, o_sel, o_win, *(x.new_empty(*slots, x.shape[3]) if pools else x.new_empty(0) for x in (k, v)),
        k.new_empty(slots, dtype=torch.bool), k.new_empty(k.shape[:3], dtype=torch.bool),
        *(q.new_empty(0) for _ in range(2)),
    )  # fmt: skip


@custom_op(
    "nsa::attention_backward",
    mutates_args=(),
    schema=f"(Tensor? do, Tensor? dlse_cmp, Tensor? dlse_sel, Tensor? dlse_win, Tensor q, {KEYS_AND_VALUES}, {SAVED},"
    f" {REST}) -> ({', '.join((whole.NUM_KEYS_AND_VALUES + 2) * ['Tensor'])})",
)
def _attention_backward(*inputs: Any) -> tuple[Tensor | None, ...]:
    *given, numbers, scale = inputs
    q, k, v = given[whole.NUM_DIFFERENTIABLE :][:3]
    backward = _BACKWARD if planned.serves(q, k, v) else _BACKWARD.function
    return tuple(backward(given, tuple(numbers), scale))


def _backward(given: Sequence[Any], numbers: tuple[int, ...], scale: float) -> Sequence[Tensor]:
    """The gradients of q, keys, values and gates, of the tensors that the operator takes."""
    *tensors, gates, cu_seqlens = given
    upstream, q, tensors, saved = tensors[:4], tensors[4], tensors[5:13], list(tensors[13:])
    layout = _layout(q, tensors[0].shape[1], cu_seqlens, numbers)
    dq, of_given, dgates = whole.backward(upstream, q, whole.paired(tensors), gates, saved, layout, scale)
    # an operator gives tensors: one without rows where there is none
    return dq, *(q.new_empty(0) if x is None else x for x in whole.flat(of_given)), dgates


_BACKWARD = Plans(_backward, (whole.NUM_KEYS_AND_VALUES + 2) * [Memory.RESULT])


_attention_backward.register_fake(
    lambda *inputs: tuple(
        inputs[4].new_empty(0) if x is None else x.new_empty(x.shape) for x in (*inputs[4:13], inputs[-4])
    )
)


def _save_attention(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, numbers, scale = inputs
    ctx.save_for_backward(*tensors, *whole.Saved.of(output))
    ctx.more = numbers, scale
    ctx.mark_non_differentiable(*output[whole.NUM_DIFFERENTIABLE :])
    ctx.set_materialize_grads(False)


def _attention_gradients(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
    q, *tensors = ctx.saved_tensors
    tensors, (gates, cu_seqlens), saved = tensors[: whole.NUM_KEYS_AND_VALUES], tensors[8:10], tensors[10:]
    upstream = gradients[: whole.NUM_DIFFERENTIABLE]
    dq, *found = _attention_backward(*upstream, q, *tensors, *saved, gates, cu_seqlens, *ctx.more)
    of_given = (None if x is None else dx for x, dx in zip(tensors, found[:-1], strict=True))
    return dq, *of_given, found[-1], None, None, None


_attention.register_autograd(_attention_gradients, setup_context=_save_attention)


def attention(q: Tensor, *more: Any) -> tuple[Tensor, ...]:
    """`autograd.Attention`."""
    *tensors, gates, layout, scale = more
    return _attention(q, *tensors, gates, layout.cu_seqlens, _numbers(layout.config), scale)
