"""Images by their content: what is in one decides its name, so that an image that is there need not be built."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from containers.engine import Engine, EngineError
from containers.host import CPU
from harness import machines, repository
from harness.machines import Family

DOCKERFILE = repository.ROOT / "docker" / "Dockerfile"


@dataclass(frozen=True)
class Recipe:
    """All that decides what an image holds."""

    family: str
    base_image: str | None
    """In place of the Dockerfile's own; NSA_BASE_IMAGE."""
    wheels: Path | None
    """A folder of wheels that pip may take; NSA_WHEELS."""
    commit: str | None
    dirty: bool | None

    @property
    def cpu_lock(self) -> str:
        """Without PyTorch's CPU build among the wheels its CUDA build is installed, which runs on a CPU too."""
        return "cpu" if self.wheels is not None and list(self.wheels.glob("torch-*+cpu-*.whl")) else "cuda"

    def build_arguments(self) -> dict[str, str]:
        """What the Dockerfile is told."""
        arguments = {"FAMILY": self.family}
        if self.family == CPU:
            arguments["CPU_LOCK"] = self.cpu_lock
        else:
            arguments |= gpu_arguments(machines.families()[self.family])
        if self.base_image is not None:
            arguments["BASE_IMAGE"] = self.base_image
        arguments["COMMIT"] = self.commit or ""
        arguments["DIRTY"] = "" if self.dirty is None else str(int(self.dirty))
        return arguments

    def name(self) -> str:
        """nsa:<family>-<hash of the sources, the arguments, and the wheels' names, sizes and times>."""
        digest = hashlib.sha256()
        for path in sources():
            digest.update(f"{path.relative_to(repository.ROOT).as_posix()}\0{path.stat().st_size}\0".encode())
            digest.update(path.read_bytes())
        digest.update(repr(sorted(self.build_arguments().items())).encode())
        for path in sorted(self.wheels.glob("*.whl")) if self.wheels else ():
            digest.update(repr((path.name, path.stat().st_size, path.stat().st_mtime_ns)).encode())
        return f"nsa:{self.family}-{digest.hexdigest()[:12]}"


def gpu_arguments(family: Family) -> dict[str, str]:
    """What the Dockerfile is told of a GPU. Raises ValueError for a family without an image."""
    if family.image is None:
        raise ValueError(f"{family.title} has no `image` in {machines.TABLE.name}")
    return {
        "MACHINE": "gpu",
        "PACKAGES": family.image.packages,
        "FLASH_ATTN_SM": str(family.image.flash_attn_sm),
        "TORCH_CUDA_ARCH_LIST": ".".join(map(str, family.compute_capability)),
    }


def recipe(family: str, base_image: str | None = None, wheels: Path | None = None) -> Recipe:
    """The recipe of the working tree. Raises ValueError for a folder of wheels that is none."""
    if wheels is not None and not wheels.is_dir():
        raise ValueError(f"--wheels must be a folder; got {wheels}")
    return Recipe(family, base_image, wheels, repository.commit(), repository.dirty())


def sources() -> Iterator[Path]:
    """Every file that .dockerignore lets in, in one order."""
    kept = [line[1:] for line in (repository.ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    for name in sorted(kept):
        top = repository.ROOT / name
        for path in [top] if top.is_file() else sorted(top.rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                yield path


def cuda_version() -> str:
    """The CUDA that the GPU images bring: `ARG CUDA_VERSION` of the Dockerfile."""
    found = re.search(r"(?m)^ARG CUDA_VERSION=(\S+)$", DOCKERFILE.read_text())
    assert found is not None, "docker/Dockerfile must say ARG CUDA_VERSION=..."
    return found[1]


def identity(engine: Engine, name: str) -> str | None:
    """The id of an image that is there, sha256:..., else None."""
    done = subprocess.run(
        [engine.name, "image", "inspect", "--format", "{{.Id}}", name], capture_output=True, text=True
    )
    return done.stdout.strip() if done.returncode == 0 else None


def build(engine: Engine, wanted: Recipe) -> str:
    """Build what is not there yet; return its name. Raises EngineError."""
    name = wanted.name()
    if identity(engine, name) is not None:
        print(f"image: {name} is there", flush=True)
        return name
    print(f"image: building {name}", flush=True)
    if wanted.family == CPU and wanted.cpu_lock == "cuda":
        print("image: no CPU build of PyTorch in --wheels DIR, so its CUDA build is installed (about 6 GB)", flush=True)
    if subprocess.run(_build_command(engine, wanted, name), env=_environment(engine)).returncode:
        raise EngineError(f"{engine.name} could not build {name}; what it printed last says why")
    return name


def _build_command(engine: Engine, wanted: Recipe, name: str) -> list[str]:
    command = [engine.name, "build", "--file", str(DOCKERFILE), "--tag", name]
    if engine.name == "podman":
        command += ["--format", "docker"]  # OCI's own format has no SHELL
    for argument, value in wanted.build_arguments().items():
        command += ["--build-arg", f"{argument}={value}"]
    if wanted.wheels is not None:
        command += ["--build-context", f"wheels={wanted.wheels.resolve()}"]
    return [*command, str(repository.ROOT)]


def _environment(engine: Engine) -> dict[str, str]:
    plain = {"BUILDKIT_PROGRESS": "plain"} if engine.name == "docker" else {}
    return {**os.environ, **plain}
