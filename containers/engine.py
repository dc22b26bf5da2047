"""Which container engine is here, and what each calls the same thing."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass

NAMES = ("docker", "podman")
NONE = "none"
_PATIENCE_S = 20

_VERSION = {
    "docker": ("docker", "version", "--format", "{{.Server.Version}}"),
    "podman": ("podman", "version", "--format", "{{.Client.Version}}"),
}
_GPUS = {"docker": ("--gpus", "all"), "podman": ("--device", "nvidia.com/gpu=all")}
# Files that the container writes belong to the caller; rootless Podman needs the caller's id on both sides for that.
_USER = {"docker": (), "podman": ("--userns=keep-id", "--security-opt", "label=disable")}


class EngineError(Exception):
    """The engine that was asked for cannot be used here."""


@dataclass(frozen=True)
class Engine:
    """A container engine that answers."""

    name: str
    version: str

    @property
    def gpu_flags(self) -> tuple[str, ...]:
        """What gives a container every GPU."""
        return _GPUS[self.name]

    @property
    def user_flags(self) -> tuple[str, ...]:
        """What makes the caller the owner of what the container writes."""
        rootless = self.name == "podman" and os.getuid() != 0
        return (*(_USER[self.name] if rootless else ()), "--user", f"{os.getuid()}:{os.getgid()}")


@dataclass(frozen=True)
class Choice:
    """The engine to use, or None for the host's own environment, and why."""

    engine: Engine | None
    message: str
    """One line for the user."""


Ask = Callable[[str], "Engine | str"]


def ask(name: str) -> Engine | str:
    """The engine of this name, or why there is none."""
    if shutil.which(name) is None:
        return "not installed"
    try:
        done = subprocess.run(_VERSION[name], capture_output=True, text=True, timeout=_PATIENCE_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"does not answer ({type(error).__name__})"
    if done.returncode or not done.stdout.strip():
        lines = done.stderr.strip().splitlines()
        return f"does not answer ({lines[-1] if lines else f'exit code {done.returncode}'})"
    return Engine(name, done.stdout.strip())


def choose(asked: str | None, ask: Ask = ask) -> Choice:
    """The engine asked for, else Docker, then Podman, then none. Raises EngineError, ValueError."""
    if asked == NONE:
        return Choice(None, "engine: none, as asked: the host's own environment")
    if asked is not None and asked not in NAMES:
        raise ValueError(f"--engine (NSA_ENGINE) must be one of {', '.join((*NAMES, NONE))}; got {asked!r}")
    missing = []
    for name in NAMES if asked is None else (asked,):
        found = ask(name)
        if isinstance(found, Engine):
            return Choice(found, f"engine: {found.name} {found.version}")
        missing.append(f"{name}: {found}")
    if asked is not None:
        raise EngineError(f"--engine {'; '.join(missing)}. Start it, or use --engine none for the host's environment")
    return Choice(None, f"engine: none ({'; '.join(missing)}): the host's own environment")
