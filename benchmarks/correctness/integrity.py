"""Whether what measures and compares is what its files say, after code that shares its process has run.

Python lets any module replace a function of any other. So every function and every constant of the benches, of the
harness and of the reference is compared with its own source, as are the functions of PyTorch and of Python that take
the time, wait and compare. A file that was rewritten meanwhile differs as well.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import inspect
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import BuiltinFunctionType, CodeType, MethodDescriptorType, ModuleType
from typing import Any

import torch

from benchmarks.correctness.verify import IncorrectError

_OWN = ("benchmarks.", "harness.")
_PYTEST = re.compile(r"\.(conftest|test_\w+)$")
"""Modules that pytest rewrites."""
_ORACLE = ("nsa.reference", "nsa.geometry")
"""Of the product, whose other versions are measured too: their functions alone."""
_WHOLE = ("torch.cuda.streams", "torch.cuda.graphs", "torch.nn.attention")
_FUNCTIONS = {
    "torch.cuda": ("synchronize", "current_stream", "current_device"),
    "torch.cuda.memory": (
        "memory_allocated",
        "max_memory_allocated",
        "reset_peak_memory_stats",
        "mem_get_info",
        "memory_snapshot",
    ),
    "torch.autograd": ("grad",),
    "statistics": ("median",),
}
"""Of modules that do more than the benches need."""
_BUILT_IN = (
    ("time", ("perf_counter", "process_time", "monotonic")),
    ("torch", ("equal", "stack", "cat", "maximum", "randn")),
    ("torch.linalg", ("linalg_vector_norm",)),
    ("torch.nn.functional", ("scaled_dot_product_attention",)),
    ("torch.Tensor", ("isfinite", "detach", "clone", "copy_", "to", "sum", "abs", "amax", "square", "sqrt", "item")),
)
"""Compiled functions: nothing written in Python may stand in their place."""
_PUBLIC = {"linalg_vector_norm": "vector_norm"}
"""How PyTorch calls a function that has another name of its own."""

Code = tuple[object, ...]
"""What a function does, without where it stands in its file."""


@dataclass(frozen=True)
class Source:
    """What a file says."""

    functions: dict[str, set[Code]]
    """By name ("Class.method"); several where it is defined under conditions."""
    constants: dict[str, object]
    imports: tuple[tuple[str, str, str], ...]
    """(module, name there, name here)."""


def require_intact() -> None:
    """Raises IncorrectError naming what is not what its file says."""
    wrong = list(dict.fromkeys(_altered()))
    if wrong:
        raise IncorrectError(
            f"{', '.join(wrong[:5])}{', ...' if len(wrong) > 5 else ''}: replaced while the benches ran, or the file"
            " was written to; what measures and compares must be what its file says"
        )


def _altered() -> Iterator[str]:
    own = [one for name, one in sys.modules.items() if name.startswith(_OWN) and not _PYTEST.search(name)]
    for module in own:
        yield from altered(module, data=True)
    for name in _ORACLE:
        module = importlib.import_module(name)
        yield from altered(module, only=tuple(name for name in _source(module).functions if "." not in name))
    for name in _WHOLE:
        yield from altered(importlib.import_module(name))
    for name, functions in _FUNCTIONS.items():
        yield from altered(importlib.import_module(name), only=functions)
    for name, functions in _BUILT_IN:
        holder = torch.Tensor if name == "torch.Tensor" else importlib.import_module(name)
        for function in functions:
            found = getattr(holder, _PUBLIC.get(function, function))
            if not isinstance(found, (BuiltinFunctionType, MethodDescriptorType)) or found.__name__ != function:
                yield f"{name}.{_PUBLIC.get(function, function)}"
    for module in own:
        yield from other_imports(module)


def altered(module: ModuleType, only: tuple[str, ...] | None = None, *, data: bool = False) -> Iterator[str]:
    """The names in a module that are not what its file says; `only` these functions; `data`: its constants too."""
    source = _source(module)
    for name, codes in source.functions.items():
        if (only is None or name in only) and (found := _function(module, name)) is not None and found not in codes:
            yield f"{module.__name__}.{name}"
    for name, value in source.constants.items() if data else ():
        if vars(module).get(name) != value:
            yield f"{module.__name__}.{name}"


def other_imports(module: ModuleType) -> Iterator[str]:
    """The names that a module has imported and that are now another thing here than there."""
    for origin, there, here in _source(module).imports:
        imported = sys.modules.get(origin)
        if imported is not None and hasattr(imported, there) and vars(module).get(here) is not getattr(imported, there):
            yield f"{module.__name__}.{here}"


def _source(module: ModuleType) -> Source:
    path = Path(str(module.__file__))
    status = path.stat()
    return _read(path, status.st_mtime_ns, status.st_size)


@cache
def _read(path: Path, _changed_ns: int, _size: int) -> Source:
    text = path.read_text()
    tree = ast.parse(text)
    functions: dict[str, set[Code]] = {}
    _collect(compile(text, str(path), "exec", dont_inherit=True), "", functions)
    return Source(functions, dict(_constants(tree)), tuple(_imports(tree)))


def _collect(code: CodeType, prefix: str, functions: dict[str, set[Code]]) -> None:
    """The functions and methods in the body of a module or a class."""
    for inner in code.co_consts:
        if not isinstance(inner, CodeType) or inner.co_name.startswith("<"):
            continue
        if inner.co_flags & inspect.CO_OPTIMIZED:
            functions.setdefault(prefix + inner.co_name, set()).add(_key(inner))
        else:
            _collect(inner, f"{prefix}{inner.co_name}.", functions)


def _key(code: CodeType) -> Code:
    constants = tuple(_key(one) if isinstance(one, CodeType) else (type(one), repr(one)) for one in code.co_consts)
    return (code.co_name, code.co_code, code.co_names, code.co_varnames, code.co_freevars, code.co_flags, constants)


def _constants(tree: ast.Module) -> Iterator[tuple[str, object]]:
    for node in tree.body:
        if not isinstance(node, ast.Assign) or len(node.targets) != 1:
            continue
        target, value = node.targets[0], node.value
        pairs = [(target, value)]
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            pairs = list(zip(target.elts, value.elts, strict=True))
        for name, expression in pairs:
            with contextlib.suppress(ValueError, TypeError):
                if isinstance(name, ast.Name):
                    yield name.id, ast.literal_eval(expression)


def _imports(tree: ast.Module) -> Iterator[tuple[str, str, str]]:
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.module and not node.level and node.module != "__future__":
            yield from ((node.module, one.name, one.asname or one.name) for one in node.names)


def _function(module: ModuleType, name: str) -> Code | None:
    """What the function of this name does; () where something else stands in its place, None where nothing does."""
    holder: Any = module
    *classes, last = name.split(".")
    for one in classes:
        holder = vars(holder).get(one)
        if not isinstance(holder, type):
            return None
    found = vars(holder).get(last)
    if found is None:
        return None
    for attribute in ("fget", "func", "__func__"):
        found = getattr(found, attribute, found)
    code = getattr(inspect.unwrap(found), "__code__", None)
    return () if code is None else _key(code)
