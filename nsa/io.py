"""Files that a crash cannot spoil: replaced in one step, or appended to line by line.

`atomic_write` replaces a file whose content is at hand, `open_atomic` one that is written piece by piece. The
`append_*` functions add to files of one JSON object per line, which several writers may share: a line that a crash has
torn is lost, and damages no other.
"""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any


class DiskFullError(OSError):
    """No room for the next line; every earlier line is complete and on the disk."""


_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
_NOT_ALLOWED = (errno.EROFS, errno.EACCES, errno.EPERM)


def cannot_write(error: OSError, option: str) -> str | None:
    """What to tell a user whose folder is read-only or full, and what to do; None for any other error.

    `option` is the one that names another folder.
    """
    if isinstance(error, DiskFullError):
        return error.strerror
    where = error.filename or "the folder for what is written"
    if error.errno in _NOT_ALLOWED:
        return f"cannot write {where}: {error.strerror}. Make it writable, or name another folder with {option}"
    if error.errno in _NO_ROOM:
        return (
            f"no room for {where}: {error.strerror}. Make room, or name a folder on another disk with {option}; what"
            " was written before is kept"
        )
    return None


def atomic_write(path: Path, content: str | bytes) -> None:
    """Replace a small file: `open_atomic` with all of its content at once."""
    with open_atomic(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


@contextmanager
def open_atomic(path: Path) -> Iterator[IO[bytes]]:
    """A file to write that replaces `path`, making its folder if it is missing, when the block ends.

    Readers see the old content or the new, even after a crash. The new content is on the disk when the block has
    ended; if it fails, the file is as it was. A kill may leave .<name>-*.new behind.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}-", suffix=".new", delete=False) as file:
        try:
            os.fchmod(file.fileno(), 0o644)  # a temporary file is readable by its owner alone
            yield file
            file.flush()
            os.fsync(file.fileno())
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Put the names in a folder on the disk: a rename survives a power cut only after this."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def append_line(path: Path, line: str, *, sync: bool = True) -> None:
    """Add one line, on the disk when this returns. Raises DiskFullError, with the file as it was.

    Writers wait for one another. A line that a crash has torn is ended first, so that the next one is not part of it.
    Without `sync` the line survives the end of this process, but not that of the machine: for a line at each step.
    """
    with _locked(path) as (file, size):
        _write_or_truncate(file, size, _ending(file, size) + f"{line}\n".encode(), path, sync=sync)


def append_lines(path: Path, choose: Callable[[Iterator[bytes]], Sequence[str]]) -> None:
    """`append_line` for lines that depend on those in the file, which `choose` is given while no one else writes."""
    with _locked(path) as (file, size):
        chosen = "".join(f"{line}\n" for line in choose(line for _, line in read_lines(path)))
        _write_or_truncate(file, size, _ending(file, size) + chosen.encode(), path)


def append_bytes(path: Path, data: bytes) -> None:
    """Add bytes as they are, on the disk when this returns. Raises DiskFullError, with the file as it was."""
    with _locked(path) as (file, size):
        _write_or_truncate(file, size, data, path)


def read_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """(number counted from 1, bytes) of each line that is not empty."""
    for number, line in enumerate(path.read_bytes().split(b"\n"), start=1):
        if line.strip():
            yield number, line


def read_json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The JSON objects of a file, one per line; a torn line is skipped, a missing file has none."""
    if not path.exists():
        return
    for _, line in read_lines(path):
        try:
            found = json.loads(line.decode(errors="replace"))
        except json.JSONDecodeError:
            continue
        if isinstance(found, dict):
            yield found


def to_json(value: Any, *, indent: int | None = None) -> str:
    """JSON that other languages can read: NaN and infinities become strings, and so does what JSON has no type for."""
    return json.dumps(_plain(value), indent=indent, allow_nan=False, ensure_ascii=False)


@contextmanager
def _locked(path: Path) -> Iterator[tuple[int, int]]:
    """(descriptor, size) of the file while every other writer waits; a kill releases the lock too."""
    file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield file, os.fstat(file).st_size
    finally:
        os.close(file)


def _ending(file: int, size: int) -> bytes:
    """The line break that a torn last line lacks."""
    torn = size > 0 and os.pread(file, 1, size - 1) != b"\n"
    return b"\n" if torn else b""


def _write_or_truncate(file: int, size: int, data: bytes, path: Path, *, sync: bool = True) -> None:
    try:
        while data:
            data = data[os.write(file, data) :]
        if sync:
            os.fsync(file)
    except OSError as error:
        if os.fstat(file).st_size > size:
            os.ftruncate(file, size)
        if error.errno not in _NO_ROOM:
            raise
        raise DiskFullError(
            error.errno, f"no room for one more line; the lines before it are kept; make room and go on: {path}"
        ) from error


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)
