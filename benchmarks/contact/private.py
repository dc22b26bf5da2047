"""What must not leave a machine in a bundle: paths of its disks, names of host and user, secrets of its environment.

A path becomes its last part behind an ellipsis, within this repository the path from its root. In a line of JSON
nothing that is put in or taken out needs an escape, so that a record stays one.
"""

from __future__ import annotations

import getpass
import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from harness import machines
from harness.repository import ROOT

_PATH = re.compile(
    r"(?<![\w.:/…-])/(?:home|root|Users|tmp|var|mnt|media|data|scratch|workspace|work|srv|opt|usr|private|nix|cache)"
    r"(?:/[\w.+@%~-]+)+",
    re.ASCII,
)
"""A path below a folder where disks and users lie; one that begins within a word is a URL's or a case's name."""
_SECRET_NAME = re.compile(r"TOKEN|SECRET|PASSW|CREDENTIAL|API_?KEY|PRIVATE_?KEY", re.IGNORECASE)
_ORDINARY = frozenset(
    {
        "root", "localhost", "user", "runner", "nsa", "admin", "ubuntu", "debian", "linux", "nvidia", "cuda", "torch",
        "triton", "python", "reference", "benchmarks", "regression", *machines.known_ids(),
    }
)  # fmt: skip
"""Names of hosts and users that tell of nobody; records are full of some of them."""


@dataclass(frozen=True)
class PrivateWords:
    """What is looked for, with what stands for it."""

    words: Mapping[str, str]

    @classmethod
    def here(cls, variables: Mapping[str, str] = os.environ) -> PrivateWords:
        """Of this machine and this process's environment."""
        words = {value: "***" for name, value in variables.items() if _SECRET_NAME.search(name) and len(value) >= 8}
        for name, instead in ((socket.gethostname(), "HOST"), (socket.getfqdn(), "HOST"), (_user(), "USER")):
            if name and name.lower() not in _ORDINARY:
                words.setdefault(name, instead)
        return cls(words)

    def removed(self, text: str) -> str:
        """The text without them."""
        for word, instead in sorted(self.words.items(), key=lambda one: -len(one[0])):
            text = _standing_alone(word).sub(instead, text) if instead != "***" else text.replace(word, instead)
        text = text.replace(f"{ROOT}{os.sep}", "").replace(str(ROOT), ".")
        return _PATH.sub(lambda found: f"…/{found[0].rpartition('/')[2]}", text)

    def found(self, text: str) -> str | None:
        """The first of them that is still there, as what it is rather than as it stands; None where there is none."""
        for word, instead in self.words.items():
            if (word in text) if instead == "***" else _standing_alone(word).search(text):
                return {"***": "a secret of the environment", "HOST": "the host's name", "USER": "the user's name"}[
                    instead
                ]
        return "an absolute path" if absolute_path(text) else None


def absolute_path(text: str) -> str | None:
    """The first absolute path in a text."""
    found = _PATH.search(text)
    return found[0] if found else None


def _standing_alone(word: str) -> re.Pattern[str]:
    """A name that is part of another word is none."""
    return re.compile(rf"(?<![\w-]){re.escape(word)}(?![\w-])")


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name
        return ""
