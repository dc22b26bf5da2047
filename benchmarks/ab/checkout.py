"""Two versions of nsa/ and one of the benches, side by side in a folder of their own until the comparison is over."""

from __future__ import annotations

import io
import shutil
import subprocess
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.ab import scratch
from benchmarks.ab.result import Side
from harness import environment, fingerprint, repository

WORKING_TREE = "working tree"
REPOSITORY = repository.ROOT
"""Where commits are looked up, and the working tree."""
_ATLAS = Path("results", "atlas")
"""What the cases `replayed` replay."""
_CACHES = shutil.ignore_patterns("__pycache__")


@dataclass(frozen=True)
class Sources:
    """One version of nsa/, and the benches that measure it."""

    side: Side
    folder: Path
    """Holds nsa/; a child's working directory."""
    benches: Path
    """Holds benchmarks/ and what it stands on, the same for every side."""


@contextmanager
def sources(refs: Sequence[str]) -> Iterator[list[Sources]]:
    """The nsa/ of each ref (`WORKING_TREE` is one too), gone afterwards. ValueError naming a ref that has none.

    Everything is copied, also the benches: edits while the comparison runs do not change it. The folders
    have names of one length, since paths of different lengths alone can move what lies where in a process. Those that
    a killed comparison has left behind are removed.
    """
    with scratch.folder() as root:
        benches = root / "benches"
        for package in ("benchmarks", "harness"):
            shutil.copytree(repository.ROOT / package, benches / package, ignore=_CACHES)
        if (repository.ROOT / _ATLAS).is_dir():
            shutil.copytree(repository.ROOT / _ATLAS, benches / _ATLAS)
        yield [_take(ref, root / f"side{i}", benches) for i, ref in enumerate(refs)]


def _take(ref: str, folder: Path, benches: Path) -> Sources:
    folder.mkdir()
    if ref == WORKING_TREE:
        commit, dirty = _working_tree()
        shutil.copytree(REPOSITORY / "nsa", folder / "nsa", ignore=_CACHES)
    else:
        commit, dirty = resolve(ref), False
        _extract(commit, ref, folder)
    return Sources(Side(ref, commit, dirty, fingerprint.sources_sha256(folder / "nsa")), folder, benches)


def _working_tree() -> tuple[str | None, bool | None]:
    """(its commit, whether nsa/ differs from it); of a copy without git what its environment says."""
    try:
        return resolve("HEAD"), bool(git("status", "--porcelain", "--", "nsa"))
    except ValueError:
        told = environment.read()
        return told.commit, told.dirty


def resolve(ref: str) -> str:
    """The full name of a commit. ValueError where the ref is none."""
    try:
        return git("rev-parse", "--verify", "--quiet", "--end-of-options", f"{ref}^{{commit}}")
    except subprocess.CalledProcessError as error:
        raise ValueError(f"{ref!r} must name a commit of {REPOSITORY}") from error


def first_parents(good: str, bad: str) -> list[str]:
    """The commits after `good` up to `bad` that change nsa/, oldest first, merges as one."""
    listed = git("rev-list", "--first-parent", "--reverse", f"{good}..{bad}", "--", "nsa")
    return listed.split()


def git(*arguments: str) -> str:
    """What git prints. Raises subprocess.CalledProcessError where it fails, ValueError where there is no git."""
    try:
        done = subprocess.run(["git", "-C", str(REPOSITORY), *arguments], capture_output=True, text=True, check=True)
    except FileNotFoundError as error:
        raise ValueError("git must be installed to look up commits; there is no such program here") from error
    return done.stdout.strip()


def _extract(commit: str, ref: str, folder: Path) -> None:
    done = subprocess.run(
        ["git", "-C", str(REPOSITORY), "archive", "--format=zip", commit, "--", "nsa"], capture_output=True
    )
    if done.returncode:
        raise ValueError(f"{ref!r} must be a commit that has nsa/; git says: {done.stderr.decode().strip()}")
    with zipfile.ZipFile(io.BytesIO(done.stdout)) as archive:
        archive.extractall(folder)  # writes nothing outside of it, in every Python; tarfile learned that in 3.11.4
