"""What an installed package is held to, and what the archives are made of; `nox -s package` does it for real."""

from __future__ import annotations

import sys
from importlib import metadata
from pathlib import Path

import pytest

import nsa
from distribution import archives, installed
from harness.repository import ROOT


def test_the_installed_package_is_told_from_the_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "prefix", "/elsewhere")
    assert "nsa is not the installed one but" in str(installed.problem())
    monkeypatch.setattr(sys, "prefix", str(ROOT))
    monkeypatch.setattr(metadata, "version", lambda name: {"nsa-trusted": nsa.__version__}[name])
    assert installed.problem() is None
    monkeypatch.setattr(metadata, "version", lambda name: "9.9.9")
    assert "that of the archive 9.9.9" in str(installed.problem())


def test_a_data_file_that_is_wanting_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installed, "DATA", (*installed.DATA, ("nsa.train", "profiles/gone.yaml")))
    assert installed.missing() == ["nsa.train/profiles/gone.yaml"]


def test_a_module_of_the_package_that_is_wanting_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "sample"
    (package / "integrations").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "integrations" / "__init__.py").write_text("")
    (package / "integrations" / "other.py").write_text("import no_such_package\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(installed, "OPTIONAL", ("sample.integrations.",))
    assert installed.modules("sample") == ["sample.integrations"]
    (package / "integrations" / "other.py").write_text("import sample.gone\n")
    with pytest.raises(ModuleNotFoundError, match=r"sample\.gone"):
        installed.modules("sample")


def test_archives_are_made_of_the_package_alone(tmp_path: Path) -> None:
    archives.copy_sources(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(archives.SOURCES)
    copied = {path.relative_to(tmp_path / "nsa") for path in (tmp_path / "nsa").rglob("*") if path.is_file()}
    assert not [path for path in copied if path.suffix == ".pyc"]
    there = {path.relative_to(ROOT / "nsa") for path in (ROOT / "nsa").rglob("*.py")}
    assert {path for path in copied if path.suffix == ".py"} == there


def test_a_folder_that_holds_something_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine").write_text("x")
    with pytest.raises(SystemExit, match="2"):
        archives.main([str(tmp_path), "--torch-from", sys.executable])
    assert "is there and not empty" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_a_check_that_fails_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An interpreter that ends with 3 stands in for every program."""
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\necho what went wrong\nexit 3\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    assert archives.main([str(tmp_path / "out"), "--torch-from", str(program)]) == 1
    told = capsys.readouterr().err
    assert "what went wrong" in told
    assert f"failed: {program} -m build" in told
