"""Command lines that take no option but by its whole name, and name the nearest one to a word that is none.

Nothing here imports PyTorch: noxfile.py and the host's side of the containers run where there is none. With `check`
noxfile.py refuses a misspelt option of a command before anything is installed for it.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import keyword
import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from harness import machines
from harness.repository import ROOT


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


_UNITS_S = {"h": 3600.0, "m": 60.0, "s": 1.0}
MOST_HOURS = 10_000
"""Of a time on a command line: more than a year is a slip."""


def time_s(text: str) -> float:
    """20m, 90s or 1h30m in seconds. Raises argparse.ArgumentTypeError."""
    found = re.findall(r"(\d+(?:\.\d+)?)([hms])", text, re.ASCII)
    total_s = sum(float(number) * _UNITS_S[unit] for number, unit in found)
    if total_s > MOST_HOURS * _UNITS_S["h"]:
        raise argparse.ArgumentTypeError(f"must be at most {MOST_HOURS}h; got {text[:40]!r}")
    if "".join(number + unit for number, unit in found) != text or not total_s > 0:
        raise argparse.ArgumentTypeError(f"must be a time such as 20m, 90s or 1h30m; got {text!r}")
    return total_s


def unrecognised(words: Sequence[str], known: Collection[str]) -> str:
    """What to say of words that are no arguments here: "unrecognized arguments: --case (did you mean --cases?)"."""
    options = [word.partition("=")[0] for word in words if word.startswith("-")]
    near = [match for option in options for match in difflib.get_close_matches(option, known, n=1)]
    hint = f" (did you mean {', '.join(near)}?)" if near else ""
    return f"unrecognized arguments: {' '.join(words)}{hint}"


def machine_id(text: str) -> str:
    """What `--gpu` takes: a family, a board, its slice, a GPU that is not listed. Raises ArgumentTypeError."""
    if not machines.is_id(text):
        raise argparse.ArgumentTypeError(
            f"invalid choice: {text!r} (choose from {', '.join(machines.known_ids())}; a board's MIG slice, as"
            " a100-80gb-sxm-mig-3g-40gb; or a GPU that is not listed by its name, as gpu-geforce-rtx-5090)"
        )
    return text


def check(words: Sequence[str]) -> None:
    """Raises ValueError for a misspelt option of `python -m words...`, where that is a command of this repository."""
    path = file_of(words[0], words[1] if len(words) > 1 else "")
    if not path.is_file():
        path = ROOT.joinpath(*words[0].split("."), "__main__.py")
    if not path.is_file():
        return
    known = declared(path)
    options = [word for word in words if word.startswith("--") and word != "--"]
    if unknown := [word for word in options if word.partition("=")[0] not in known]:
        raise ValueError(unrecognised(unknown, known))


def file_of(package: str, command: str) -> Path:
    """Where a subcommand lies in packages that have a file for each: "first-contact" in first_contact.py, and "import",
    which is a word of Python's, in import_.py."""
    name = command.replace("-", "_") + "_" * keyword.iskeyword(command)
    return ROOT.joinpath(*package.split("."), "commands", f"{name}.py")


def declared(path: Path) -> set[str]:
    """Every option that a module declares with `add_argument`, and the modules beside it that it imports, read from
    their text."""
    found, left, seen = {"-h", "--help"}, [path], {path}
    package = ".".join(path.parent.relative_to(ROOT).parts)
    while left:
        for node in ast.walk(ast.parse(left.pop().read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "add_argument":
                words = [word.value for word in node.args if isinstance(word, ast.Constant)]
                found |= {word for word in words if isinstance(word, str) and word.startswith("-")}
            elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith(package):
                names = (
                    [alias.name for alias in node.names]
                    if node.module == package
                    else [str(node.module).split(".")[-1]]
                )
                beside = {path.with_name(f"{name}.py") for name in names} - seen
                left += [one for one in beside if one.is_file()]
                seen |= beside
    return found
