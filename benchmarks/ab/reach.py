"""Which cases a difference between two versions of nsa/ can reach: only these need be compared.

A case runs the modules that its entry points import, directly or through others, as the sources say, in either version.
`import nsa` itself runs every module, but what a name of it stands for is looked up, so that a change in `nsa/paged/`
reaches no attention case. A file that is no module (a table of tiles, a profile) counts as its package.
"""

from __future__ import annotations

import ast
from collections.abc import Container, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

from benchmarks.ab.checkout import Sources
from benchmarks.cases.key import PART, Key

_ATTENTION = ("nsa.attention", "nsa.backends", "nsa.compression")
_TRAIN_STEP = ("nsa.model", "nsa.loss", "nsa.train.distributed", "nsa.train.settings", "nsa.train.trainer")
_ROOT = "nsa"


def changed_files(base: Sources, head: Sources) -> list[str]:
    """Paths below nsa/ that only one of them has, or that differ."""
    sides = [_files(side) for side in (base, head)]
    names = sorted(sides[0].keys() | sides[1].keys())
    return [name for name in names if _content(sides[0].get(name)) != _content(sides[1].get(name))]


def reached(keys: Sequence[Key], base: Sources, head: Sources) -> list[Key]:
    """The cases that run a changed file."""
    packages = {name for side in (base, head) for name in _modules(side)}
    changed = {_owner(name, packages) for name in changed_files(base, head)}
    run = {entries: _run(base, entries) | _run(head, entries) for entries in set(map(_entries, keys))}
    return [key for key in keys if changed & run[_entries(key)]]


def _entries(key: Key) -> tuple[str, ...]:
    """The modules whose functions the workload of this case calls."""
    attention = key.mode.startswith(("prefill", PART)) or key.mode == "decode"
    return _ATTENTION if attention else _ATTENTION + _TRAIN_STEP


def _run(side: Sources, entries: Sequence[str]) -> set[str]:
    """What these modules import, and they themselves; with the packages that hold them."""
    modules = _modules(side)
    exported = dict(_exported(modules))
    found, waiting = {_ROOT}, list(entries)
    while waiting:
        name = waiting.pop()
        if name not in found and name in modules:
            found.add(name)
            waiting += _imported(modules[name], modules, exported)
            waiting += _packages(name)
    return found


def _packages(name: str) -> Iterator[str]:
    while "." in name:
        name = name.rpartition(".")[0]
        yield name


def _exported(modules: Mapping[str, Path]) -> Iterator[tuple[str, str]]:
    """(name in nsa, the module that has it)."""
    for module, name, known_as in _from_imports(modules[_ROOT]) if _ROOT in modules else ():
        whole = f"{module}.{name}"
        yield known_as, whole if whole in modules else module


def _imported(path: Path, modules: Mapping[str, Path], exported: Mapping[str, str]) -> Iterator[str]:
    for module, name, _ in _from_imports(path):
        whole = f"{module}.{name}"
        if whole in modules:
            yield whole
        else:
            yield exported.get(name, module) if module == _ROOT else module
    for node in ast.walk(_parsed(path)):
        if isinstance(node, ast.Import):
            yield from (one.name for one in node.names if one.name != _ROOT)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == _ROOT:
            yield exported.get(node.attr, f"{_ROOT}.{node.attr}")


def _from_imports(path: Path) -> Iterator[tuple[str, str, str]]:
    """(module, name there, name here) of each `from nsa... import`."""
    for node in ast.walk(_parsed(path)):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.partition(".")[0] == _ROOT:
            yield from ((node.module, one.name, one.asname or one.name) for one in node.names)


@cache
def _parsed(path: Path) -> ast.Module:
    """A version that cannot be parsed imports nothing; its processes say so."""
    try:
        return ast.parse(path.read_text())
    except (SyntaxError, ValueError):
        return ast.Module([], [])


def _files(side: Sources) -> dict[str, Path]:
    """By path from the folder that holds nsa/."""
    return {
        str(path.relative_to(side.folder)): path
        for path in (side.folder / _ROOT).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def _modules(side: Sources) -> dict[str, Path]:
    """nsa/train/loop.py is nsa.train.loop, nsa/train/__init__.py is nsa.train."""
    return {
        name.removesuffix(".py").removesuffix("/__init__").replace("/", "."): path
        for name, path in _files(side).items()
        if path.suffix == ".py"
    }


def _owner(name: str, modules: Container[str]) -> str:
    """The module of a file; of one that is none, the innermost package that it lies in."""
    if name.endswith(".py"):
        return name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    folders = (str(folder).replace("/", ".") for folder in Path(name).parents)
    return next((folder for folder in folders if folder in modules), _ROOT)


def _content(path: Path | None) -> bytes | None:
    return None if path is None else path.read_bytes()
