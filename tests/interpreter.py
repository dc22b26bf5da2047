"""Triton's interpreter on a CPU, made fast enough for the laws."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import torch


def reduce_by_xor_at_once() -> None:
    """Let NumPy reduce by xor in one step.

    Triton's bitonic sort takes some thirty such reductions, and the interpreter goes through them number by number in
    Python: 0.9 of the 1.1 s that choosing the blocks of 8 tokens takes. Elsewhere than in the interpreter, and in a
    Triton whose interpreter is made differently, this does nothing.
    """
    if importlib.util.find_spec("triton") is None:
        return
    interpreter = importlib.import_module("triton.runtime.interpreter")
    xor = getattr(importlib.import_module("triton.language.standard"), "_xor_combine", None)
    by_number = getattr(getattr(interpreter, "ReduceOps", None), "generic_reduce", None)
    if xor is None or by_number is None:
        return

    def generic_reduce(self: Any, operands: Any) -> Any:
        if self.combine_fn != xor:
            return by_number(self, operands)
        reduce = interpreter.np.bitwise_xor.reduce
        return [
            self.to_tensor(reduce(x.handle.data, axis=self.axis, keepdims=self.keep_dims), x.dtype) for x in operands
        ]

    interpreter.ReduceOps.generic_reduce = generic_reduce


def compute_in_bfloat16() -> None:
    """Teach the interpreter bfloat16 as a GPU has it.

    It keeps the bits as integers, knows no literal, multiplies the integers in a product, and cuts float32 off where a
    GPU rounds to nearest.
    """
    if importlib.util.find_spec("triton") is None:
        return
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
