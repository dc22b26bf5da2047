"""Files of one JSON object per line that are only ever appended to, by several writers, through any crash."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path


class DiskFullError(OSError):
    """No room for the next line; every line before it is whole and on the disk."""


def append(path: Path, line: str) -> None:
    """Add one line, on the disk when this returns. Raises DiskFullError, with the file as it was.

    Writers wait for one another. A line that a crash has torn is closed first, by a line break of its own: it is lost,
    and swallows nothing that comes after it.
    """
    append_chosen(path, lambda _: [line])


def append_chosen(path: Path, choose: Callable[[Iterator[bytes]], Sequence[str]]) -> None:
    """The same for lines that depend on those of the file: `choose` is given these while no other writer may write."""
    with _alone(path) as (file, size):
        found = (line for _, line in lines(path))
        chosen = "".join(f"{line}\n" for line in choose(found)).encode()
        torn = size > 0 and os.pread(file, 1, size - 1) != b"\n"
        _write_or_restore(file, size, (b"\n" if torn else b"") + chosen, path)


def append_bytes(path: Path, data: bytes) -> None:
    """Add bytes as they are, on the disk when this returns. Raises DiskFullError, with the file as it was."""
    with _alone(path) as (file, size):
        _write_or_restore(file, size, data, path)


@contextmanager
def _alone(path: Path) -> Iterator[tuple[int, int]]:
    """(file, its size) while every other writer waits; given back when the file is closed, also by a kill."""
    file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield file, os.fstat(file).st_size
    finally:
        os.close(file)


def _write_or_restore(file: int, size: int, data: bytes, path: Path) -> None:
    try:
        _write(file, data)
    except OSError as error:
        _restore(file, size)
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise DiskFullError(
            error.errno, f"no room for one more line; the lines before it are kept; make room and go on: {path}"
        ) from error


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
