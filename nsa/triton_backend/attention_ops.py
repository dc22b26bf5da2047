"""A whole call as one operator of a graph; `ops.py` has the parts.

`attention` gives all that its backward pass needs beside the output, each as a result. Where the host takes longer to
start a call than the GPU to run it, each result counts: `short_attention` keeps all of it in one tensor, at places that
follow from the shapes. Both go by a plan where they can (`planned.py`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from nsa.geometry import Layout
from nsa.triton_backend import attention as whole
from nsa.triton_backend import dispatch, hopper, planned, selected
from nsa.triton_backend.attention import NUM_DIFFERENTIABLE, NUM_KEYS_AND_VALUES, Output, Saved
from nsa.triton_backend.launching.plan import View
from nsa.triton_backend.launching.plans import Plans
from nsa.triton_backend.launching.recording import ALIGNMENT, Memory
from nsa.triton_backend.ops import define, layout_of, numbers_of

GIVEN_SCHEMA = (
    "Tensor q, Tensor k, Tensor v, Tensor? k_win, Tensor? v_win, Tensor? k_src, Tensor? v_src, Tensor? k_cmp,"
    " Tensor? v_cmp"
)
REST_SCHEMA = "Tensor gates, Tensor? cu_seqlens, int[] numbers, float scale"
SAVED_SCHEMA = ", ".join(f"Tensor {name}" for name in Saved._fields)
GRADIENTS_SCHEMA = ", ".join((NUM_KEYS_AND_VALUES + 2) * ["Tensor"])
"""Of q, keys and values, and the gates."""
MASK_FIELDS = ("bits", "finite_selected")
"""The last fields of `Saved`, which `selected_masked.py` alone gives. An operator's shapes are the same whichever
kernel served it: `short_attention` keeps them, not written where another kernel did; `attention` gives none, and its
backward pass makes the masks again."""

Shape = tuple[Sequence[int], torch.dtype]


def _shapes(q: Tensor, tensors: Sequence[Tensor | None], layout: Layout) -> Mapping[str, Shape]:
    """Of the fields of `Output`, in their order."""
    given = whole.paired(tensors)
    (k, v), pools = given.selected, given.compressed is None
    heads, slots = q.shape[:3], (k.shape[0], layout.num_slots, k.shape[2])
    per_group = (*q.shape[:2], k.shape[2])
    o, lse, read = ((*heads, v.shape[3]), q.dtype), (heads, torch.float32), (per_group, torch.int32)
    return {
        "o": o, "lse_compressed": lse, "lse_selected": lse, "lse_window": lse,
        "block_indices": ((*per_group, layout.config.n_sel), torch.int32),
        "read_compressed": read, "read_selected": read, "read_window": read,
        "o_compressed": o, "o_selected": o, "o_window": o,
        "k_compressed": ((*slots, k.shape[3]) if pools else (0,), k.dtype),
        "v_compressed": ((*slots, v.shape[3]) if pools else (0,), v.dtype),
        "finite_compressed": (slots, torch.bool), "finite_window": (k.shape[:3], torch.bool),
        "bits": (per_group, torch.int64), "finite_selected": (k.shape[:3], torch.bool),
    }  # fmt: skip


def _views(q: Tensor, tensors: Sequence[Tensor | None], layout: Layout) -> tuple[list[View], int]:
    """(where the fields of `Saved` lie in the tensor that keeps them, its bytes), as `recording.plan_of` puts them."""
    views, num_bytes, shapes = list[View](), 0, _shapes(q, tensors, layout)
    for shape, dtype in (shapes[name] for name in Saved._fields):
        views.append(View(num_bytes, torch.Size(shape), dtype))
        num_bytes += -(-math.prod(shape) * dtype.itemsize // ALIGNMENT) * ALIGNMENT
    return views, num_bytes


def _forward(given: Sequence[Any], numbers: tuple[int, ...], scale: float) -> Output:
    """Of the tensors that an operator takes: q, `attention.flat`, gates, cu_seqlens."""
    output = _forward_with_masks(given, numbers, scale)
    return output._replace(**{name: given[0].new_empty(0) for name in MASK_FIELDS})


def _forward_with_masks(given: Sequence[Any], numbers: tuple[int, ...], scale: float) -> Output:
    """The same with MASK_FIELDS; those that no kernel gave are not written."""
    q, *tensors, gates, cu_seqlens = given
    layout = layout_of(q, tensors[0].shape[1], cu_seqlens, numbers)
    output = whole.forward(q, whole.paired(tensors), gates, layout, scale)
    shapes = _shapes(q, tensors, layout)
    not_made = {name: shapes[name] for name in MASK_FIELDS if not getattr(output, name).numel()}
    return output._replace(**{name: q.new_empty(shape, dtype=dtype) for name, (shape, dtype) in not_made.items()})


def _backward(
    upstream: Sequence[Tensor | None], given: Sequence[Any], saved: list[Tensor], numbers: tuple[int, ...], scale: float
) -> Sequence[Tensor]:
    """The gradients of q, keys and values, and the gates."""
    q, *tensors, gates, cu_seqlens = given
    layout = layout_of(q, tensors[0].shape[1], cu_seqlens, numbers)
    if not selected.makes_masks(q, tensors[0], tensors[1], layout):
        saved[-len(MASK_FIELDS) :] = (q.new_empty(0) for _ in MASK_FIELDS)
    dq, of_given, dgates = whole.backward(upstream, q, whole.paired(tensors), gates, saved, layout, scale)
    # an operator gives tensors: one without rows where there is none
    return dq, *(q.new_empty(0) if x is None else x for x in whole.flat(of_given)), dgates


def _gradients_like(q: Tensor, *more: Any) -> tuple[Tensor, ...]:
    """Empty gradients of the tensors that an operator takes."""
    *tensors, gates, _ = more
    return tuple(q.new_empty(0) if x is None else x.new_empty(x.shape) for x in (q, *tensors, gates))


def _of_inputs(given: Sequence[Tensor | None], found: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
    """What an operator's backward pass returns: None for what was not given, for cu_seqlens and the numbers."""
    return *(None if x is None else dx for x, dx in zip(given[:-1], found, strict=True)), None, None, None


# all that the backward pass needs as results


def _attention_of_plan(*inputs: Any) -> tuple[Tensor | None, ...]:
    *given, numbers, scale = inputs
    forward = _FORWARD if planned.serves(*given[:3]) else _FORWARD.function
    return tuple(forward(given, tuple(numbers), scale))


def _fake_attention(q: Tensor, *more: Any) -> tuple[Tensor, ...]:
    *tensors, _, cu_seqlens, numbers, _ = more
    layout = layout_of(q, tensors[0].shape[1], cu_seqlens, numbers)
    shapes = {**_shapes(q, tensors, layout), **dict.fromkeys(MASK_FIELDS, ((0,), q.dtype))}
    return tuple(q.new_empty(shape, dtype=dtype) for shape, dtype in shapes.values())


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, numbers, scale = inputs
    ctx.save_for_backward(*tensors, *Saved.of(output))
    ctx.more = numbers, scale
    ctx.mark_non_differentiable(*output[NUM_DIFFERENTIABLE:])
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
    given, saved = ctx.saved_tensors[: NUM_KEYS_AND_VALUES + 3], ctx.saved_tensors[NUM_KEYS_AND_VALUES + 3 :]
    found = _attention_backward(*upstream[:NUM_DIFFERENTIABLE], *saved, *given, *ctx.more)
    return _of_inputs(given, found)


def _attention_backward_of_plan(*inputs: Any) -> tuple[Tensor | None, ...]:
    *tensors, numbers, scale = inputs
    q, k, v = tensors[NUM_DIFFERENTIABLE + len(Saved._fields) :][:3]
    backward = _BACKWARD if planned.serves(q, k, v) else _BACKWARD.function
    return tuple(backward(tensors, tuple(numbers), scale))


def _backward_of_results(tensors: Sequence[Any], numbers: tuple[int, ...], scale: float) -> Sequence[Tensor]:
    upstream, tensors = tensors[:NUM_DIFFERENTIABLE], tensors[NUM_DIFFERENTIABLE:]
    saved, given = tensors[: len(Saved._fields)], tensors[len(Saved._fields) :]
    return _backward(upstream, given, list(saved), numbers, scale)


_FORWARD = Plans(_forward, len(Output._fields) * [Memory.RESULT])
_BACKWARD = Plans(_backward_of_results, (NUM_KEYS_AND_VALUES + 2) * [Memory.RESULT])
_attention = define(
    "nsa::attention",
    f"({GIVEN_SCHEMA}, {REST_SCHEMA}) -> ({', '.join(len(Output._fields) * ['Tensor'])})",
    _attention_of_plan,
    _fake_attention,
    _gradients,
    _save,
)
_attention_backward = define(
    "nsa::attention_backward",
    f"(Tensor? do, Tensor? dlse_cmp, Tensor? dlse_sel, Tensor? dlse_win, {SAVED_SCHEMA}, {GIVEN_SCHEMA}, {REST_SCHEMA})"
    f" -> ({GRADIENTS_SCHEMA})",
    _attention_backward_of_plan,
    lambda *inputs: _gradients_like(*inputs[NUM_DIFFERENTIABLE + len(Saved._fields) : -2]),
)


# all of it in one tensor


def _short_attention_of_plan(*inputs: Any) -> tuple[Tensor, Tensor]:
    *given, numbers, scale = inputs
    q, *tensors, _, cu_seqlens = given
    found = None
    if planned.serves(*given[:3]):
        found = _SHORT_FORWARD.keeping(given, tuple(numbers), scale)
    if found is not None:
        (o,), kept, _ = found
        assert o is not None
        return o, kept
    output = _forward_with_masks(given, tuple(numbers), scale)
    views, num_bytes = _views(q, tensors, layout_of(q, tensors[0].shape[1], cu_seqlens, numbers))
    kept = q.new_empty(num_bytes, dtype=torch.uint8)
    for view, name in zip(views, Saved._fields, strict=True):
        view.of(kept).copy_(getattr(output, name))
    return output.o, kept


def _fake_short_attention(q: Tensor, *more: Any) -> tuple[Tensor, Tensor]:
    *tensors, _, cu_seqlens, numbers, _ = more
    _, num_bytes = _views(q, tensors, layout_of(q, tensors[0].shape[1], cu_seqlens, numbers))
    return q.new_empty((*q.shape[:3], tensors[1].shape[3])), q.new_empty(num_bytes, dtype=torch.uint8)


def _short_save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, numbers, scale = inputs
    ctx.save_for_backward(*tensors, output[1])
    ctx.more = numbers, scale
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _short_gradients(ctx: Any, do: Tensor, _: None) -> tuple[Tensor | None, ...]:
    *given, kept = ctx.saved_tensors
    return _of_inputs(given, _short_attention_backward(do, kept, *given, *ctx.more))


def _short_attention_backward_of_plan(*inputs: Any) -> tuple[Tensor | None, ...]:
    *tensors, numbers, scale = inputs
    backward = _SHORT_BACKWARD if planned.serves(*tensors[2:5]) else _SHORT_BACKWARD.function
    return tuple(backward(tensors, tuple(numbers), scale))


def _backward_of_kept(tensors: Sequence[Any], numbers: tuple[int, ...], scale: float) -> Sequence[Tensor]:
    do, kept, *given = tensors
    q, *keys_and_values, _, cu_seqlens = given
    views, _ = _views(q, keys_and_values, layout_of(q, keys_and_values[0].shape[1], cu_seqlens, numbers))
    return _backward((do, None, None, None), given, [view.of(kept) for view in views], numbers, scale)


def _memory(name: str) -> Memory:
    if name == "o":
        return Memory.RESULT
    return Memory.KEPT if name in Saved._fields else Memory.WORKSPACE


_SHORT_FORWARD = Plans(_forward_with_masks, [_memory(name) for name in Output._fields])
_SHORT_BACKWARD = Plans(_backward_of_kept, (NUM_KEYS_AND_VALUES + 2) * [Memory.RESULT])
# These operators' names have the version of what is kept, to be raised whenever its size changes: Inductor keeps
# compiled graphs on disk, with the sizes of tensors, by the names of operators, and one of an older version would fail.
_short_attention = define(
    "nsa::short_attention_2",
    f"({GIVEN_SCHEMA}, {REST_SCHEMA}) -> (Tensor, Tensor)",
    _short_attention_of_plan,
    _fake_short_attention,
    _short_gradients,
    _short_save,
)
_short_attention_backward = define(
    "nsa::short_attention_2_backward",
    f"(Tensor do, Tensor kept, {GIVEN_SCHEMA}, {REST_SCHEMA}) -> ({GRADIENTS_SCHEMA})",
    _short_attention_backward_of_plan,
    lambda do, kept, *given: _gradients_like(*given[:-2]),
)


def attention(q: Tensor, *more: Any, observed: bool) -> tuple[Tensor, ...]:
    """`autograd.Attention`; where it is not `observed`, the first result alone counts."""
    *tensors, gates, layout, scale = more
    k, v, *_ = tensors
    operator = _attention if observed or not _is_short(q, k, v) else _short_attention
    found: tuple[Tensor, ...] = operator(q, *tensors, gates, layout.cu_seqlens, numbers_of(layout.config), scale)
    return found


def _is_short(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether calls of these shapes go by plans, for a graph that is traced. Other calls would have to copy their
    tensors into one, as these do where launches cannot be recorded (`planned.AVAILABLE`)."""
    if max(q.numel(), k.numel()) * q.itemsize > dispatch.MOST_PLANNED_BYTES:
        return False
    of_hopper = k.shape[3] in hopper.CHANNELS_OF_KEYS and k.shape[3] >= v.shape[3] == hopper.CHANNELS
    return not (of_hopper and dispatch.has_hopper_kernels(q.device))
