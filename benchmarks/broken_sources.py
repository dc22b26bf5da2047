"""What is said where nsa/ of the working tree cannot be imported: which side of a comparison it is, and which file.

The benches themselves stand on it (keys, configurations), so that no command can run, whatever it compares.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_ROOT = Path(__file__).resolve().parent.parent
_EXIT_CODE = 1
"""As where NSA is wrong on a case."""


@contextmanager
def named() -> Iterator[None]:
    """Around the imports of a command: an error out of nsa/ is one line, and ends the process with 1."""
    try:
        yield
    except Exception as error:
        where = _where(error)
        if where is None:
            raise
        print(
            "python -m benchmarks: nsa/ of the working tree (HEAD of a comparison that names BASE alone) cannot be"
            f" imported, and no command runs without it: {where}: {type(error).__name__}: {_text(error)}",
            file=sys.stderr,
        )
        sys.exit(_EXIT_CODE)


def _where(error: Exception) -> str | None:
    """The file and the line in nsa/ that are at fault; None where it is something else, as a missing dependency."""
    if isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] != "nsa":
        return None
    places = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    if isinstance(error, SyntaxError) and error.filename is not None:
        places.append((error.filename, error.lineno))
    for filename, line in reversed(places):
        path = Path(filename)
        if path.is_relative_to(_ROOT / "nsa"):
            return f"{path.relative_to(_ROOT)}, line {line}"
    return None


def _text(error: Exception) -> str:
    return error.msg if isinstance(error, SyntaxError) else str(error)
