"""An image is its content: what changes it gives it another name, and what does not leaves it where it is."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from containers import image
from containers.__main__ import main
from containers.image import Recipe
from harness import repository
from tests.containers import fake_host

PLAIN = Recipe("cpu", None, None, "abc", False)


@pytest.fixture
def engine_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    for name in ("NSA_ENGINE", "NSA_BASE_IMAGE", "NSA_WHEELS"):
        monkeypatch.delenv(name, raising=False)
    return fake_host.program(monkeypatch, tmp_path, "docker", fake_host.ENGINE)


@pytest.mark.parametrize("change", [{"family": "a100"}, {"base_image": "x"}, {"commit": "abd"}, {"dirty": True}])
def test_another_recipe_is_another_image(change: dict[str, object]) -> None:
    assert dataclasses.replace(PLAIN, **change).name() != PLAIN.name()  # type: ignore[arg-type]


def test_another_source_is_another_image(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = 1\n")
    monkeypatch.setattr(repository, "ROOT", tmp_path)
    monkeypatch.setattr(image, "sources", lambda: [tmp_path / "a.py"])
    before = PLAIN.name()
    assert PLAIN.name() == before
    (tmp_path / "a.py").write_text("x = 2\n")
    assert PLAIN.name() != before


def test_sources_are_what_the_dockerignore_lets_in() -> None:
    found = {path.relative_to(repository.ROOT).parts[0] for path in image.sources()}
    assert {"nsa", "harness", "benchmarks", "regression", "tests", "containers", "docker", "noxfile.py"} <= found
    assert not {".git", ".nox"} & found
    assert not [path for path in image.sources() if path.is_relative_to(repository.ROOT / "results" / "runs")]


def test_pytorchs_cpu_build_is_taken_where_it_lies(tmp_path: Path) -> None:
    assert PLAIN.cpu_lock == "cuda"
    (tmp_path / "torch-2.13.0+cpu-cp311-cp311-linux_x86_64.whl").touch()
    assert dataclasses.replace(PLAIN, wheels=tmp_path).cpu_lock == "cpu"


def test_what_is_there_is_not_built_again(engine_asked: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["image", "--family", "a100"]) == 0
    assert main(["image", "--family", "a100"]) == 0
    builds = [line for line in engine_asked.read_text().splitlines() if line.startswith("build ")]
    assert len(builds) == 1
    assert "--build-arg FAMILY=a100" in builds[0]
    assert "is there" in capsys.readouterr().out


def test_a_build_that_fails_is_no_image(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_host.program(
        monkeypatch, tmp_path, "docker", fake_host.ENGINE.replace('"build "*)', '"build "*) exit 1 ;; "x"*)')
    )
    assert main(["image", "--family", "cpu", "--engine", "docker"]) == 2
    assert "docker could not build nsa:cpu-" in capsys.readouterr().err


def test_wheels_must_be_a_folder(engine_asked: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["image", "--family", "cpu", "--wheels", "/nowhere"]) == 2
    assert "--wheels must be a folder; got /nowhere" in capsys.readouterr().err


def test_every_package_is_locked_with_a_hash() -> None:
    for lock in sorted((image.DOCKERFILE.parent / "lock").glob("*.txt")):
        for block in re.split(r"(?m)^(?=[a-zA-Z0-9])", lock.read_text())[1:]:
            assert "--hash=sha256:" in block, f"{lock.name}: {block.splitlines()[0]}"


def test_the_locks_follow_the_constraints() -> None:
    constraints = (repository.ROOT / "constraints.txt").read_text()
    pins = dict(re.findall(r"(?m)^([a-z0-9-]+)==([^\s;]+)(?!.*python_version < )", constraints))
    for lock in ("cpu", "cuda", "hopper"):
        text = (image.DOCKERFILE.parent / "lock" / f"{lock}.txt").read_text()
        for name, version in re.findall(r"(?m)^([a-z0-9-]+)==([^\s;]+)", text):
            assert pins.get(name, version) == version, f"{lock}.txt: run `nox -s lock`"
