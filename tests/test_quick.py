"""`--quick` leaves out what was slow, keeps one test of each law, and says what it left out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from harness.repository import ROOT
from tests import quick

pytest_plugins = ["pytester"]
LAW, UNIT = "tests/laws/test_a.py", "tests/nsa/test_b.py"


@pytest.mark.parametrize(
    ("slow", "kept"),
    [
        ({}, ["law[x]", "law[y]", "other", "unit[x]", "unit[y]"]),
        ({LAW: {"law[x]": 2.0}}, ["law[y]", "other", "unit[x]", "unit[y]"]),
        ({LAW: {"law[x]": 2.0, "law[y]": 1.5, "other": 9.0}}, ["law[y]", "other", "unit[x]", "unit[y]"]),
        ({UNIT: {"unit[x]": 2.0, "unit[y]": 1.5}}, ["law[x]", "law[y]", "other"]),
        ({"gone.py": {"law[x]": 2.0}}, ["law[x]", "law[y]", "other", "unit[x]", "unit[y]"]),
    ],
)
def test_slow_tests_are_left_out_but_for_one_of_each_law(slow: quick.Table, kept: list[str]) -> None:
    names = [(LAW, "law[x]"), (LAW, "law[y]"), (LAW, "other"), (UNIT, "unit[x]"), (UNIT, "unit[y]")]
    seconds = quick.left_out(names, slow)
    assert [name for (_, name), taken in zip(names, seconds, strict=True) if taken is None] == kept


def test_durations_are_read_from_junit(tmp_path: Path) -> None:
    path = tmp_path / "j.xml"
    path.write_text(
        '<testsuites><testsuite><testcase classname="tests.test_quick" name="test_a[x]" time="2.345"/>'
        '<testcase classname="tests.laws.test_dense" name="test_b" time="0.299"/>'
        '<testcase classname="" name="tests.x" time="9"/></testsuite></testsuites>'
    )
    assert quick.recorded([path]) == {"tests/test_quick.py": {"test_a[x]": 2.3}}


def test_every_law_is_in_it() -> None:
    """The table names tests of files that are there."""
    table = json.loads(quick.TABLE.read_text())
    assert [file for file in table if not (ROOT / file).is_file()] == []


@pytest.mark.parametrize("workers", ["0", "1"])
def test_what_is_left_out_is_said(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, workers: str) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # importing Hypothesis takes longest
    monkeypatch.setenv("PYTEST_PLUGINS", "xdist.plugin")
    pytester.makeconftest(
        "from tests.quick import Quick\n"
        "def pytest_configure(config):\n"
        "    config.pluginmanager.register(Quick({'test_it.py': {'test_slow': 120.0}}))\n"
    )
    pytester.makepyfile(test_it="def test_slow():\n    raise AssertionError\n\n\ndef test_fast():\n    pass\n")
    ended = pytester.runpytest_subprocess("-n", workers, "-p", "no:benchmark")
    ended.assert_outcomes(passed=1, deselected=0 if workers == "1" else 1)
    ended.stdout.fnmatch_lines(["--quick left out 1 slow tests, some 2 minutes of one core*"])
