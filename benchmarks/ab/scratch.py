"""A temporary folder that is removed also where its owner was killed: by the next one who makes such a folder.

The owner holds a lock on the folder (flock) for as long as it lives; the system releases it however the owner ends,
and whatever process gets its number then. A folder gets its name only once it is locked, so that none that is in use
can be taken for one that was left behind.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PREFIX = "nsa-compared-"
"""Of a folder that has an owner, or had one."""
_UNNAMED = "nsa-unnamed-"


@contextmanager
def folder() -> Iterator[Path]:
    """A new folder in the system's place for temporary files, gone afterwards."""
    _remove_stale(Path(tempfile.gettempdir()))
    made = Path(tempfile.mkdtemp(prefix=_UNNAMED))
    lock = os.open(made, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        named = made.with_name(PREFIX + made.name.removeprefix(_UNNAMED))
        made.rename(named)
        made = named
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)
        os.close(lock)


def _remove_stale(where: Path) -> None:
    """Folders of ours whose owner is gone. What another user or process has stays as it is."""
    for path in where.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # locked, of another user, or removed by another process meanwhile
            found = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(found, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(found).st_uid == os.geteuid():
                    shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(found)
