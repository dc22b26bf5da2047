"""An image is its content: what changes it gives it another name, and what does not leaves it where it is."""

from __future__ import annotations

import dataclasses
import re
import shutil
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
    assert repository.ROOT / "results" / "calibration" / "cpu.json" in image.sources()  # by a pattern


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


REGISTRY = "ghcr.io/owner/name"
A100 = dataclasses.replace(PLAIN, family="a100")


def test_packages_are_named_by_what_decides_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Locks, arguments and the Dockerfile down to the last stage; not the commit, whose sources come on top."""
    docker = tmp_path / "docker"
    shutil.copytree(image.DOCKERFILE.parent, docker)
    monkeypatch.setattr(image, "DOCKERFILE", docker / "Dockerfile")
    name = A100.packages_name(REGISTRY)
    assert re.fullmatch(r"ghcr\.io/owner/name/packages:a100-[0-9a-f]{12}", name)
    assert dataclasses.replace(A100, commit="abd", dirty=True).packages_name(REGISTRY) == name
    assert dataclasses.replace(A100, base_image="x").packages_name(REGISTRY) != name
    dockerfile = (docker / "Dockerfile").read_text()
    (docker / "Dockerfile").write_text(f"{dockerfile}# more\n")
    assert A100.packages_name(REGISTRY) == name
    (docker / "Dockerfile").write_text(f"# more\n{dockerfile}")
    assert A100.packages_name(REGISTRY) != name
    (docker / "Dockerfile").write_text(dockerfile)
    (docker / "lock" / "flash-attn.txt").write_text("flash-attn==0\n")
    assert A100.packages_name(REGISTRY) != name


def test_published_packages_are_pulled_and_not_built(engine_asked: Path) -> None:
    assert main(["image", "--family", "a100", "--registry", REGISTRY]) == 0
    pulled, built = engine_asked.read_text().splitlines()[-3:-1]
    name = image.recipe("a100").packages_name(REGISTRY)
    assert pulled == f"pull {name}"
    assert f"--build-arg MACHINE_IMAGE={name}" in built


def test_packages_that_nobody_published_are_built(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, engine_asked: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    refuses = '"pull "*) echo "manifest unknown" >&2; exit 1 ;;\n    "run "*)'
    fake_host.program(monkeypatch, tmp_path, "docker", fake_host.ENGINE.replace('"run "*)', refuses))
    assert main(["image", "--family", "a100", "--registry", REGISTRY]) == 0
    assert "so its packages are built here (manifest unknown)" in capsys.readouterr().out
    (built,) = [line for line in engine_asked.read_text().splitlines() if line.startswith("build ")]
    assert "--build-arg MACHINE_IMAGE=machine-gpu " in built


def test_wheels_of_the_host_come_before_published_packages(engine_asked: Path, tmp_path: Path) -> None:
    assert main(["image", "--family", "a100", "--registry", REGISTRY, "--wheels", str(tmp_path)]) == 0
    assert "pull " not in engine_asked.read_text()


@pytest.mark.parametrize(("family", "stage"), [("a100", "machine-gpu"), ("cpu", "machine-cpu")])
def test_what_is_published_is_the_stage_under_the_image(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, engine_asked: Path, family: str, stage: str
) -> None:
    unknown = fake_host.ENGINE.replace('"run "*)', '"manifest inspect") exit 1 ;;\n    "run "*)')
    fake_host.program(monkeypatch, tmp_path, "docker", unknown)
    assert main(["publish", "--family", family, "--registry", REGISTRY]) == 0
    name = image.recipe(family).packages_name(REGISTRY)
    built, pushed = engine_asked.read_text().splitlines()[-2:]
    assert f"--tag {name}" in built
    assert f"--target {stage} " in built
    assert re.search(rf"(?m)^FROM \S+ AS {stage}$", image.DOCKERFILE.read_text())
    assert pushed == f"push {name}"


def test_what_is_published_is_not_built_again(engine_asked: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["publish", "--family", "a100", "--registry", REGISTRY]) == 0
    assert "is published" in capsys.readouterr().out
    assert "build " not in engine_asked.read_text()


def test_flash_attn_is_compiled_as_memory_and_cores_allow(monkeypatch: pytest.MonkeyPatch, engine_asked: Path) -> None:
    monkeypatch.setattr(image.os, "cpu_count", lambda: 4)
    monkeypatch.setattr(image.os, "sysconf", {"SC_PHYS_PAGES": 4_200_000, "SC_PAGE_SIZE": 4096}.__getitem__)
    assert main(["image", "--family", "a100"]) == 0
    assert "--build-arg MAX_JOBS=2 " in engine_asked.read_text()  # 17 GB


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
