"""The table of cheats in docs/measuring.md: every family, with guards, words and tests that are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from harness.repository import ROOT

TABLE = "## Cheats that were tried"
FOLDER = "tests/benchmarks/honesty"
CHEATS = ("test_timers.py", "test_replays.py", "test_tampering.py", "test_skipped_work.py")
ASKED = {
    "patched timer", "work moved away", "cached or replayed", "inputs recognised", "lazy outputs", "L2 kept warm",
    "clocks", "stale graph", "crippled baseline", "dtype lowered", "skipped part", "NaN", "oracle changed",
    "benches changed", "process changed",
}  # fmt: skip
"""Families that must be there."""
WORDS = re.compile(r"\s+")


def rows() -> list[list[str]]:
    """family, what is done, refused by, words, test."""
    section = (ROOT / "docs" / "measuring.md").read_text().partition(TABLE)[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| ")][1:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


ROWS = rows()


def source_text(path: Path) -> str:
    """A file's text with strings that continue on the next line joined."""
    return WORDS.sub(" ", re.sub(r'"\s*\n\s*f?r?"', "", path.read_text()))


def test_every_family_is_there() -> None:
    assert {row[0] for row in ROWS} >= ASKED
    assert all(len(row) == 5 and all(row) for row in ROWS)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row[0]}: {row[1]}"[:60])
def test_a_row_names_its_guard_its_words_and_its_test(row: list[str]) -> None:
    _, _, guard, words, test = row
    for name in re.findall(r"`((?:benchmarks|harness)/[\w/]+\.py)`", guard):
        assert (ROOT / name).is_file()
    path, _, function = test.strip("`").partition("::")
    assert re.search(rf"(?m)^def {function}\(", (ROOT / path).read_text()), f"there is no {test}"
    told = [source_text(one) for folder in ("benchmarks", "harness") for one in (ROOT / folder).rglob("*.py")]
    assert any(words.strip("“”") in text for text in told), f"nothing says {words}"


VARIANTS = {"test_l2_set_aside_on_a_gpu", "test_a_changed_setting_is_named_before_what_came_of_it"}
"""The cheat of a row, on a GPU or beside another one."""


@pytest.mark.parametrize("name", CHEATS)
def test_no_cheat_is_left_out_of_the_table(name: str) -> None:
    """Each test whose implementation is refused stands in a row."""
    functions = re.split(r"(?m)^def ", (ROOT / FOLDER / name).read_text())[1:]
    cheating = {one.partition("(")[0] for one in functions if "    refused(" in one and one.startswith("test_")}
    assert cheating
    assert cheating - {row[4].strip("`").rpartition("::")[2] for row in ROWS} <= VARIANTS
