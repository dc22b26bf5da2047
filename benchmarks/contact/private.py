"""What must not leave a machine in a bundle: paths of its disks, names of host and user, secrets of its environment.

A path becomes its last part behind an ellipsis, within this repository the path from its root. In a line of JSON
nothing that is put in or taken out needs an escape, so that a record stays one.
"""

from __future__ import annotations

import getpass
import json
import os
import re
import socket
import sys
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.history import incidents
from harness import machines
from harness.repository import ROOT

SECRET, HOST, USER = "***", "HOST", "USER"
"""What stands for a private word."""
_NAMED = {SECRET: "a secret of the environment", HOST: "the host's name", USER: "the user's name"}
LEAST_SECRET = 8
"""Characters; what is shorter is a word of every record."""
_PART = r"""[^\s/\\"'`:,;=<>|()\[\]{}]+"""
_BEGIN = r"(?:(?<![\w.…/-])|(?<=file://)|(?<=\\[nrt]))"
"""Not within a word, a URL or a path; behind file://, or what JSON makes of the end of a line, a path may begin."""
_HOME = rf"/(?:home|Users)/{_PART}(?:(?: {_PART})+(?=/))?"
"""A user's folder, whose name may hold spaces."""
_PATH = re.compile(rf"{_BEGIN}(?:(?P<home>{_HOME})(?P<below>(?:/{_PART})*)|(?:/{_PART}){{2,}})")
"""An absolute path of two parts or more."""
_BELOW = re.compile(rf"…(?:/{_PART})+")
_SECRET_NAME = re.compile(
    r"KEY|PASS|AUTH|TOKEN|SECRET|CREDENTIAL|_URL|(?<![A-Z])PAT(?![A-Z])|(?<=[A-Z_])(?<!^OLD)PWD", re.IGNORECASE
)
"""Of a variable. PATH, PWD and OLDPWD hold paths, which are taken out as such."""
_ORDINARY = frozenset(
    {
        "root", "localhost", "user", "runner", "nsa", "admin", "ubuntu", "debian", "linux", "nvidia", "cuda", "torch",
        "triton", "python", "reference", "benchmarks", "regression", *machines.known_ids(), *incidents.WORDS,
    }
)  # fmt: skip
"""Names of hosts and users that tell of nobody; records are full of some of them."""


@dataclass(frozen=True)
class PrivateWords:
    """What is looked for, with what stands for it."""

    words: Mapping[str, str]
    places: tuple[str, ...] = ()
    """Absolute paths that are private also where they are of one part."""

    @classmethod
    def here(cls, variables: Mapping[str, str] = os.environ, folders: Iterable[Path] = ()) -> PrivateWords:
        """Of this machine and this process's environment; `folders` are private too."""
        words: dict[str, str] = {}
        for name, value in variables.items():
            if _SECRET_NAME.search(name) and len(value) >= LEAST_SECRET:
                words |= {value: SECRET, json.dumps(value)[1:-1]: SECRET}  # as it stands, and as a record has it
        host = socket.gethostname()
        for name, instead in ((host, HOST), (host.partition(".")[0], HOST), (socket.getfqdn(), HOST), (_user(), USER)):
            if name and name.lower() not in _ORDINARY:
                words.setdefault(name, instead)
        known = (variables.get("HOME"), variables.get("TMPDIR"), tempfile.gettempdir(), sys.prefix, os.getcwd())
        paths = [*(Path(one) for one in known if one), *folders]
        places = {str(form) for one in paths for form in (one.absolute(), one.resolve())} - {os.sep, str(ROOT)}
        return cls(words, tuple(sorted(places, key=len, reverse=True)))

    def removed(self, text: str) -> str:
        """The text without them."""
        for word, instead in sorted(self.words.items(), key=lambda one: -len(one[0])):
            if instead == SECRET:
                text = text.replace(word, instead)
            else:
                text = _standing_alone(word, instead).sub(instead, text)
        text = text.replace(f"{ROOT}{os.sep}", "").replace(str(ROOT), ".")
        for place in self.places:
            text = _place(place).sub("…", text)
        return _BELOW.sub(_last_part, _PATH.sub(_last_part, text))

    def found(self, text: str) -> str | None:
        """The first of them that is still there, as what it is rather than as it stands; None where there is none."""
        for word, instead in self.words.items():
            if (word in text) if instead == SECRET else _standing_alone(word, instead).search(text):
                return _NAMED[instead]
        known = any(_place(place).search(text) for place in self.places)
        return "an absolute path" if known or absolute_path(text) else None


def _last_part(found: re.Match[str]) -> str:
    """What stands for a path; of a user's folder itself, whose name is the user's, nothing is left."""
    is_home = found.re is _PATH and found["home"] is not None and not found["below"]
    return "…" if is_home else f"…/{found[0].rpartition('/')[2]}"


def absolute_path(text: str) -> str | None:
    """The first absolute path in a text."""
    found = _PATH.search(text)
    return found[0] if found else None


def _standing_alone(word: str, instead: str) -> re.Pattern[str]:
    """A name that is part of another word is none. A host's may be written in any case."""
    return re.compile(rf"(?<![\w-]){re.escape(word)}(?![\w-])", re.IGNORECASE if instead == HOST else 0)


def _place(path: str) -> re.Pattern[str]:
    return re.compile(rf"{_BEGIN}{re.escape(path)}(?![\w-])")


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name
        return ""
