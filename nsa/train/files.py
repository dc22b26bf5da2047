"""Files that a kill cannot spoil: lines that are appended whole, and small files that are replaced whole."""

from __future__ import annotations

import csv
import fcntl
import json
import math
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class InUseError(ValueError):
    """Another process writes to the folder; the message names it."""


def replace(path: Path, text: str) -> None:
    """The file has the old content or the new one, at any moment."""
    with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=f".{path.name}-", delete=False) as file:
        try:
            os.fchmod(file.fileno(), 0o644)  # a temporary file is its owner's alone
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise


def as_json(value: Any, *, indent: int | None = None) -> str:
    """JSON as other languages read it too: NaN and infinities become strings that say so."""
    return json.dumps(_plain(value), indent=indent, allow_nan=False, ensure_ascii=False)


def append_line(path: Path, line: str) -> None:
    """Add one line in one write; a line that a kill has torn is closed first, by a line break of its own."""
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        size = os.fstat(descriptor).st_size
        torn = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
        data = (b"\n" if torn else b"") + line.encode() + b"\n"
        while data:
            data = data[os.write(descriptor, data) :]
    finally:
        os.close(descriptor)


def json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a file of JSON lines; a torn line is passed over, a file that is not there has none."""
    if not path.exists():
        return
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            found = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(found, dict):
            yield found


class Table:
    """A CSV file with a header. A resumed run cuts off what it will write again."""

    def __init__(self, path: Path, columns: Sequence[str], *, after_step: int) -> None:
        """`columns` begins with "step"; rows of steps above `after_step` are dropped."""
        self._path, self._columns = path, tuple(columns)
        kept = [row for row in self.rows(path) if _step(row) is not None and int(row["step"]) <= after_step]
        lines = [",".join(self._columns), *(self._line(row) for row in kept)]
        replace(path, "\n".join(lines) + "\n")

    def add(self, row: Mapping[str, Any]) -> None:
        append_line(self._path, self._line(row))

    @staticmethod
    def rows(path: Path) -> list[dict[str, str]]:
        """Whole rows by column; none where there is no file."""
        if not path.exists():
            return []
        with path.open(newline="", encoding="utf-8") as file:
            return [row for row in csv.DictReader(file) if None not in row and None not in row.values()]

    def _line(self, row: Mapping[str, Any]) -> str:
        cells = ("" if row.get(name) is None else str(row[name]) for name in self._columns)
        return ",".join(cells)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """The folder is this process's alone; InUseError if it is another's. A kill gives it back."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InUseError(f"train.out_dir must not be in use; another run writes to {folder}") from None
        yield


def _step(row: Mapping[str, str]) -> int | None:
    try:
        return int(row["step"])
    except (KeyError, ValueError):
        return None


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)
