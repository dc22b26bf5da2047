"""Links to commits and to the differences between two, on the site that the repository comes from."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from urllib.parse import urlsplit

from harness.repository import ROOT

_SITES = ("github", "gitlab", "gitea", "forgejo", "codeberg")
"""A host with one of these words in its name shows a commit at /commit/a and a difference at /compare/a...b."""
_SSH = re.compile(r"(?:ssh://)?git@(?P<host>[\w.-]+)(?::\d+)?[:/](?P<path>[\w./~-]+)", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{7,64}", re.ASCII)
_SHORT = 7


@dataclass(frozen=True)
class Link:
    """A text, and where it leads; plain text without `href`."""

    text: str
    href: str | None = None


@dataclass(frozen=True)
class Repository:
    """Where commits are shown; nowhere without `url`."""

    url: str | None = None

    def __post_init__(self) -> None:
        if self.url is not None and not re.match(r"https?://[^/\s]+", self.url):
            raise ValueError(f"--repository-url must begin with https:// and a host; got {self.url!r}")

    @property
    def base(self) -> str | None:
        """What the addresses of commits begin with."""
        return self.url and self.url.rstrip("/")

    def commit(self, commit: str | None) -> Link:
        """One commit, by the begin of its name."""
        return Link(short(commit), self._href("commit", commit))

    def difference(self, old: str | None, new: str | None) -> Link | None:
        """What changed between two commits: a link, else what git prints it with. None where there is nothing."""
        if not (old and new) or old == new:
            return None
        href = self._href("compare", old, new)
        names = f"{short(old)}...{short(new)}"
        return Link(names if href else f"git diff {names}", href)

    def _href(self, kind: str, *commits: str | None) -> str | None:
        named = [commit for commit in commits if commit and _COMMIT.fullmatch(commit)]
        if self.base is None or len(named) < len(commits):
            return None
        return f"{self.base}/{kind}/{'...'.join(named)}"


def short(commit: str | None) -> str:
    """As git shortens it."""
    return (commit or "unknown")[:_SHORT]


def of_checkout() -> str | None:
    """The address of this checkout's origin; None without git, without an origin, or on another kind of site."""
    command = ["git", "-C", str(ROOT), "remote", "get-url", "origin"]
    try:
        remote = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
    return web_address(remote)


def web_address(remote: str) -> str | None:
    """git@github.com:owner/name.git -> https://github.com/owner/name, without what logs in; None for another site."""
    scheme, port = "https", None
    if ssh := _SSH.fullmatch(remote):
        host, path = ssh["host"], ssh["path"]
    else:
        try:
            parts = urlsplit(remote)
            scheme, port = parts.scheme, parts.port
        except ValueError:  # no address, or a port that is none
            return None
        host, path = parts.hostname or "", parts.path
        if scheme not in ("http", "https"):
            return None
    if not any(site in host for site in _SITES):
        return None
    where = host if port is None else f"{host}:{port}"
    return f"{scheme}://{where}/{path.strip('/').removesuffix('.git')}"
