"""Records come back as they were written; JUnit says the same."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from harness import fingerprint
from harness.fingerprint import Fingerprint
from regression import ledger
from regression.contract import Bound, Evidence, ReproVerdict
from regression.runner import Finding, Pace, Repro
from tests.regression.repros import INCIDENT

PACE = Pace(1.5, 0.5, 0.1, 3, 0.4, 30.0, {"loss": 2.0, "bad": None})
RED = Finding(Repro(INCIDENT, "product", "cpu"), Evidence(wrong=("row \x00 3 <",), exit_status=0), PACE)
CAUGHT = replace(RED, repro=Repro(INCIDENT, "faulty", "cpu"))
MISSED = Finding(Repro(INCIDENT, "faulty", "cpu"), Evidence(error=Bound(0.5, 1.0), exit_status=0), PACE)
SKIPPED = Finding(Repro(INCIDENT, "product", "cpu"), Evidence(skipped="needs 1 GPU; this run has 0"), PACE)


@pytest.fixture(scope="module")
def here() -> Fingerprint:
    return fingerprint.take("cpu", "cpu")


def test_round_trip(here: Fingerprint, tmp_path: Path) -> None:
    path = ledger.create(tmp_path, here)
    written = [ledger.entry(finding, here) for finding in (RED, CAUGHT, MISSED, SKIPPED)]
    for entry in written:
        ledger.append(path, entry)
    assert ledger.read_all(tmp_path) == (written, [])
    assert [entry.ok for entry in written] == [False, True, False, True]
    assert [entry.verdict for entry in written] == [
        ReproVerdict.WRONG,
        ReproVerdict.WRONG,
        ReproVerdict.PASSED,
        ReproVerdict.SKIPPED,
    ]
    assert written[2].reason is not None
    assert "the detector did not fire: expected WRONG, got PASSED" in written[2].reason


def test_runs_do_not_share_a_file(here: Fingerprint, tmp_path: Path) -> None:
    assert len({ledger.create(tmp_path, here) for _ in range(3)}) == 3


def test_damaged_lines_are_named(here: Fingerprint, tmp_path: Path) -> None:
    path = ledger.create(tmp_path, here)
    ledger.append(path, ledger.entry(RED, here))
    whole = path.read_text()
    path.write_text(whole + whole[:100] + "\n" + whole.replace('"schema_version":1', '"schema_version":2'))
    entries, damaged = ledger.read([path])
    assert len(entries) == 1
    assert [line.split(" ")[0] for line in damaged] == [f"{path}:2:", f"{path}:3:"]


def test_an_injected_fault_is_recorded_as_such(here: Fingerprint) -> None:
    entry = ledger.entry(replace(RED, repro=replace(RED.repro, inject="tie-break")), here)
    assert entry.injected == "tie-break"
    assert entry.command.endswith("--inject tie-break")


def test_junit(tmp_path: Path) -> None:
    path = tmp_path / "new" / "junit.xml"
    for _ in range(2):  # also over the file of an earlier run
        ledger.write_junit(path, [RED, CAUGHT, MISSED, SKIPPED])
    suite = ElementTree.parse(path).getroot()
    assert (suite.get("tests"), suite.get("failures"), suite.get("skipped")) == ("4", "2", "1")
    failures = [failure.get("message") or "" for failure in suite.iter("failure")]
    assert failures[0] == "a-repro: WRONG: wrong: row ? 3 <"
    assert failures[1].startswith("a-repro: the detector did not fire")
    assert [skip.get("message") for skip in suite.iter("skipped")] == ["needs 1 GPU; this run has 0"]
    assert [p.name for p in path.parent.iterdir()] == ["junit.xml"]
