"""Mutants that nobody chose: drawn.toml, from the operators of cosmic-ray.

cosmic-ray, because its operators are classes over a syntax tree that keeps every space, so that one change can be made
without its runner and database, and because it is maintained and does not import what it changes. It is installed for
`draw` alone.
"""

from __future__ import annotations

import ast
import importlib.metadata
import json
import random
import re
from collections.abc import Iterator
from functools import cache
from itertools import cycle
from pathlib import Path
from typing import Any

import parso
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.operators.operator import Operator
from cosmic_ray.operators.provider import OperatorProvider

from nsa.io import atomic_write
from tests.mutants.standing import DRAWN, FOLDER, product_files, read

_ORDER = "(Eq|NotEq|Lt|LtE|Gt|GtE)"
_WANTED = re.compile(
    rf"ReplaceComparisonOperator_({_ORDER}_{_ORDER}|Is_IsNot|IsNot_Is)|ReplaceBinaryOperator_.*"
    "|ReplaceUnaryOperator_Delete_.*|AddNot|ReplaceTrueWithFalse|ReplaceFalseWithTrue|ReplaceAndWithOr|ReplaceOrWithAnd"
    "|ReplaceBreakWithContinue|ReplaceContinueWithBreak|NumberReplacer"
)
_SPEAKS = {"print", "warn", "warning", "info", "debug"}
"""Calls whose arguments are for people."""
_WAITS = re.compile(r".*_(S|s|MS|ms)|timeout|interval")
"""Names of how long something is waited for: no test can tell one second more without depending on the clock."""
_MOST_MISSES = 50
"""In a row, until the files have no more to give."""

Place = tuple[tuple[int, int], tuple[int, int]]
"""((line, column), (line, column)), lines from 1, columns from 0."""


class ReturnNone(Operator):  # type: ignore[misc]
    """`return x` gives None; cosmic-ray has no operator for what a function returns."""

    def mutation_positions(self, node: Any) -> Iterator[Place]:
        """Of what is returned."""
        if node.type == "return_stmt" and len(node.children) == 2 and node.children[1].get_code().strip() != "None":
            yield (node.children[1].start_pos, node.children[1].end_pos)

    def mutate(self, node: Any, index: int) -> Any:
        """The statement, returning None."""
        node.children[1] = parso.python.tree.Name("None", node.children[1].start_pos, prefix=" ")
        return node

    @classmethod
    def examples(cls) -> tuple[()]:
        """None: this one is tested by what is drawn."""
        return ()


@cache
def operators() -> dict[str, Operator]:
    """By name."""
    known = OperatorProvider()
    return {name: known[name]() for name in sorted(known) if _WANTED.fullmatch(name)} | {"ReturnNone": ReturnNone()}


def places(source: str) -> dict[Place, list[tuple[str, int]]]:
    """Where something can be changed -> the operators that can, each with its number among its own places."""
    found: dict[Place, list[tuple[str, int]]] = {}
    nodes, left_out = list(ast_nodes(get_ast(source))), list(_no_behaviour(source))
    for name, operator in operators().items():
        positions = (place for node in nodes for place in operator.mutation_positions(node))
        for number, place in enumerate(positions):
            if not any(start <= place[0] and place[1] <= stop for start, stop in left_out):
                found.setdefault(place, []).append((name, number))
    return found


def _no_behaviour(source: str) -> Iterator[Place]:
    """Annotations, messages, waiting times, decorators, `__all__`, how a script begins: nothing that a test is for."""
    lines = source.split("\n")

    def place(node: ast.expr | ast.stmt) -> Place:
        begin, end = node.lineno, node.end_lineno or node.lineno
        start = len(lines[begin - 1].encode()[: node.col_offset].decode())
        stop = len(lines[end - 1].encode()[: node.end_col_offset].decode())
        return (begin, start), (end, stop)

    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield from map(place, node.decorator_list)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.returns:
            yield place(node.returns)
        elif isinstance(node, ast.AnnAssign | ast.arg) and node.annotation:
            yield place(node.annotation)
        elif isinstance(node, ast.Assert) and node.msg:
            yield place(node.msg)
        elif isinstance(node, ast.Raise | ast.JoinedStr):
            yield place(node)
        elif isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name in _SPEAKS or name == "sleep":
                yield place(node)
        elif (
            isinstance(node, ast.keyword) and isinstance(node.value, ast.Constant) and _WAITS.fullmatch(node.arg or "")
        ):
            yield place(node.value)
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name, constant = node.targets[0].id, isinstance(node.value, ast.Constant)
            if name == "__all__" or (constant and _WAITS.fullmatch(name)):
                yield place(node)
        elif isinstance(node, ast.If) and "__name__" in ast.unparse(node.test):
            yield place(node)


def drawn(root: Path, count: int, seed: int) -> list[dict[str, str]]:
    """As many mutants: the areas in turn, of each a file, of it a place, of that an operator, all by chance.

    ValueError where the areas' files do not give so many.
    """
    areas, _ = read(root)
    files = {name: product_files(root, area) for name, area in areas.items() if name != DRAWN}
    chance, found, taken = random.Random(seed), list[dict[str, str]](), set[tuple[str, Place]]()
    sources = cache(lambda file: (root / file).read_text())
    changeable = cache(lambda file: places(sources(file)))
    turn = cycle(sorted(name for name in files if files[name]))
    misses = 0
    while len(found) < count and misses < _MOST_MISSES and any(files.values()):
        area = next(turn)
        file = chance.choice(files[area])
        misses += 1
        if not changeable(file):
            continue
        place = chance.choice(sorted(changeable(file)))
        operator, number = chance.choice(changeable(file)[place])
        if (file, place) in taken:
            continue
        changed = mutate_code(sources(file), operators()[operator], number)
        if not _is_another_program(sources(file), changed):
            continue
        taken.add((file, place))
        misses = 0
        old, new = excerpt(sources(file), changed)
        stem = re.sub(r"[^a-z0-9]+", "-", file.removesuffix(".py").lower()).strip("-")
        name = f"drawn-{stem}-{place[0][0]}-{place[0][1]}"
        found.append({"id": name, "area": area, "operator": operator, "file": file, "old": old, "new": new})
    if len(found) < count:
        raise ValueError(f"--count: the areas' files give {len(found)} mutants; {count} were asked for")
    return found


def _is_another_program(source: str, changed: str) -> bool:
    try:
        return ast.dump(ast.parse(source)) != ast.dump(ast.parse(changed))
    except SyntaxError:
        return False


def excerpt(source: str, changed: str) -> tuple[str, str]:
    """(old, new): the changed lines with as many around them as make the old ones unique in the source."""
    old, new = source.splitlines(keepends=True), changed.splitlines(keepends=True)
    same = [a == b for a, b in zip(old, new, strict=False)]
    begin = same.index(False)
    tail = next(i for i, (a, b) in enumerate(zip(reversed(old), reversed(new), strict=False)) if a != b)
    end = max(len(old) - tail, begin + 1)
    while source.count("".join(old[begin:end])) > 1:
        begin, end = max(begin - 1, 0), min(end + 1, len(old))
    return "".join(old[begin:end]), "".join(new[begin : len(new) - (len(old) - end)])


def write(root: Path, count: int, seed: int) -> Path:
    """Write the file. ValueError where there is one already: it may hold a person's reasons."""
    path = root / FOLDER / f"{DRAWN}.toml"
    if path.exists():
        raise ValueError(f"{path} is there; remove it to draw others")
    version = importlib.metadata.version("cosmic-ray")
    head = f"# Drawn with cosmic-ray {version}: python -m tests.mutants draw --count {count} --seed {seed}\n"
    atomic_write(path, head + "".join(map(_toml, drawn(root, count, seed))))
    return path


def _toml(mutant: dict[str, str]) -> str:
    return "\n[[mutant]]\n" + "".join(f"{name} = {_text(value)}\n" for name, value in mutant.items())


def _text(value: str) -> str:
    if "\n" in value and "'''" not in value:
        return f"'''\n{value}'''"
    return json.dumps(value, ensure_ascii=False)  # a basic string of TOML escapes as JSON does
