"""The contracts of pyproject.toml on imports are kept, and an import against one of them is seen."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from harness.repository import ROOT

pytest.importorskip("importlinter")
PACKAGES = ("nsa", "harness", "benchmarks", "regression", "containers", "distribution")
LINT = "from importlinter.cli import lint_imports_command; lint_imports_command()"


def lint(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", LINT, "--no-cache"]
    return subprocess.run(command, cwd=folder, env={"PYTHONPATH": str(folder)}, capture_output=True, text=True)


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("copy")
    for package in PACKAGES:
        shutil.copytree(ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder


def test_the_contracts_are_kept(copy: Path) -> None:
    done = lint(copy)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("path", "line", "seen"),
    [
        ("nsa/loss.py", "from harness import machines", "nsa.loss -> harness.machines"),
        ("harness/schema.py", "from benchmarks import console", "harness.schema -> benchmarks.console"),
        ("benchmarks/console.py", "from regression import contract", "benchmarks.console -> regression.contract"),
        ("regression/runner.py", "from benchmarks import console", "regression.runner -> benchmarks.console"),
        ("benchmarks/console.py", "from containers import host", "benchmarks.console -> containers.host"),
        ("nsa/kv.py", "def late() -> None:\n    from nsa import geometry", "nsa.kv -> nsa.geometry"),
        ("nsa/geometry.py", "def late() -> None:\n    from nsa import layer", "No cycles are allowed in nsa"),
        ("benchmarks/cases/key.py", "from benchmarks import runner", "No cycles are allowed in benchmarks"),
        ("nsa/paged/store.py", "from nsa.triton_backend import decode", "nsa.paged.store -> nsa.triton_backend.decode"),
    ],
)
def test_an_import_against_a_contract_is_seen(copy: Path, path: str, line: str, seen: str) -> None:
    """Also one that a function hides."""
    before = (copy / path).read_text()
    (copy / path).write_text(f"{before}\n{line}\n")
    try:
        done = lint(copy)
    finally:
        (copy / path).write_text(before)
    assert done.returncode == 1
    assert seen in done.stdout


def test_importing_what_a_call_needs_leaves_the_compiler_out() -> None:
    """torch._dynamo takes as long to import as the rest, and each child of the suites would wait for it."""
    modules = "nsa.triton_backend, nsa.train, nsa.parallel, benchmarks.ab.worker, benchmarks.commands.run"
    script = f"import sys, {modules}; print('torch._dynamo' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False"]
