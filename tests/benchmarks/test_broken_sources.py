"""A working tree whose nsa/ cannot be imported: one line that names the side, the file and the line."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import broken_sources
from harness import repository


def test_compare_names_the_side_the_file_and_the_line(tmp_path: Path) -> None:
    for package in ("benchmarks", "harness", "nsa"):
        shutil.copytree(repository.ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "nsa" / "attention.py").write_text("x = 1\ndef nsa_attention(:\n")
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", "compare", "HEAD"],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(tmp_path)}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert "nsa/ of the working tree (HEAD of a comparison that names BASE alone) cannot be imported" in line
    assert line.endswith("nsa/attention.py, line 2: SyntaxError: invalid syntax")


def run(source: str, where: str) -> None:
    with broken_sources.named():
        exec(compile(source, str(repository.ROOT / where), "exec"), {})


def test_any_error_out_of_nsa_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run("\n\nx = not_there", "nsa/layer.py")
    assert ended.value.code == 1
    assert "nsa/layer.py, line 3: NameError: name 'not_there' is not defined" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("source", "where", "error"),
    [("import not_installed", "nsa/layer.py", ModuleNotFoundError), ("not_there", "benchmarks/runner.py", NameError)],
)
def test_what_is_not_the_fault_of_nsa_goes_on_as_it_is(source: str, where: str, error: type[Exception]) -> None:
    with pytest.raises(error):
        run(source, where)
