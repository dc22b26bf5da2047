"""This repository: where it lies, and what git says of it."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
_TIMEOUT_S = 20
_COMMIT = re.compile(r"[0-9a-f]{7,64}", re.ASCII)


def git(*arguments: str) -> str | None:
    """What git prints; None where it fails, as in a copy without its history, or is not installed."""
    try:
        done = subprocess.run(
            ["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, timeout=_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def commit() -> str | None:
    """The working tree's commit."""
    return git("rev-parse", "HEAD")


def commits_since(commit: str) -> int | None:
    """How many commits the working tree's has that this one has not; None where git has no such commit here."""
    if not _COMMIT.fullmatch(commit):  # of a record from elsewhere, which git must not take for an option
        return None
    counted = git("rev-list", "--count", f"{commit}..HEAD")
    return None if counted is None else int(counted)


def dirty() -> bool | None:
    """Whether tracked or new files differ from the commit; None where git cannot say.

    Not those in results/: what a run writes there must not make the next run look changed.
    """
    status = git("status", "--porcelain", "--", ".", ":(exclude)results")
    return None if status is None else bool(status)
