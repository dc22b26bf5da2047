"""The cells of a page's tables, and how they are set."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

from benchmarks.report.pages import build
from tests.benchmarks.synthetic import key

DENSE = key(implementation="sdpa-flash")
"""A baseline."""


class Cells(HTMLParser):
    """Rows of all tables of a page: (text, class) of each cell; and the text of everything."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.rows: list[list[tuple[str, str]]] = []
        self.text, self._kind = "", ""
        self.feed(path.read_text(encoding="utf-8"))
        self.text = re.sub(r"\s+", " ", self.text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        if tag == "tr":
            self.rows.append([])
        self._kind = str(dict(attributes).get("class")) if tag == "td" else ""
        if tag == "td":
            self.rows[-1].append(("", self._kind))

    def handle_endtag(self, tag: str) -> None:
        self._kind = ""

    def handle_data(self, data: str) -> None:
        self.text += data
        if self._kind:
            text, kind = self.rows[-1][-1]
            self.rows[-1][-1] = (text + data.replace("\u00a0", " "), kind)

    def kinds(self, text: str) -> set[str]:
        """How the cells that begin with this text are set."""
        return {kind for row in self.rows for cell, kind in row if cell.startswith(text)}

    def row(self, *first: str) -> list[str]:
        """The first row that begins so."""
        return next(texts for row in self.rows if (texts := [text for text, _ in row])[: len(first)] == list(first))


def page(results: Path, machine: str = "cpu") -> Cells:
    return Cells(build(results).index.with_name(f"machine-{machine}.html"))
