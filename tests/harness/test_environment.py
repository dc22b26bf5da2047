"""Each variable has its effect, a misspelt one is refused by every command, and CONTRIBUTING.md names them all."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

from containers import __main__ as containers
from harness import environment, fingerprint
from harness.environment import Environment
from harness.repository import ROOT
from nsa.train import profile
from regression import __main__ as regression

COMMANDS = {
    "benchmarks": ["report"],
    "regression": ["list"],
    "containers": ["preflight", "--engine", "none"],
    "tests.mutants": ["check"],
}


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in environment.NAMES:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("package", COMMANDS)
def test_a_misspelt_variable_is_refused_with_the_nearest_name(
    package: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NSA_RESULT", "elsewhere")
    assert importlib.import_module(f"{package}.__main__").main(COMMANDS[package]) == 2
    said = capsys.readouterr()
    assert said.err == f"python -m {package}: unknown environment variable NSA_RESULT; did you mean NSA_RESULTS?\n"
    assert said.out == ""


def test_a_command_ends_with_code_2(tmp_path: Path) -> None:
    variables = {"NSA_RESULTS": str(tmp_path), "NSA_FAMILIES": "a100"}
    command = [sys.executable, "-m", "containers", "preflight"]
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.endswith("NSA_FAMILIES; did you mean NSA_FAMILY?\n")


def test_what_is_near_to_no_name_is_told_all_of_them() -> None:
    with pytest.raises(ValueError, match=r"NSA_QQQQQQQQQ; known: NSA_RESULTS, .*NSA_MEMORY_GB, NSA_TB_DISABLE"):
        environment.check({"NSA_QQQQQQQQQ": "1"})


def test_what_others_set_is_theirs() -> None:
    environment.check({"HOME": "/", "HARNESS_SCRATCH": "/tmp", "nsa_results": "x"})


def test_training_and_the_suites_know_each_other_s_variables() -> None:
    """A shell may have either while it starts the other."""
    own = {name for name in (*profile.SWITCHES, *profile.RETIRED_VARIABLES) if name.startswith("NSA_")}
    assert set(environment.OF_TRAINING) == own
    environment.check(dict.fromkeys(own, "1"))
    profile.read_environment(dict.fromkeys(environment.NAMES, "1"))


def test_without_variables_or_with_empty_ones_it_is_the_default() -> None:
    assert environment.read({}) == environment.read(dict.fromkeys(environment.NAMES, "")) == Environment()
    assert Environment().results == ROOT / "results"


def test_every_variable_is_a_field() -> None:
    texts = {name: "1" if name == "NSA_DIRTY" else name.lower() for name in environment.NAMES}
    read = environment.read(texts)
    for name, text in texts.items():
        found = getattr(read, name.removeprefix(environment.PREFIX).lower())
        assert found is True if name == "NSA_DIRTY" else str(found) == text


def test_results_are_where_the_variable_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("NSA_RESULTS", str(tmp_path))
    assert regression.parser().parse_args(["run"]).out == tmp_path
    assert containers.parser().parse_args(["run", "true"]).results == tmp_path
    script = "from benchmarks.__main__ import parser; print(parser().parse_args(['report']).out)"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(tmp_path)


def test_an_image_is_built_as_the_variables_say(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """NSA_ENGINE, NSA_FAMILY and NSA_EXPECT have their tests in tests/containers."""
    monkeypatch.setenv("NSA_BASE_IMAGE", "debian@sha256:0")
    monkeypatch.setenv("NSA_WHEELS", str(tmp_path))
    arguments = containers.parser().parse_args(["image"])
    assert (arguments.base_image, arguments.wheels) == ("debian@sha256:0", tmp_path)


def test_a_fingerprint_names_the_image_the_commit_and_whether_it_was_dirty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NSA_IMAGE", "sha256:0123")
    monkeypatch.setenv("NSA_COMMIT", "c" * 40)
    for text, dirty in (("0", False), ("1", True), ("", None)):
        monkeypatch.setenv("NSA_DIRTY", text)
        taken = fingerprint.take("cpu", "cpu")
        assert (taken.image, taken.commit, taken.dirty) == ("sha256:0123", "c" * 40, dirty)


def test_no_other_module_of_the_suites_reads_one() -> None:
    reads = re.compile(r"""(environ|getenv)[^\n]*["']NSA_""")
    folders = ("harness", "benchmarks", "regression", "containers", "docker")
    files = [ROOT / "noxfile.py", *(path for folder in folders for path in (ROOT / folder).rglob("*.py"))]
    assert [path.name for path in files if reads.search(path.read_text())] == []


def test_contributing_has_a_row_for_each() -> None:
    rows = re.findall(r"(?m)^\| `(NSA_[A-Z_]+)` \|", (ROOT / "CONTRIBUTING.md").read_text())
    assert rows == list(environment.NAMES)
