"""Tables of the pages, as data: the template escapes every text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

GOOD, BAD, NUMBER, CODE, NAME, BRIEF, PLAIN = "good", "bad", "number", "code", "name", "brief", "plain"
"""Kinds of cells: how they are set, never the only sign of what they say. A name may break anywhere; code and what is
brief may not."""
NBSP = "\u00a0"


@dataclass(frozen=True)
class Cell:
    """One cell."""

    text: str
    kind: str = PLAIN
    href: str | None = None
    """Where the text leads."""


@dataclass(frozen=True)
class ReportTable:
    """One table; every row is as long as the head."""

    head: Sequence[str]
    rows: Sequence[Sequence[Cell]]


def number(text: str | None) -> Cell:
    """A figure; None is unknown."""
    return Cell("–" if text is None else text, NUMBER)


def when(utc: str) -> Cell:
    """To the minute: 2026-01-02T03:04:05Z -> 2026-01-02 03:04."""
    return Cell(utc[:16].replace("T", " "), BRIEF)


def version(commit: str | None, dirty: bool | None) -> str:
    """A commit, and whether the sources differed from it: "0123456789 + changes"."""
    return (commit or "unknown")[:10] + (" + changes" if dirty else "")


def digits(x: float) -> str:
    """Four digits where there is a fraction to show."""
    return f"{x:.0f}" if abs(x) >= 1000 else f"{x:.4g}"


def percent(share: float, places: int = 1) -> str:
    """0.031 -> "+3.1 %", with a true minus sign and a space that does not break."""
    return f"{100 * share:+.{places}f}{NBSP}%".replace("-", "−")


def plus_minus(uncertainty: float) -> str:
    """Half an interval of the log of a ratio: 0.0276 -> " ± 2.8 %"; "" where there is none."""
    return f" ± {percent(math.expm1(uncertainty)).lstrip('+')}" if uncertainty else ""
