"""`python -m pytest regression` runs incidents as the suite does, and only where it is asked to."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from harness.repository import ROOT
from regression import listing

_PYTEST = [sys.executable, "-m", "pytest", "-q", "-p", "no:benchmark", "-p", "no:cacheprovider"]


def pytest_in_a_process(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*_PYTEST, *arguments], cwd=ROOT, capture_output=True, text=True, check=False)


def test_one_passes_and_one_whose_detector_is_blind_fails(tmp_path: Path) -> None:
    """The faulty half of `a-repro` is not caught; its product passes, and so do both halves of an incident."""
    done = pytest_in_a_process(
        "regression", "--device", "cpu", "-k", "loader-stall or a-repro", "-p", "tests.regression.one_more_incident",
        "--junitxml", str(tmp_path / "j.xml"), "--basetemp", str(tmp_path / "base"),
    )  # fmt: skip
    assert done.returncode == 1, done.stdout + done.stderr
    cases = {case.get("name"): case for case in ElementTree.parse(tmp_path / "j.xml").iter("testcase")}
    assert set(cases) == {
        f"test_incident[{incident}-{part}]"
        for incident in ("loader-stall", "a-repro")
        for part in ("faulty", "product")
    }
    red = {
        name: failure.get("message") for name, case in cases.items() if (failure := case.find("failure")) is not None
    }
    assert set(red) == {"test_incident[a-repro-faulty]"}
    assert "the detector did not fire: expected WRONG, got PASSED" in (red["test_incident[a-repro-faulty]"] or "")


def test_every_half_is_a_test_and_the_default_run_has_none_of_them(pytestconfig: pytest.Config) -> None:
    collected = pytest_in_a_process("regression", "--collect-only").stdout
    halves = [f"[{incident}-{part}]" for incident in listing.IDS for part in ("faulty", "product")]
    assert [half for half in halves if half not in collected] == []
    assert pytestconfig.getini("testpaths") == ["tests"]
