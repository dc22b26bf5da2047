"""Images by their content: what is in one decides its name, so that an image that is there need not be built.

The packages under an image, flash-attn above all, take an hour to build and change with the locks only: `publish`
pushes them to a registry by the hash of what decides them, and `build` takes them from there.
"""

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
_LAST_STAGE = "FROM ${MACHINE_IMAGE} AS nsa"
_COMPILER_GB = 8  # memory that one of flash-attn's compilers takes


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

    @property
    def packages_stage(self) -> str:
        """The Dockerfile's stage that the image stands on."""
        return "machine-cpu" if self.family == CPU else "machine-gpu"

    def packages_name(self, registry: str) -> str:
        """<registry>/packages:<family>-<hash of the locks, the Dockerfile's earlier stages and the arguments>."""
        dockerfile, last_stage, _ = DOCKERFILE.read_text().partition(_LAST_STAGE)
        assert last_stage, f"docker/Dockerfile must say {_LAST_STAGE}"
        locks = (DOCKERFILE.with_name("flash-attn.sh"), *sorted((DOCKERFILE.parent / "lock").glob("*.txt")))
        arguments = {name: value for name, value in self.build_arguments().items() if name not in ("COMMIT", "DIRTY")}
        decisive = (dockerfile, *(path.read_text() for path in locks), repr(sorted(arguments.items())))
        digest = hashlib.sha256("\0".join(decisive).encode())
        return f"{registry}/packages:{self.family}-{digest.hexdigest()[:12]}"

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
    for top in sorted(top for pattern in kept for top in repository.ROOT.glob(pattern)):
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


def build(engine: Engine, wanted: Recipe, registry: str | None = None) -> str:
    """Build what is not there yet, on packages of this registry where it has them; its name. Raises EngineError."""
    name = wanted.name()
    if identity(engine, name) is not None:
        print(f"image: {name} is there", flush=True)
        return name
    packages = _pulled(engine, wanted, registry) if registry and wanted.wheels is None else None
    print(f"image: building {name}", flush=True)
    if wanted.family == CPU and wanted.cpu_lock == "cuda" and packages is None:
        print("image: no CPU build of PyTorch in --wheels DIR, so its CUDA build is installed (about 6 GB)", flush=True)
    # said in any case: Podman does not see which stage a default names
    _run_build(engine, wanted, name, "--build-arg", f"MACHINE_IMAGE={packages or wanted.packages_stage}")
    return name


def publish(engine: Engine, wanted: Recipe, registry: str) -> str:
    """Push the packages of this recipe where the registry lacks them; their name there. Raises EngineError."""
    name = wanted.packages_name(registry)
    if subprocess.run([engine.name, "manifest", "inspect", name], capture_output=True).returncode == 0:
        print(f"packages: {name} is published", flush=True)
        return name
    _run_build(engine, wanted, name, "--target", wanted.packages_stage)
    if subprocess.run([engine.name, "push", name]).returncode:
        raise EngineError(f"{engine.name} could not push {name}; what it printed last says why")
    print(f"packages: published {name}", flush=True)
    return name


def _pulled(engine: Engine, wanted: Recipe, registry: str) -> str | None:
    """The name of the packages, once they are here; None where the registry has none of these or does not answer."""
    name = wanted.packages_name(registry)
    done = subprocess.run([engine.name, "pull", name], stderr=subprocess.PIPE, text=True)
    if done.returncode == 0:
        return name
    print(f"image: no {name}, so its packages are built here ({' '.join(done.stderr.split())})", flush=True)
    return None


def _run_build(engine: Engine, wanted: Recipe, name: str, *options: str) -> None:
    if subprocess.run(_build_command(engine, wanted, name, *options), env=_environment(engine)).returncode:
        raise EngineError(f"{engine.name} could not build {name}; what it printed last says why")


def _build_command(engine: Engine, wanted: Recipe, name: str, *options: str) -> list[str]:
    command = [engine.name, "build", "--file", str(DOCKERFILE), "--tag", name]
    if engine.name == "podman":
        command += ["--format", "docker"]  # OCI's own format has no SHELL
    for argument, value in wanted.build_arguments().items():
        command += ["--build-arg", f"{argument}={value}"]
    command += ["--build-arg", f"MAX_JOBS={_compilers()}"]
    if wanted.wheels is not None:
        command += ["--build-context", f"wheels={wanted.wheels.resolve()}"]
    return [*command, *options, str(repository.ROOT)]


def _compilers() -> int:
    """As many of flash-attn's compilers at a time as this machine's memory and cores can serve."""
    memory_gb = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e9
    return max(1, min(os.cpu_count() or 1, int(memory_gb // _COMPILER_GB)))


def _environment(engine: Engine) -> dict[str, str]:
    plain = {"BUILDKIT_PROGRESS": "plain"} if engine.name == "docker" else {}
    return {**os.environ, **plain}
