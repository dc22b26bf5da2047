"""Documents of local text files, row by row, from any row on: a line of JSON each, or a whole file each.

What `datasets` streams otherwise (FineWeb-Edu, Parquet), with the same few methods, and without any package.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

LINES = ".jsonl"


class TextFiles:
    """The rows of one rank: of all files in their order every `ranks`-th row, the first one being `rank`'s own."""

    def __init__(self, paths: Sequence[str], *, rank: int = 0, ranks: int = 1) -> None:
        self._paths, self._rank, self._ranks = paths, rank, ranks
        self._next = 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """From the row that `load_state_dict` named, once; else from the first. Raises ValueError for a line that is
        no JSON object, OSError."""
        begin, self._next = self._next, 0
        rows = self._lines(begin) if self._paths[0].endswith(LINES) else self._whole(begin)
        for number, row in rows:
            self._next = number + 1
            yield row
        self._next = 0

    def set_epoch(self, epoch: int) -> None:
        """Every epoch has the same order."""

    def state_dict(self) -> dict[str, Any]:
        """Where the rows stand after the last one that was given."""
        return {"row": self._next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Begin the next iteration there. Raises ValueError for a position of what `datasets` streamed."""
        if set(state) != {"row"}:
            raise ValueError(
                "the checkpoint's position is of an earlier version, which read these files through the package"
                " datasets: its data cannot be gone on with"
            )
        self._next = int(state["row"])

    def _is_own(self, number: int) -> bool:
        return number % self._ranks == self._rank

    def _lines(self, begin: int) -> Iterator[tuple[int, dict[str, Any]]]:
        number = 0
        for path in self._paths:
            with Path(path).open("rb") as file:
                for line_number, line in enumerate(file, 1):
                    if not line.isspace():
                        if number >= begin and self._is_own(number):
                            yield number, _object(path, line_number, line)
                        number += 1

    def _whole(self, begin: int) -> Iterator[tuple[int, dict[str, Any]]]:
        for number, path in islice(enumerate(self._paths), begin, None):
            if self._is_own(number):
                yield number, {"text": Path(path).read_text(encoding="utf-8", errors="replace")}


def _object(path: str, line_number: int, line: bytes) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except ValueError as error:
        raise ValueError(f"data.path: {path}, line {line_number} is no JSON ({error})") from None
    if not isinstance(found, dict):
        raise ValueError(f"data.path: {path}, line {line_number} must be an object with a text; got {str(found)[:40]}")
    return found
