"""A git repository of its own, whose nsa/ a test writes."""

from __future__ import annotations

import subprocess
from pathlib import Path

_IDENTITY = ["-c", "user.name=Test", "-c", "user.email=test@example.org", "-c", "commit.gpgsign=false"]


class Repository:
    """Commits whole versions of nsa/__init__.py."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "nsa").mkdir(parents=True, exist_ok=True)
        self.git("init", "--quiet")

    def write(self, text: str) -> None:
        """Change the working tree only."""
        (self.folder / "nsa" / "__init__.py").write_text(text)

    def commit(self, text: str, message: str = "change", page: str = "") -> str:
        """The new commit's full name; `page` is what a file beside nsa/ holds."""
        self.write(text)
        (self.folder / "page").write_text(page)
        self.git("add", "--all")
        self.git("commit", "--quiet", "--allow-empty", "--message", message)
        return self.git("rev-parse", "HEAD")

    def git(self, *arguments: str) -> str:
        command = ["git", "-C", str(self.folder), *_IDENTITY, *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
