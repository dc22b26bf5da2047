"""The environment of the sessions that run outside an image: one for all of them, in which nothing is installed twice.

It lies in .nox/suites. What is installed stands in a file beside it, with a hash of all that decides the versions, so
that a second call installs nothing. A session that needs more (the tests, after a bench) adds that to it.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from harness.repository import ROOT

FOLDER = ROOT / ".nox" / "suites"
_DECIDING = ("constraints.txt", "pyproject.toml")

Run = Callable[[Sequence[str]], object]
"""Runs a command; raises where it fails."""


def _run(command: Sequence[str]) -> None:
    subprocess.run(command, cwd=ROOT, check=True)


def ready(extras: Iterable[str], run: Run = _run, folder: Path = FOLDER) -> Path:
    """The environment's Python, with these extras of pyproject.toml installed. Raises what `run` raises."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_name(f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two sessions at once would install into one another
        return _installed(set(extras), run, folder)


def _installed(extras: set[str], run: Run, folder: Path) -> Path:
    python, stamp, versions = folder / "bin" / "python", folder / "installed.json", _versions()
    known = _read(stamp) if python.exists() else {}
    there = set(known.get("extras", []))
    if known.get("versions") == versions and extras <= there:
        return python
    if known.get("python") != sys.version:
        run([sys.executable, "-m", "virtualenv", "--quiet", "--clear", str(folder)])
        there = set()
    stamp.unlink(missing_ok=True)  # an install that is interrupted is done again
    wanted = sorted(extras | there)
    install = [str(python), "-m", "pip", "install", "--quiet", "--no-compile", "-c", "constraints.txt"]
    run([*install, "-e", f".[{','.join(wanted)}]"])
    stamp.write_text(json.dumps({"versions": versions, "python": sys.version, "extras": wanted}))
    return python


def _versions() -> str:
    """A hash of what decides which versions are installed, and from where."""
    digest = hashlib.sha256(f"{ROOT}\0{sys.version}".encode())
    for name in _DECIDING:
        digest.update((ROOT / name).read_bytes())
    return digest.hexdigest()


def _read(stamp: Path) -> dict[str, Any]:
    try:
        found = json.loads(stamp.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def variables(python: Path) -> dict[str, str]:
    """What a command gets in addition: the environment's programs are found by their names, and the bytecode of all
    sources is kept there, since a process that compiles PyTorch's own spends 3 to 12 s on it."""
    folder = python.parent.parent
    return {
        "PATH": f"{python.parent}{os.pathsep}{os.environ.get('PATH', '')}",
        "PYTHONDONTWRITEBYTECODE": "",
        "PYTHONPYCACHEPREFIX": str(folder / "bytecode"),
        "VIRTUAL_ENV": str(folder),
    }
