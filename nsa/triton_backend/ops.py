"""The kernels as operators with shapes and gradients of their own, each one node of a torch.compile graph.

They run the kernels that `autograd.py` runs, on the same saved tensors. Calling an operator costs the host 10 to 30 us
more than calling an autograd function (schema, dispatcher), so only a graph holds them; `torch.library.custom_op`,
which checks each call, would cost up to 140 us. An operator takes tensors and numbers alone: a layout crosses as the
tensors that the kernels read of it, which a graph computes once for all layers.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.library import Library, register_autograd, register_fake

from nsa.config import NSAConfig
from nsa.geometry import Layout
from nsa.gradients import without_second_gradient
from nsa.triton_backend import compressed_window, compression, gated_sum, rope, scores, selected
from nsa.triton_backend.autograd import Compress, CompressedWindowAttention

FIELDS = [field.name for field in dataclasses.fields(NSAConfig) if field.name != "phi"]
"""The numbers of a configuration; phi is applied before any kernel."""
PLACES_SCHEMA = (
    "Tensor block_indices, Tensor starts, Tensor blocks_before, Tensor block_from, Tensor block_to,"
    " Tensor? cu_seqlens, int[] numbers, float scale"
)


def numbers_of(config: NSAConfig) -> list[int]:
    """A configuration as an operator takes it: `FIELDS`."""
    return [getattr(config, name) for name in FIELDS]


def layout_of(q: Tensor, num_keys: int, cu_seqlens: Tensor | None, numbers: Sequence[int], **computed: Any) -> Layout:
    """The layout of q [B, S, Hq, Dk] and so many keys by `numbers_of` a configuration; `computed` is known of it."""
    config = NSAConfig.from_mapping(dict(zip(FIELDS, numbers, strict=True)))
    return Layout(q.shape[1], num_keys, config, q.device, cu_seqlens).knowing(**computed)


def _gradients_of(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Empty gradients: contiguous, whatever they are the gradients of."""
    return tuple(x.new_empty(x.shape) for x in tensors)


def _attended(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Empty (o, lse, keys read)."""
    o = q.new_empty(*q.shape[:3], v.shape[3])
    return o, q.new_empty(q.shape[:3], dtype=torch.float32), q.new_empty(*q.shape[:2], v.shape[2], dtype=torch.int32)


@functools.cache
def _library(namespace: str) -> Library:
    """Operators live as long as it does."""
    return Library(namespace, "FRAGMENT")


def define(
    name: str,
    schema: str,
    function: Callable[..., Any],
    fake: Callable[..., Any],
    gradients: Callable[..., Any] | None = None,
    save: Callable[..., None] | None = None,
) -> torch._ops.OpOverload:
    """An operator of this name, namespace::name, on any device.

    `fake` gives the shapes of `function`'s results; `gradients` is its backward pass, from what `save` kept.
    """
    namespace, _, own_name = name.partition("::")
    library = _library(namespace)
    library.define(own_name + schema, tags=(torch.Tag.pt2_compliant_tag,))
    library.impl(own_name, function, "CompositeExplicitAutograd")
    register_fake(name, fake, lib=library)
    if gradients is not None:
        register_autograd(name, without_second_gradient(gradients), setup_context=save, lib=library)
    operator: torch._ops.OpOverload = getattr(getattr(torch.ops, namespace), own_name).default
    return operator


def _compressed_window_gradients(
    ctx: Any, do: Tensor | None, dlse: Tensor | None, *_: None
) -> tuple[Tensor | None, ...]:
    return *compressed_window_attention_backward(do, dlse, *ctx.saved_tensors, *ctx.numbers), *7 * (None,)


compressed_window_attention = define(
    "nsa::compressed_window_attention",
    "(Tensor q, Tensor k, Tensor v, Tensor lo, Tensor hi, Tensor seen_from, Tensor seen_to, SymInt first_key,"
    " int min_programs, float scale) -> (Tensor, Tensor, Tensor, Tensor)",
    compressed_window.attend,
    lambda q, k, v, *_: (*_attended(q, v), v.new_empty(v.shape[:3], dtype=torch.bool)),
    _compressed_window_gradients,
    CompressedWindowAttention.save,
)
compressed_window_attention_backward = define(
    "nsa::compressed_window_attention_backward",
    "(Tensor? do, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor finite, Tensor o, Tensor lse, Tensor lo,"
    " Tensor hi, Tensor seen_from, Tensor seen_to, int min_programs, float scale) -> (Tensor, Tensor, Tensor)",
    compressed_window.backward,
    lambda do, dlse, q, k, v, *_: _gradients_of(q, k, v),
)

compress = define(
    "nsa::compress",
    "(Tensor x, Tensor tokens, Tensor used, Tensor? lo, Tensor? positions, int l, int d) -> Tensor",
    compression.mean,
    lambda x, tokens, *_: x.new_empty(x.shape[0], tokens.shape[0], *x.shape[2:]),
    lambda ctx, do: (compress_backward(do, ctx.length, *ctx.saved_tensors, *ctx.numbers), *6 * (None,)),
    Compress.save,
)
compress_backward: torch._ops.OpOverload = define(
    "nsa::compress_backward",
    "(Tensor do, SymInt length, Tensor tokens, Tensor used, Tensor? lo, Tensor? positions, int l, int d) -> Tensor",
    compression.mean_backward,
    lambda do, length, *_: do.new_empty(do.shape[0], length, *do.shape[2:]),
)


def _run_select_blocks(
    q: Tensor, k_cmp: Tensor, lse: Tensor | None, lo: Tensor, hi: Tensor, positions: Tensor, num_keys: int,
    cu_seqlens: Tensor | None, numbers: list[int], scale: float,
) -> Tensor:  # fmt: skip
    layout = layout_of(q, num_keys, cu_seqlens, numbers, compressed_interval=(lo, hi), positions=positions)
    return scores.select_blocks(q, k_cmp, layout, scale, lse)


def _fake_block_indices(q: Tensor, k_cmp: Tensor, *more: Any) -> Tensor:
    n = more[6][FIELDS.index("n_sel")]
    return q.new_empty(*q.shape[:2], k_cmp.shape[2], n, dtype=torch.int32)


_select = define(
    "nsa::select_blocks",
    "(Tensor q, Tensor k_cmp, Tensor? lse, Tensor lo, Tensor hi, Tensor positions, SymInt num_keys,"
    " Tensor? cu_seqlens, int[] numbers, float scale) -> Tensor",
    _run_select_blocks,
    _fake_block_indices,
)


def select_blocks(q: Tensor, k_cmp: Tensor, layout: Layout, scale: float, lse: Tensor | None) -> Tensor:
    """`scores.select_blocks`."""
    seen = (*layout.compressed_interval, layout.positions)
    chosen: Tensor = _select(q, k_cmp, lse, *seen, layout.num_keys, layout.cu_seqlens, numbers_of(layout.config), scale)
    return chosen


def _run_selected(
    q: Tensor, k: Tensor, v: Tensor, block_indices: Tensor, starts: Tensor, blocks_before: Tensor,
    block_from: Tensor, block_to: Tensor, cu_seqlens: Tensor | None, numbers: list[int], scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    computed = {"starts": starts, "blocks_before": blocks_before, "block_tokens": (block_from, block_to)}
    layout = layout_of(q, k.shape[1], cu_seqlens, numbers, **computed)
    return selected.forward(q, k, v, block_indices, layout, scale)[:3]


def _run_selected_backward(
    do: Tensor | None, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor,
    block_indices: Tensor, starts: Tensor, blocks_before: Tensor, block_from: Tensor, block_to: Tensor,
    cu_seqlens: Tensor | None, numbers: list[int], scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    computed = {"starts": starts, "blocks_before": blocks_before, "block_tokens": (block_from, block_to)}
    layout = layout_of(q, k.shape[1], cu_seqlens, numbers, **computed)
    return selected.backward(do, dlse, q, k, v, o, lse, block_indices, layout, scale)


def _save_selected(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    (q, k, v, *places, numbers, scale), (o, lse, read) = inputs, output
    ctx.save_for_backward(q, k, v, o, lse, *places)
    ctx.numbers, ctx.scale = numbers, scale
    ctx.mark_non_differentiable(read)
    ctx.set_materialize_grads(False)


def _selected_gradients(ctx: Any, do: Tensor | None, dlse: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    return *_selected_backward(do, dlse, *ctx.saved_tensors, ctx.numbers, ctx.scale), *8 * (None,)


_selected = define(
    "nsa::selected_attention",
    f"(Tensor q, Tensor k, Tensor v, {PLACES_SCHEMA}) -> (Tensor, Tensor, Tensor)",
    _run_selected,
    lambda q, k, v, *_: _attended(q, v),
    _selected_gradients,
    _save_selected,
)
_selected_backward = define(
    "nsa::selected_attention_backward",
    "(Tensor? do, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse,"
    f" {PLACES_SCHEMA}) -> (Tensor, Tensor, Tensor)",
    _run_selected_backward,
    lambda do, dlse, q, k, v, *_: _gradients_of(q, k, v),
)


def selected_attention(
    q: Tensor, k: Tensor, v: Tensor, block_indices: Tensor, layout: Layout, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """`selected.forward`."""
    places = (layout.starts, layout.blocks_before, *layout.block_tokens, layout.cu_seqlens)
    attended: tuple[Tensor, Tensor, Tensor] = _selected(
        q, k, v, block_indices, *places, numbers_of(layout.config), scale
    )
    return attended


combine = define(
    "nsa::gated_sum",
    "(Tensor o_cmp, Tensor o_sel, Tensor o_win, Tensor gates) -> Tensor",
    gated_sum.forward,
    lambda o_cmp, *_: o_cmp.new_empty(o_cmp.shape),
    lambda ctx, do: combine_backward(do, *ctx.saved_tensors),
    lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)
combine_backward: torch._ops.OpOverload = define(
    "nsa::gated_sum_backward",
    "(Tensor do, Tensor o_cmp, Tensor o_sel, Tensor o_win, Tensor gates) -> (Tensor, Tensor, Tensor, Tensor)",
    gated_sum.backward,
    lambda do, *given: _gradients_of(*given),
)


def _save_rotation(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    del output
    _, _, positions, frequencies, ctx.back = inputs
    ctx.save_for_backward(positions, frequencies)


def _turned_back(ctx: Any, dq: Tensor, dk: Tensor) -> tuple[Tensor | None, ...]:
    return *rotate(dq, dk, *ctx.saved_tensors, not ctx.back), None, None, None


rotate = define(
    "nsa::rotate",
    "(Tensor q, Tensor k, Tensor? positions, Tensor frequencies, bool back) -> (Tensor, Tensor)",
    rope.rotate,
    lambda q, k, *_: _gradients_of(q, k),
    _turned_back,
    _save_rotation,
)
