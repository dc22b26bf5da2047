"""A dataclass from parsed JSON, every value held to its field's type: a file may be damaged, edited or foreign.

What a type asks is worked out once; thousands of records are then read by the same small functions. Files of lines
(`nsa.io`) hold one such dataclass per line. A dataclass whose fields were renamed says so in `OLD_NAMES` (name in
earlier files -> field), and one that lost fields in `FORMER_FIELDS`; earlier files are read as before.
"""

from __future__ import annotations

import dataclasses
import math
import reprlib
import types
from collections.abc import Callable, Mapping
from enum import Enum
from functools import cache
from typing import Any, NoReturn, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")
_Reader = Callable[[Any], Any]
_LARGEST_INT = 2**63 - 1


class _MisfitError(Exception):
    """A value that its type does not allow. Its place is put together on the way out: most values do fit."""

    def __init__(self, error: type[TypeError] | type[ValueError], says: str) -> None:
        super().__init__(says)
        self.error, self.says, self.place = error, says, ""

    def within(self, part: str) -> None:
        self.place = part + self.place


def build(kind: type[T], data: Any, name: str) -> T:
    """A dataclass of this kind. Raises TypeError or ValueError naming the field ("record.key.batch")."""
    try:
        made: T = _reader(kind)(data)  # type: ignore[arg-type]
    except _MisfitError as misfit:
        raise misfit.error(f"{name}{misfit.place} {misfit.says}") from None
    return made


@cache
def _reader(kind: Any) -> _Reader:
    """What turns parsed JSON into this type, or raises _MisfitError."""
    origin = get_origin(kind)
    if origin in (Union, types.UnionType):  # every union here is "X | None"
        read = _reader(next(part for part in get_args(kind) if part is not types.NoneType))
        return lambda value: None if value is None else read(value)
    if origin is tuple:
        return _tuple(kind)
    if origin is Mapping:
        return lambda value: value if isinstance(value, dict) else _refuse(kind, value)
    if dataclasses.is_dataclass(kind):
        return _dataclass(kind)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return kind
    if kind not in _SCALARS:
        raise NotImplementedError(f"harness.schema reads no fields of type {kind}")
    return _SCALARS[kind]


def _dataclass(kind: Any) -> _Reader:
    hints = get_type_hints(kind)
    readers = {field.name: _reader(hints[field.name]) for field in dataclasses.fields(kind)}
    needed = [
        field.name
        for field in dataclasses.fields(kind)
        if field.default is field.default_factory is dataclasses.MISSING
    ]
    old_names: Mapping[str, str] = getattr(kind, "OLD_NAMES", {})
    former_fields: frozenset[str] = getattr(kind, "FORMER_FIELDS", frozenset())

    def read(data: Any) -> Any:
        if not isinstance(data, dict):
            raise _MisfitError(TypeError, f"must be a JSON object; got {reprlib.repr(data)}")
        if not old_names.keys().isdisjoint(data):
            data = _with_new_names(data, old_names)
        if not former_fields.isdisjoint(data):
            data = {name: value for name, value in data.items() if name not in former_fields}
        if unknown := [key for key in data if key not in readers]:
            raise _MisfitError(ValueError, f"has no field {reprlib.repr(unknown[0])}")
        if missing := [key for key in needed if key not in data]:
            raise _MisfitError(ValueError, f"must have {missing[0]!r}")
        values = {}
        for key, value in data.items():
            try:
                values[key] = readers[key](value)
            except _MisfitError as misfit:
                misfit.within(f".{key}")
                raise
        return kind(**values)

    return read


def _with_new_names(data: Mapping[str, Any], old_names: Mapping[str, str]) -> dict[str, Any]:
    for old in old_names.keys() & data.keys():
        if old_names[old] in data:
            raise _MisfitError(ValueError, f"must not have {old!r} beside {old_names[old]!r}")
    return {old_names.get(name, name): value for name, value in data.items()}


def _tuple(kind: Any) -> _Reader:
    item = get_args(kind)[0]
    read_item = _reader(item)

    def read(value: Any) -> tuple[Any, ...]:
        if not isinstance(value, list):
            _refuse(kind, value)
        if item is float and set(map(type, value)) == {float} and all(map(math.isfinite, value)):
            return tuple(value)  # samples: most of what there is to read
        items = []
        for i, one in enumerate(value):
            try:
                items.append(read_item(one))
            except _MisfitError as misfit:
                misfit.within(f"[{i}]")
                raise
        return tuple(items)

    return read


def _bool(value: Any) -> bool:
    return value if type(value) is bool else _refuse(bool, value)


def _int(value: Any) -> int:
    if type(value) is not int:  # not isinstance: True is an int
        _refuse(int, value)
    if abs(value) > _LARGEST_INT:
        raise _MisfitError(ValueError, f"must fit in 64 bits; got {reprlib.repr(value)}")
    return value


def _float(value: Any) -> float:
    if type(value) is int and abs(value) <= _LARGEST_INT:
        return float(value)
    if type(value) is not float:
        _refuse(float, value)
    if not math.isfinite(value):
        raise _MisfitError(ValueError, f"must be finite; got {value}")
    return value


def _str(value: Any) -> str:
    if type(value) is not str:
        _refuse(str, value)
    value.encode()  # JSON can spell half a surrogate pair, which no page can hold: UnicodeEncodeError
    return value


_SCALARS: dict[Any, _Reader] = {bool: _bool, int: _int, float: _float, str: _str}


def _refuse(kind: Any, value: Any) -> NoReturn:
    wanted = kind.__name__ if isinstance(kind, type) else str(kind)
    raise _MisfitError(TypeError, f"must be {wanted}; got {reprlib.repr(value)}")
