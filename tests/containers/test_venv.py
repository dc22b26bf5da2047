"""The environment of the sessions: what is there is not installed again, what changed is."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from containers import venv


class Commands:
    """Makes what `virtualenv` would, and keeps what pip was asked to install."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.made = 0
        self.installed: list[str] = []

    def __call__(self, command: Sequence[str]) -> None:
        if "virtualenv" in command:
            self.made += 1
            (self.folder / "bin").mkdir(parents=True, exist_ok=True)
            (self.folder / "bin" / "python").touch()
        else:
            assert command[0] == str(self.folder / "bin" / "python")
            assert command[command.index("-c") + 1] == "constraints.txt"
            self.installed.append(command[-1])


@pytest.fixture
def commands(tmp_path: Path) -> Commands:
    return Commands(tmp_path / "suites")


def ready(commands: Commands, *extras: str) -> Path:
    return venv.ready(extras, commands, commands.folder)


def test_a_second_call_installs_nothing(commands: Commands) -> None:
    assert ready(commands, "bench") == ready(commands, "bench") == commands.folder / "bin" / "python"
    assert (commands.made, commands.installed) == (1, [".[bench]"])


def test_what_is_missing_is_added_to_what_is_there(commands: Commands) -> None:
    for extras in (["bench"], ["train", "dev"], ["bench"], ["train"]):
        ready(commands, *extras)
    assert (commands.made, commands.installed) == (1, [".[bench]", ".[bench,dev,train]"])


@pytest.mark.parametrize("name", ["constraints.txt", "pyproject.toml"])
def test_another_version_is_installed(
    name: str, commands: Commands, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(venv, "ROOT", tmp_path)
    for file in ("constraints.txt", "pyproject.toml"):
        (tmp_path / file).write_text("torch==2.13.0")
    ready(commands, "bench", "train")
    (tmp_path / name).write_text("torch==2.14.0")
    ready(commands, "bench")
    ready(commands, "bench")
    assert (commands.made, commands.installed) == (1, [".[bench,train]"] * 2)


def test_another_python_makes_a_new_one(commands: Commands, monkeypatch: pytest.MonkeyPatch) -> None:
    ready(commands, "bench", "train")
    monkeypatch.setattr(sys, "version", "3.99.0")
    ready(commands, "bench")
    assert (commands.made, commands.installed) == (2, [".[bench,train]", ".[bench]"])


def test_an_install_that_failed_is_done_again(commands: Commands) -> None:
    def fails(command: Sequence[str]) -> None:
        commands(command)
        if "pip" in command:
            raise subprocess.CalledProcessError(1, list(command))

    ready(commands, "bench")
    with pytest.raises(subprocess.CalledProcessError):
        venv.ready(["train"], fails, commands.folder)
    ready(commands, "bench")
    assert commands.installed[-1] == ".[bench]"
    assert len(commands.installed) == 3


def test_the_programs_of_the_environment_come_first(tmp_path: Path) -> None:
    path = venv.variables(tmp_path / "bin" / "python")["PATH"]
    assert path.startswith(f"{tmp_path / 'bin'}:")


def test_what_python_compiles_is_kept_in_the_environment(tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text("")
    told = {"PYTHONDONTWRITEBYTECODE": "1", **venv.variables(tmp_path / "suites" / "bin" / "python")}
    subprocess.run([sys.executable, "-c", "import module"], cwd=tmp_path, env={**os.environ, **told}, check=True)
    kept = [path for path in tmp_path.rglob("*.pyc") if path.name.startswith("module.")]
    assert [path.is_relative_to(tmp_path / "suites" / "bytecode") for path in kept] == [True]
