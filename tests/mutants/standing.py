"""The standing set: `tests/mutants/<area>.toml`, read and checked without importing the product."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from harness import schema
from regression import listing

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FOLDER = Path("tests") / "mutants"
"""In the repository, and in any other tree that has such a set."""
DRAWN = "drawn"
"""The file of the mutants that a tool drew; each names the area whose tests must see it."""
MOST_EQUIVALENT = 0.03
_VALUE_FOLLOWS = {"-k", "-m", "-p", "-n", "-o"}
"""Options of pytest after which a value stands, so that it is no path."""


@dataclass(frozen=True)
class Mutant:
    """One change, as its file describes it."""

    id: str
    file: str
    """The product's file, from the root."""
    old: str
    """This text stands exactly once in it."""
    new: str
    why: str = ""
    """What goes wrong; a drawn one has its operator instead."""
    tests: tuple[str, ...] | None = None
    """Pytest arguments, instead of the area's."""
    incidents: tuple[str, ...] | None = None
    """Ids of `python -m regression run`, instead of the area's."""
    equivalent: str | None = None
    """Why no test can see it; it must then survive."""
    area: str | None = None
    """Of a drawn one."""
    operator: str | None = None
    """Of a drawn one."""


@dataclass(frozen=True)
class Area:
    """One file of the set."""

    tests: tuple[str, ...] = ()
    incidents: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    """Globs of the product's files that `draw` changes, "!glob" leaves some out; by default those of its mutants."""
    mutant: tuple[Mutant, ...] = ()


@dataclass(frozen=True)
class Suite:
    """What must see a mutant."""

    tests: tuple[str, ...]
    incidents: tuple[str, ...]


@dataclass(frozen=True)
class Planned:
    """One mutant with its area and what must see it."""

    mutant: Mutant
    area: str
    suite: Suite
    drawn: bool


def read(root: Path) -> tuple[dict[str, Area], list[str]]:
    """The areas by name, `DRAWN` among them, and what is wrong with files that cannot be read."""
    areas: dict[str, Area] = {}
    wrong = []
    for path in sorted((root / FOLDER).glob("*.toml")):
        try:
            areas[path.stem] = schema.build(Area, tomllib.loads(path.read_text()), path.name)
        except (ValueError, TypeError) as error:
            wrong.append(f"{path.name}: {error}")
    return areas, wrong


def plan(areas: dict[str, Area]) -> list[Planned]:
    """Every mutant, by area and suite, so that neighbours share what must pass without them."""
    planned = []
    for name, area in areas.items():
        for mutant in area.mutant:
            its_area = mutant.area or name
            theirs = areas.get(its_area, area)
            suite = Suite(
                theirs.tests if mutant.tests is None else mutant.tests,
                theirs.incidents if mutant.incidents is None else mutant.incidents,
            )
            planned.append(Planned(mutant, its_area, suite, drawn=name == DRAWN))
    return sorted(planned, key=lambda one: (one.area, one.suite.tests, one.suite.incidents, one.mutant.id))


def shard(planned: Sequence[Planned], number: int, count: int) -> list[Planned]:
    """The `number`-th (from 1) of `count` slices, each as long as the others but for one."""
    return list(planned[len(planned) * (number - 1) // count : len(planned) * number // count])


def product_files(root: Path, area: Area) -> list[str]:
    """The Python files that an area is about, from the root."""
    if not area.files:
        return sorted({mutant.file for mutant in area.mutant if mutant.file.endswith(".py")})
    found: set[str] = set()
    for pattern in area.files:
        matching = {path.relative_to(root).as_posix() for path in root.glob(pattern.removeprefix("!"))}
        found = found - matching if pattern.startswith("!") else found | matching
    return sorted(name for name in found if name.endswith(".py"))


def apply(root: Path, mutant: Mutant) -> str:
    """The file's text with the change. ValueError where its old text does not stand there exactly once."""
    path = root / mutant.file
    if not path.is_file():
        raise ValueError(f"there is no file {mutant.file}")
    text = path.read_text()
    if (times := text.count(mutant.old)) != 1:
        raise ValueError(f"its old text must stand exactly once in {mutant.file}; it stands there {times} times")
    return text.replace(mutant.old, mutant.new)


def check(root: Path) -> list[str]:
    """What is wrong with the set, each with the mutant's id; nothing of it is run."""
    areas, wrong = read(root)
    seen: set[str] = set()
    for name, area in areas.items():
        wrong += [f"{name}: {why}" for why in _area_faults(root, name, area)]
        for mutant in area.mutant:
            wrong += [f"{name}: {mutant.id}: {why}" for why in _mutant_faults(root, name, mutant, areas)]
            if mutant.id in seen:
                wrong.append(f"{name}: {mutant.id}: the id is taken")
            seen.add(mutant.id)
    equivalent = sum(mutant.equivalent is not None for area in areas.values() for mutant in area.mutant)
    if equivalent > MOST_EQUIVALENT * len(seen):
        wrong.append(f"{equivalent} of {len(seen)} are called equivalent; at most {MOST_EQUIVALENT:.0%} may be")
    return wrong


def _area_faults(root: Path, name: str, area: Area) -> list[str]:
    faults = _suite_faults(root, Suite(area.tests, area.incidents))
    if name != DRAWN and not (area.tests or area.incidents):
        faults.append("it must name tests or incidents")
    faults += [f"no file is like {glob!r}" for glob in area.files if not any(root.glob(glob.removeprefix("!")))]
    return faults


def _mutant_faults(root: Path, name: str, mutant: Mutant, areas: dict[str, Area]) -> list[str]:
    faults = _suite_faults(root, Suite(mutant.tests or (), mutant.incidents or ()))
    if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", mutant.id):
        faults.append("an id must be lower case words, joined by dashes")
    if (name == DRAWN) != (mutant.area is not None) or (mutant.area or name) not in areas:
        faults.append(f"area must be one of the areas, and stand in {DRAWN}.toml alone; got {mutant.area!r}")
    if not (mutant.why or mutant.operator):
        faults.append("it must say why it matters")
    if mutant.equivalent is not None and not mutant.equivalent.strip():
        faults.append("an equivalent one must have its reason")
    if mutant.file.startswith("tests/"):
        faults.append(f"it must change the product; {mutant.file} is a test")
    try:
        changed = apply(root, replace(mutant))
        if mutant.old == mutant.new:
            faults.append("its old and its new text are the same")
        if mutant.file.endswith(".py"):
            compile(changed, mutant.file, "exec", dont_inherit=True)
    except SyntaxError as error:
        faults.append(f"with it {mutant.file} is no Python: {error}")
    except ValueError as error:
        faults.append(str(error))
    return faults


def _suite_faults(root: Path, suite: Suite) -> list[str]:
    faults = [f"there is no incident {incident!r}" for incident in suite.incidents if incident not in listing.IDS]
    arguments = iter(suite.tests)
    for argument in arguments:
        if argument in _VALUE_FOLLOWS:
            next(arguments, None)
        elif not argument.startswith("-") and not _test_exists(root, argument):
            faults.append(f"there is no test {argument!r}")
    return faults


def _test_exists(root: Path, argument: str) -> bool:
    """Whether the file or folder is there, and the names after "::" are defined in it."""
    path, *names = argument.partition("[")[0].split("::")
    if not (root / path).exists():
        return False
    text = (root / path).read_text() if names else ""
    return all(re.search(rf"(?m)^\s*(?:async def|def|class) {re.escape(name)}\b", text) for name in names)
