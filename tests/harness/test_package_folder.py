"""A child whose path begins with an older nsa/ gets nothing of the one that is installed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from harness.isolate import Child
from harness.repository import ROOT

EDITABLE = """
import sys
from importlib.machinery import PathFinder


class Editable:
    @staticmethod
    def find_spec(name, path=None, target=None):
        return PathFinder.find_spec(name, [{package!r}]) if name.startswith("nsa.") else None


sys.meta_path.append(Editable)
"""
"""As setuptools' finder of an editable installation, which is asked last."""


ASKS = """
import importlib, json, sys

print(importlib.import_module(json.loads(sys.argv[1])["module"]).__file__)
"""


@pytest.fixture
def older(tmp_path: Path) -> Path:
    """A folder with an nsa/ that has one module, beside an installed one that has two."""
    for folder, modules in {"older": ["both"], "installed": ["both", "newer"]}.items():
        (tmp_path / folder / "nsa").mkdir(parents=True)
        for module in ["__init__", *modules]:
            (tmp_path / folder / "nsa" / f"{module}.py").touch()
    installed = str(tmp_path / "installed" / "nsa")
    (tmp_path / "older" / "sitecustomize.py").write_text(EDITABLE.format(package=installed))
    (tmp_path / "older" / "asks.py").write_text(ASKS)
    return tmp_path / "older"


def imported(module: str, folder: Path) -> tuple[int, str]:
    """Exit status and last line of a child that imports a module with `folder` first on its path."""
    path = os.pathsep.join(map(str, (folder, ROOT)))
    with Child("asks", {"module": module}, {"PYTHONPATH": path}, cwd=folder) as child:
        return child.wait(60.0), child.log_tail().splitlines()[-1]


def test_what_an_older_package_lacks_is_not_taken_from_the_installed_one(older: Path) -> None:
    assert imported("nsa.newer", older) == (1, "ModuleNotFoundError: No module named 'nsa.newer'")


def test_what_it_has_is_its_own(older: Path) -> None:
    assert imported("nsa.both", older) == (0, str(older / "nsa" / "both.py"))
