"""A scratch copy of the working tree in which one mutant at a time is tried."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.mutants.standing import Mutant, apply

_RESULTS_OF_TESTS = ("results/baselines/", "results/calibration/", "results/train/")
"""What tests read of results/; the rest is large and is no source."""
_NO_SOURCES = {"__pycache__", "build", "dist", "artifacts"}
_IDENTITY = ("-c", "user.name=mutants", "-c", "user.email=mutants@localhost", "-c", "commit.gpgsign=false")


def sources(root: Path) -> list[str]:
    """Files from the root: what git tracks or would; all but caches where there is no git."""
    try:
        listed = subprocess.run(
            ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            capture_output=True,
            text=True,
            check=True,
        )
        names = [name for name in listed.stdout.split("\0") if name]
    except (OSError, subprocess.CalledProcessError):
        names = [path.relative_to(root).as_posix() for path in _walk(root)]
    kept = (name for name in names if not name.startswith("results/") or name.startswith(_RESULTS_OF_TESTS))
    return sorted(name for name in set(kept) if (root / name).is_file())


def _walk(root: Path) -> Iterator[Path]:
    for folder, folders, files in os.walk(root):
        hidden = {name for name in folders if name.startswith(".") and name not in (".ci", ".github")}
        folders[:] = sorted(set(folders) - hidden - _NO_SOURCES)
        yield from (Path(folder, name) for name in files)


def sha256(root: Path, names: Sequence[str]) -> str:
    """One hash over names and contents."""
    digest = hashlib.sha256()
    for name in names:
        content = (root / name).read_bytes()
        digest.update(f"{name}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()[:16]


class Copy:
    """The copy, and a folder for what its tests write."""

    def __init__(self, root: Path, names: Sequence[str], folder: Path) -> None:
        self.tree, self.scratch = folder / "tree", folder / "scratch"
        for name in names:
            target = self.tree / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, target)
        self.scratch.mkdir()
        if shutil.which("git"):  # tests ask for the commit that they run on
            self._git("init", "--quiet")
            self._git("add", "--all")
            self._git("commit", "--quiet", "--allow-empty", "--message", "a copy of the working tree")

    def _git(self, *arguments: str) -> None:
        subprocess.run(["git", "-C", str(self.tree), *_IDENTITY, *arguments], check=True, capture_output=True)

    @contextmanager
    def mutated(self, mutant: Mutant) -> Iterator[None]:
        """With the change in its file. ValueError where it cannot be applied."""
        changed = apply(self.tree, mutant)
        path = self.tree / mutant.file
        whole = path.read_bytes()
        try:
            path.write_text(changed)
            yield
        finally:
            path.write_bytes(whole)
