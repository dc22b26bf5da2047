"""Triton's interpreter on a CPU, made exact enough for the laws and the incidents."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import torch


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
