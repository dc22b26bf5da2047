"""Triton's interpreter on a CPU, made exact enough for the laws and the incidents, and three times as fast."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
from types import SimpleNamespace
from typing import Any

import torch


def prepare() -> None:
    """All of this module, where Triton is installed. Once in a process, before a kernel is launched."""
    if importlib.util.find_spec("triton") is None:
        return
    compute_in_bfloat16()
    interpreter = importlib.import_module("triton.runtime.interpreter")
    if hasattr(interpreter, "_LangPatchScope"):  # as Triton 3.7 does it; an earlier one stays as slow as it is
        drop_unread_overflow_checks(interpreter)
        look_up_types_by_name(interpreter)
        change_the_language_once_a_launch(interpreter)


def compute_in_bfloat16() -> None:
    """Teach the interpreter bfloat16 as a GPU has it.

    It keeps the bits as integers, knows no literal, multiplies the integers in a product, and cuts float32 off where a
    GPU rounds to nearest.
    """
    interpreter, tl = (importlib.import_module(f"triton.{name}") for name in ("runtime.interpreter", "language"))
    builder, np = interpreter.InterpreterBuilder, interpreter.np
    cast, dot = builder.cast_impl, builder.create_dot

    def rounded(x: Any) -> Any:
        bits = torch.from_numpy(np.array(x, dtype=np.float32)).to(torch.bfloat16).view(torch.int16)
        return interpreter.TensorHandle(bits.numpy().view(np.uint16), tl.bfloat16)

    def get_bf16(self: Any, value: float) -> Any:
        return rounded([value])

    def cast_impl(self: Any, x: Any, dtype: Any) -> Any:
        to_bfloat16 = (x.dtype.scalar, dtype.scalar) == (tl.float32, tl.bfloat16)
        return rounded(x.data) if to_bfloat16 else cast(self, x, dtype)

    def create_dot(self: Any, a: Any, b: Any, *more: Any) -> Any:
        a, b = (cast(self, x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b))
        return dot(self, a, b, *more)

    builder.get_bf16, builder.cast_impl, builder.create_dot = get_bf16, cast_impl, create_dot


def drop_unread_overflow_checks(interpreter: Any) -> None:
    """Without its `debug` it computes each sum of integers once more in 64 bits, compares, and drops the answer."""
    options = interpreter.interpreter_builder.options
    if not options.debug:
        interpreter.interpreter_builder.options = dataclasses.replace(options, sanitize_overflow=False)


def look_up_types_by_name(interpreter: Any) -> None:
    """NumPy's type of each of Triton's is found once; the interpreter makes a table of all of them at each look-up."""
    find, found = interpreter._get_np_dtype, {}

    def get_np_dtype(dtype: Any) -> Any:
        name = dtype.scalar.name  # a pointer's and a block's too
        if name not in found:
            found[name] = find(dtype)
        return found[name]

    interpreter._get_np_dtype = get_np_dtype


def block_type_init(tl: Any) -> Any:
    """`tl.block_type.__init__`, which checks each shape and writes each name once."""
    init = tl.block_type.__init__
    known: dict[tuple[Any, ...], tuple[Any, ...]] = {}

    def block_type(self: Any, element_ty: Any, shape: Any) -> None:
        key = (element_ty.name, *(getattr(size, "value", size) for size in shape))
        if key in known:
            self.element_ty = element_ty
            self.shape, self.numel, self.name = known[key]
        else:
            init(self, element_ty, shape)
            known[key] = self.shape, self.numel, self.name

    return block_type


def tensor_init(tl: Any) -> Any:
    """`tl.tensor.__init__`, which makes the constants of each shape once."""
    init = tl.tensor.__init__
    known: dict[tuple[int, ...], tuple[Any, ...]] = {}

    def tensor(self: Any, handle: Any, type: Any) -> None:
        key = tuple(type.shape.values) if type.is_block() else ()
        if key in known:
            self.handle, self.type, self.dtype = handle, type, type.scalar
            self.shape, self.numel = known[key]
        else:
            init(self, handle, type)
            known[key] = self.shape, self.numel

    return tensor


def change_the_language_once_a_launch(interpreter: Any) -> None:
    """Its own functions in the place of triton.language's are found once, and set and taken back at each launch.

    The interpreter searches both modules for them at each launch and at each call of a device function, and leaves what
    it set for the latter.
    """
    tl = interpreter.tl
    scope = interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    changes = [(owner, name, vars(owner)[name]) for owner, name, _ in scope._changes]
    scope.restore()
    changes += [(tl.block_type, "__init__", block_type_init(tl)), (tl.tensor, "__init__", tensor_init(tl))]
    launched = False

    class Launch(interpreter._LangPatchScope):  # type: ignore[misc]
        def restore(self) -> None:
            nonlocal launched
            super().restore()
            launched = False

    def patch_lang(function: Any) -> Any:
        nonlocal launched
        scope = Launch()
        if not launched:
            for owner, name, value in changes:
                scope.set_attr(owner, name, value)
            launched = True
        return scope

    interpreter._patch_lang = patch_lang
