"""The folder of the report: every file appears whole or not at all, and what an earlier report left is removed."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from matplotlib import rc_context
from matplotlib.figure import Figure

from benchmarks.report import style
from nsa.io import atomic_write

MANIFEST = "manifest.json"
"""Names of the files of the last report; nothing else in its folder is touched."""


@dataclass(frozen=True)
class Picture:
    """One picture on the disk."""

    title: str
    """What it shows, in a sentence: caption and alternative text."""
    svg: str
    """File name, beside the page."""
    width: int
    """CSS pixels, so that the page does not jump while it loads."""
    height: int


class ReportFolder:
    """What one report writes into its folder."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._written: set[str] = set()

    def picture(
        self, title: str, words: tuple[str, ...], height_inch: float, draw: Callable[[Figure], None]
    ) -> Picture:
        """Draw on a new figure; save it in a file named after `words`."""
        name = self.unused(words, "svg")
        with rc_context(style.RC):
            figure = Figure(figsize=(style.WIDTH_INCH, height_inch))
            draw(figure)
            content = io.BytesIO()
            figure.savefig(content, format="svg", metadata={"Date": None})
        self._write(name, content.getvalue())
        return Picture(title, name, round(style.WIDTH_INCH * 96), round(height_inch * 96))

    @property
    def written(self) -> frozenset[str]:
        """Names of the files so far."""
        return frozenset(self._written)

    def adopt(self, written: frozenset[str]) -> None:
        """Count what another `ReportFolder` has written into this folder."""
        self._written |= written

    def copy(self, source: Path) -> None:
        """Put a file beside the pages, under its own name."""
        self._write(source.name, source.read_bytes())

    def page(self, name: str, html: str) -> Path:
        """Write a page; a file name that is no text is shown with its bytes spelt out."""
        self._write(name, html.encode(errors="backslashreplace"))
        return self._folder / name

    def remove_leftovers(self) -> None:
        """Remove the pages and pictures that an earlier report listed and this one does not have; list this one's."""
        for name in self._listed() - self._written:
            (self._folder / name).unlink(missing_ok=True)
        self._write(MANIFEST, (json.dumps(sorted(self._written), indent=0) + "\n").encode())

    def _listed(self) -> set[str]:
        """Files of this folder that an earlier report wrote; none where its list is missing or damaged."""
        try:
            names = json.loads((self._folder / MANIFEST).read_bytes())
        except (OSError, ValueError):
            return set()
        if not isinstance(names, list):
            return set()
        return {path.name for path in self._folder.iterdir() if path.name in names and path.is_file()}

    def unused(self, words: tuple[str, ...], suffix: str) -> str:
        """A file name of a-z, 0-9 and dashes that no other file has; it is taken from here on."""
        first = stem = re.sub(r"[^a-z0-9]+", "-", "-".join(words).lower()).strip("-")[:120]
        number = 1
        while f"{stem}.{suffix}" in self._written:
            number += 1
            stem = f"{first}-{number}"
        self._written.add(f"{stem}.{suffix}")
        return f"{stem}.{suffix}"

    def _write(self, name: str, content: bytes) -> None:
        self._written.add(name)
        atomic_write(self._folder / name, content)
