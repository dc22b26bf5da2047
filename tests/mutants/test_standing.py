"""The standing set is what it says; a fault in it is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.repository import ROOT
from tests.mutants import standing
from tests.mutants.__main__ import main

AREA = """
tests = ["tests/test_product.py"]

[[mutant]]
id = "one-less"
file = "product.py"
old = '''return a + b'''
new = '''return a + b - 1'''
why = "w"
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """One function, its test, one mutant."""
    (tmp_path / standing.FOLDER).mkdir(parents=True)
    (tmp_path / "product.py").write_text("def add(a, b):\n    return a + b\n")
    (tmp_path / "tests" / "test_product.py").write_text("def test_add():\n    pass\n")
    (tmp_path / standing.FOLDER / "sums.toml").write_text(AREA)
    return tmp_path


def test_every_mutant_of_the_project_is_what_it_says() -> None:
    assert standing.check(ROOT) == []


def test_the_command_says_so(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--root", str(project), "check"]) == 0
    assert capsys.readouterr().out == "1 mutants of 1 areas are what they say\n"
    (project / "product.py").unlink()
    assert main(["--root", str(project), "check"]) == 1
    assert "sums: one-less: there is no file product.py" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("tests = [", "tests = ", "sums.toml: "),
        ('id = "one-less"', "id = 3", "sums.toml.mutant[0].id must be str"),
        ('why = "w"', 'why = "w"\nreason = "r"', "has no field 'reason'"),
        ("one-less", "One less", "an id must be lower case"),
        ('why = "w"', "", "it must say why"),
        ("return a + b'''\nnew", "return a - b'''\nnew", "it stands there 0 times"),
        ("old = '''return a + b", "old = '''a", "it stands there 3 times"),
        ("a + b - 1", "a + b", "are the same"),
        ("a + b - 1", "a +", "is no Python"),
        ('"product.py"', '"tests/test_product.py"', "tests/test_product.py is a test"),
        ("tests/test_product.py", "tests/test_products.py", "there is no test 'tests/test_products.py'"),
        (
            "tests/test_product.py",
            "tests/test_product.py::test_ad",
            "there is no test 'tests/test_product.py::test_ad'",
        ),
        ('tests = ["tests/test_product.py"]', "", "must name tests or incidents"),
        ('tests = ["tests/', 'incidents = ["no-such"]\ntests = ["tests/', "there is no incident 'no-such'"),
        ('tests = ["tests/', 'files = ["nothing/*.py"]\ntests = ["tests/', "no file is like 'nothing/*.py'"),
        ('why = "w"', 'why = "w"\nequivalent = ""', "must have its reason"),
        ('why = "w"', 'why = "w"\nequivalent = "r"', "1 of 1 are called equivalent"),
        ('why = "w"', 'why = "w"\narea = "sums"', "area must be one of the areas"),
        ("[[mutant]]", AREA.partition("\n\n")[2] + "\n[[mutant]]", "the id is taken"),
    ],
)
def test_a_fault_in_the_set_is_named(project: Path, old: str, new: str, says: str) -> None:
    assert standing.check(project) == []
    assert old in AREA
    (project / standing.FOLDER / "sums.toml").write_text(AREA.replace(old, new, 1))
    assert says in "\n".join(standing.check(project))


def test_tests_may_be_chosen_by_name_and_options(project: Path) -> None:
    file = project / standing.FOLDER / "sums.toml"
    file.write_text(AREA.replace('test_product.py"', 'test_product.py::test_add[1]", "-k", "no path"'))
    assert standing.check(project) == []


def test_a_drawn_mutant_is_seen_by_the_tests_of_its_area(project: Path) -> None:
    drawn = AREA.partition("\n\n")[2].replace("one-less", "drawn-1").replace("why", 'area = "sums"\noperator')
    (project / standing.FOLDER / f"{standing.DRAWN}.toml").write_text(drawn)
    assert standing.check(project) == []
    planned = standing.plan(standing.read(project)[0])
    assert [(one.mutant.id, one.area, one.drawn) for one in planned] == [
        ("drawn-1", "sums", True),
        ("one-less", "sums", False),
    ]
    assert {one.suite.tests for one in planned} == {("tests/test_product.py",)}


@pytest.mark.parametrize("count", [1, 2, 3, 7, 20])
def test_shards_hold_each_mutant_once(count: int) -> None:
    mutants = [standing.Mutant(str(i), "f", "o", "n") for i in range(17)]
    planned = [standing.Planned(mutant, "a", standing.Suite((), ()), False) for mutant in mutants]
    shards = [standing.shard(planned, number, count) for number in range(1, count + 1)]
    assert [one for part in shards for one in part] == planned
    assert max(map(len, shards)) - min(map(len, shards)) <= 1


def test_files_of_an_area_are_its_globs_or_those_of_its_mutants(project: Path) -> None:
    (project / "other.py").write_text("")
    (area,) = standing.read(project)[0].values()
    assert standing.product_files(project, area) == ["product.py"]
    wide = standing.Area(files=("*.py", "!product.py"))
    assert standing.product_files(project, wide) == ["other.py"]
