"""Triton's interpreter on a CPU, made fast enough for the laws."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any


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
