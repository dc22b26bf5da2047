"""Every module of nsa comes from the folder of its package, or there is none.

An older nsa/ that stands first on the path lacks modules of today. The finder of an editable installation answers for
each of them with the installed tree's, and the process would measure a mixture of two versions.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

_PACKAGE = "nsa"


class _OwnFolder(MetaPathFinder):
    """Asked first; it leaves the package itself and all other names to the finders behind it."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """`path` is that of the package above. Raises ModuleNotFoundError where nothing of that name lies there."""
        if path is None or not fullname.startswith(f"{_PACKAGE}."):
            return None
        found = PathFinder.find_spec(fullname, path, target)
        if found is None:
            raise ModuleNotFoundError(f"No module named {fullname!r}", name=fullname)
        return found


def keep() -> None:
    """In this process, for all that is imported from now on."""
    sys.meta_path.insert(0, _OwnFolder())
