"""Single integers of a kernel, for `gluon_on_cpu.py`: Python's, whose operations take a tenth of a tensor's time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_ARITHMETIC = ("add", "sub", "mul", "floordiv", "mod", "and", "or", "xor", "lshift", "rshift")
_COMPARISONS = ("lt", "le", "eq", "ne", "ge", "gt")


class Integer(int):
    """As a tensor of no dimensions in all that kernels do with one; beside a tensor it takes the tensor's type."""

    __hash__ = int.__hash__

    def to(self, dtype: torch.dtype) -> Any:
        return torch.tensor(int(self), dtype=dtype) if dtype.is_floating_point else self


def _arithmetic(name: str) -> Callable[[int, Any], Any]:
    plain = getattr(int, name)

    def operation(self: int, other: Any) -> Any:
        found = plain(self, other)
        return found if found is NotImplemented else Integer(found)

    return operation


def _comparison(name: str) -> Callable[[int, Any], Any]:
    """A mask, for `&` with those of tensors."""
    plain = getattr(int, name)

    def operation(self: int, other: Any) -> Any:
        found = plain(self, other)
        return found if found is NotImplemented else torch.tensor(found)

    return operation


for _name in _ARITHMETIC:
    setattr(Integer, f"__{_name}__", _arithmetic(f"__{_name}__"))
    setattr(Integer, f"__r{_name}__", _arithmetic(f"__r{_name}__"))
for _name in _COMPARISONS:
    setattr(Integer, f"__{_name}__", _comparison(f"__{_name}__"))


def single(x: Any) -> Any:
    """x, as an `Integer` where it is one integer."""
    one = isinstance(x, torch.Tensor) and not x.ndim and not x.is_floating_point() and x.dtype != torch.bool
    return Integer(x) if one else x
