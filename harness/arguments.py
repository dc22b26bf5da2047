"""Command lines that take no option but by its whole name, and name the nearest one to a word that is none.

Nothing here imports PyTorch: the host's side of the containers runs where there is none.
"""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Collection, Sequence
from typing import Any


class Parser(argparse.ArgumentParser):
    """argparse takes `--case` for `--cases` unless told not to, and does not say which option comes near."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> tuple[Any, list[str]]:  # type: ignore[override]
        """Ends the program where there is an unknown word: only the subcommand's own parser knows its options."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(unrecognised(unknown, self._option_string_actions))
        return found, unknown


def unrecognised(words: Sequence[str], known: Collection[str]) -> str:
    """What to say of words that are no arguments here: "unrecognized arguments: --case (did you mean --cases?)"."""
    options = [word.partition("=")[0] for word in words if word.startswith("-")]
    near = [match for option in options for match in difflib.get_close_matches(option, known, n=1)]
    hint = f" (did you mean {', '.join(near)}?)" if near else ""
    return f"unrecognized arguments: {' '.join(words)}{hint}"
