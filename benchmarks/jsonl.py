"""Files of one JSON object per line that are only ever appended to, by several writers, through any crash."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path


class DiskFullError(OSError):
    """No room for the next line; every line before it is whole and on the disk."""


def append(path: Path, line: str) -> None:
    """Add one line, on the disk when this returns. Raises DiskFullError, with the file as it was.

    Writers wait for one another. A line that a crash has torn is closed first, by a line break of its own: it is lost,
    and swallows nothing that comes after it.
    """
    file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)  # given back when the file is closed, also by a kill
        size = os.fstat(file).st_size
        torn = size > 0 and os.pread(file, 1, size - 1) != b"\n"
        try:
            _write(file, (b"\n" if torn else b"") + line.encode() + b"\n")
        except OSError as error:
            _restore(file, size)
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise DiskFullError(
                error.errno, f"no room for one more line; the lines before it are kept; make room and go on: {path}"
            ) from error
    finally:
        os.close(file)


def lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """(number counted from 1, bytes) of each line that is not empty."""
    for number, line in enumerate(path.read_bytes().split(b"\n"), start=1):
        if line.strip():
            yield number, line


def _write(file: int, data: bytes) -> None:
    while data:
        data = data[os.write(file, data) :]
    os.fsync(file)


def _restore(file: int, size: int) -> None:
    if os.fstat(file).st_size > size:
        os.ftruncate(file, size)
