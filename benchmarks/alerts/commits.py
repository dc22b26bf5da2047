"""Which commits may be the cause of a slowdown, and who wrote them, as git says."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from functools import cache

from benchmarks.ab import checkout

_COMMIT = re.compile(r"[0-9a-f]{7,64}", re.ASCII)
"""What a record may hand to git."""


class Commits:
    """The commits of this repository that change nsa/, along the first parents of HEAD.

    Where there is no git, or it does not know a commit, a slowdown has that one commit as its suspect. What is no
    commit's name counts as unknown.
    """

    def __init__(self) -> None:
        listed = _git("rev-list", "--first-parent", "--reverse", "HEAD") or ""
        self._positions = {commit: i for i, commit in enumerate(listed.split())}
        self._between = cache(_first_parents)

    def position(self, commit: str | None) -> int | None:
        """Where a commit stands, the first one being 0; None for one that HEAD did not come from."""
        return self._positions.get(commit or "")

    def is_today(self, commit: str | None) -> bool:
        """Whether HEAD came from this commit, and nsa/ is the same in both."""
        return commit is not None and self.position(commit) is not None and not self._between(commit, "HEAD")

    def suspects(self, good: str | None, bad: str | None) -> tuple[str, ...]:
        """The commits after the good one up to the bad one, oldest first; none where nsa/ is the same in both."""
        if bad is None or not _COMMIT.fullmatch(bad):
            return ()
        found = self._between(good, bad) if good is not None and _COMMIT.fullmatch(good) else None
        return (bad,) if found is None else found


def _first_parents(good: str, bad: str) -> tuple[str, ...] | None:
    """None where git cannot say."""
    try:
        return tuple(checkout.first_parents(good, bad))
    except (ValueError, subprocess.CalledProcessError):
        return None


def owner(suspects: Sequence[str]) -> str:
    """The author of the commit; "unknown: 3 commits" for several."""
    if not suspects:
        return "unknown: no commit"
    if len(suspects) > 1:
        return f"unknown: {len(suspects)} commits"
    return _git("log", "-1", "--format=%an", "--end-of-options", suspects[0]) or "unknown: git does not know the commit"


def _git(*arguments: str) -> str | None:
    try:
        return checkout.git(*arguments)
    except (ValueError, subprocess.CalledProcessError):
        return None
