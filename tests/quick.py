"""`pytest --quick`: what a developer runs at every change, some 4 minutes on 2 cores.

Hypothesis draws `EXAMPLES` instead of 24. Left out are the tests that took `SLOW_S` or more when they were recorded so
(durations.json, by file and name); one that is not in it runs. Of each law, a test function in tests/laws, the quickest
runs where all of them are slow. To record them anew, on a quiet machine:

    HYPOTHESIS_PROFILE=quick python -m pytest -n auto -p no:benchmark --junitxml all.xml; python -m tests.quick all.xml
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from harness.repository import ROOT

TABLE = Path(__file__).resolve().parent / "durations.json"
EXAMPLES = 3
SLOW_S = 0.3
LAWS = "tests/laws/"
_SENT = "left_out"

Table = dict[str, dict[str, float]]
"""File -> name with its parameters -> seconds."""


def recorded(reports: Iterable[Path]) -> Table:
    """The slow tests of these JUnit files."""
    found: Table = {}
    for report in reports:
        for case in ElementTree.parse(report).iter("testcase"):
            seconds = float(case.get("time") or 0.0)
            if seconds >= SLOW_S and case.get("classname"):
                file = _file(case.get("classname") or "")
                found.setdefault(file, {})[case.get("name") or ""] = round(seconds, 1)
    return {file: dict(sorted(found[file].items())) for file in sorted(found)}


def _file(classname: str) -> str:
    """ "tests.laws.test_a.TestB" -> "tests/laws/test_a.py"."""
    parts = classname.split(".")
    end = next((i for i in range(len(parts), 0, -1) if (ROOT / "/".join(parts[:i])).with_suffix(".py").is_file()), 0)
    return "/".join(parts[: end or len(parts)]) + ".py"


def left_out(names: Sequence[tuple[str, str]], table: Table) -> list[float | None]:
    """For each (file, name) its seconds where it is left out, None where it runs."""
    seconds = [table.get(file, {}).get(name) for file, name in names]
    kinds: dict[tuple[str, str], list[int]] = {}
    for i, (file, name) in enumerate(names):
        kinds.setdefault((file, name.partition("[")[0]), []).append(i)
    for (file, _), members in kinds.items():
        slow = [(taken, i) for i in members if (taken := seconds[i]) is not None]
        if file.startswith(LAWS) and len(slow) == len(members):
            seconds[min(slow)[1]] = None
    return seconds


class Quick:
    """The plugin: it leaves tests out, and says at the end how many of which folder."""

    def __init__(self, table: Table) -> None:
        self._table = table
        self._left_out: Counter[str] = Counter()
        self._seconds = 0.0

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        names = [(item.nodeid.partition("::")[0], item.name) for item in items]
        seconds = left_out(names, self._table)
        gone = [(item, taken) for item, taken in zip(items, seconds, strict=True) if taken is not None]
        items[:] = [item for item, taken in zip(items, seconds, strict=True) if taken is None]
        config.hook.pytest_deselected(items=[item for item, _ in gone])
        self._left_out = Counter(item.nodeid.partition("::")[0].rpartition("/")[0] for item, _ in gone)
        self._seconds = sum(taken for _, taken in gone)
        if hasattr(config, "workeroutput"):  # with pytest-xdist the process that prints collects nothing
            config.workeroutput[_SENT] = [dict(self._left_out), self._seconds]

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: object) -> None:
        sent = getattr(node, "workeroutput", {}).get(_SENT)
        if sent is not None:
            self._left_out, self._seconds = Counter(sent[0]), sent[1]

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        where = ", ".join(f"{folder} {count}" for folder, count in sorted(self._left_out.items()))
        terminalreporter.write_line(
            f"--quick left out {sum(self._left_out.values())} slow tests, some {self._seconds / 60:.0f} minutes of one"
            f" core ({where or 'none'}); without it all run"
        )


def plugin() -> Quick:
    """With the recorded table."""
    return Quick(json.loads(TABLE.read_text()))


if __name__ == "__main__":
    TABLE.write_text(json.dumps(recorded(map(Path, sys.argv[1:])), indent=1, ensure_ascii=False) + "\n")
