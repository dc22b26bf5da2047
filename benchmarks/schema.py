"""A dataclass from parsed JSON, every value held to its field's type: a file may be torn, edited or foreign."""

from __future__ import annotations

import dataclasses
import math
import reprlib
import types
from collections.abc import Mapping
from enum import Enum
from functools import cache
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")
_LARGEST_INT = 2**63 - 1


def build(kind: type[T], data: Any, name: str) -> T:
    """A dataclass of this kind. Raises TypeError or ValueError naming the field ("record.key.batch")."""
    if not isinstance(data, dict):
        raise TypeError(f"{name} must be a JSON object; got {reprlib.repr(data)}")
    hints, needed = _fields(kind)  # type: ignore[arg-type]
    if unknown := [key for key in data if key not in hints]:
        raise ValueError(f"{name} has no field {reprlib.repr(unknown[0])}")
    if missing := [key for key in needed if key not in data]:
        raise ValueError(f"{name} must have {missing[0]!r}")
    return kind(**{key: _value(hints[key], value, f"{name}.{key}") for key, value in data.items()})


@cache
def _fields(kind: type) -> tuple[dict[str, Any], list[str]]:
    """(type of each field, fields without a default)."""
    fields = dataclasses.fields(kind)
    hints = get_type_hints(kind)
    needed = [field.name for field in fields if field.default is dataclasses.MISSING]
    return {field.name: hints[field.name] for field in fields}, needed


@cache
def _parts(kind: Any) -> tuple[Any, Any]:
    """(what a generic type is made with, its first argument)."""
    return get_origin(kind), next(iter(get_args(kind)), None)


def _value(kind: Any, value: Any, name: str) -> Any:
    origin, first = _parts(kind)
    if origin in (Union, types.UnionType):  # every union here is "X | None"
        return None if value is None else _value(first, value, name)
    if origin is tuple and isinstance(value, list):
        if first is float and set(map(type, value)) == {float} and all(map(math.isfinite, value)):
            return tuple(value)  # samples: most of what there is to read
        return tuple(_value(first, item, f"{name}[{i}]") for i, item in enumerate(value))
    if origin is Mapping and isinstance(value, dict):
        return value
    if isinstance(kind, type):
        if dataclasses.is_dataclass(kind):
            return build(kind, value, name)
        if issubclass(kind, Enum):
            return kind(value)
        return _scalar(kind, value, name)
    raise _wrong(kind, value, name)


def _scalar(kind: type, value: Any, name: str) -> Any:
    if kind is float and type(value) is int and abs(value) <= _LARGEST_INT:
        value = float(value)
    if type(value) is not kind:  # not isinstance: True is an int
        raise _wrong(kind, value, name)
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{name} must be finite; got {value}")
    if isinstance(value, int) and abs(value) > _LARGEST_INT:
        raise ValueError(f"{name} must fit in 64 bits; got {reprlib.repr(value)}")
    if isinstance(value, str):
        value.encode()  # JSON can spell half a surrogate pair, which no page can hold: UnicodeEncodeError
    return value


def _wrong(kind: Any, value: Any, name: str) -> TypeError:
    wanted = kind.__name__ if isinstance(kind, type) else str(kind)
    return TypeError(f"{name} must be {wanted}; got {reprlib.repr(value)}")
