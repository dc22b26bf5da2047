"""What is drawn changes behaviour, can be applied, and is the same for the same seed. Runs where cosmic-ray is."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

pytest.importorskip("cosmic_ray", reason="cosmic-ray is installed by `nox -s mutants -- draw` alone")

from tests.mutants import draw, standing

PRODUCT = '''
"""× 1 + 1."""
__all__ = ["x"][0 + 1 :]
WAIT_S = 30.0


@cache(size=1)
def spoken(n: int | None, rows: list[1 + 1] = ()) -> 3 - 2:
    """1 + 1"""
    × = f"{n + 1}"
    if n < 0:
        raise ValueError("n" + str(n - 1))
    print(n + 2)
    time.sleep(0.1)
    assert n, 1 + 1


def changed(n, rows):
    """1 + 1"""
    for row in rows:
        if row == 3 and not n:
            break
        n = n - row
    for row in rows:
        if row == 3 and not n:
            break
        n = n - row
    while True:
        return -n
'''.replace("×", "ü")
FIRST_CHANGED = PRODUCT[: PRODUCT.index("def changed")].count("\n") + 1
AREAS = 'tests = ["tests/test_product.py"]\nfiles = ["*.py"]\n'


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Two areas over one file."""
    (tmp_path / standing.FOLDER).mkdir(parents=True)
    (tmp_path / "product.py").write_text(PRODUCT)
    (tmp_path / "tests" / "test_product.py").write_text("")
    for area in ("one", "two"):
        (tmp_path / standing.FOLDER / f"{area}.toml").write_text(AREAS)
    return tmp_path


def test_every_mutant_that_is_drawn_is_what_it_says(project: Path) -> None:
    draw.write(project, 20, 0)
    assert standing.check(project) == []
    planned = standing.plan(standing.read(project)[0])
    assert len(planned) == 20
    assert {one.area for one in planned} == {"one", "two"}
    assert all(one.drawn and one.mutant.operator for one in planned)
    whole = ast.dump(ast.parse(PRODUCT))
    assert all(ast.dump(ast.parse(standing.apply(project, one.mutant))) != whole for one in planned)


def test_the_seed_says_what_is_drawn(project: Path) -> None:
    first, again, other = (draw.drawn(project, 8, seed) for seed in (1, 1, 2))
    assert first == again != other


def test_what_speaks_or_waits_is_left_alone() -> None:
    lines = PRODUCT.split("\n")
    kept = {lines[begin[0] - 1].strip() for begin, _ in draw.places(PRODUCT) if begin[0] < FIRST_CHANGED}
    assert kept == {"if n < 0:", "assert n, 1 + 1"}


def test_each_kind_of_change_can_be_drawn() -> None:
    kinds = {name.partition("_")[0] for found in draw.places(PRODUCT).values() for name, _ in found}
    assert kinds == {
        "ReplaceComparisonOperator", "ReplaceBinaryOperator", "ReplaceUnaryOperator", "AddNot", "ReplaceTrueWithFalse",
        "ReplaceAndWithOr", "ReplaceBreakWithContinue", "NumberReplacer", "ReturnNone",
    }  # fmt: skip


@pytest.mark.parametrize("line", [3, 8])
def test_an_excerpt_stands_once(line: int) -> None:
    source = "".join(f"{word}\n" for word in ["a", "b", "c", "a", "x", "b", "c", "a", "y", "b"])
    lines = source.splitlines(keepends=True)
    lines[line] = "z\n"
    old, new = draw.excerpt(source, "".join(lines))
    assert source.count(old) == 1
    assert source.replace(old, new) == "".join(lines)


def test_too_many_are_refused_and_so_is_a_second_draw(project: Path) -> None:
    with pytest.raises(ValueError, match="--count: the areas' files give"):
        draw.write(project, 500, 0)
    draw.write(project, 2, 0)
    with pytest.raises(ValueError, match="remove it to draw others"):
        draw.write(project, 2, 0)
