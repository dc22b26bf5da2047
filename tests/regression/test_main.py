"""The command line: exit codes, the last line, and that a fault in the product turns it red."""

from __future__ import annotations

import importlib.util
import json
import random
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock
from xml.etree import ElementTree

import pytest
import torch

from harness.interrupt import INTERRUPTED
from harness.repository import ROOT
from regression import __main__ as cli
from regression import ledger, listing, runner
from regression.contract import Evidence, Needs
from regression.incidents import tie_break
from regression.runner import Finding, Repro
from tests.regression import repros
from tests.regression.test_ledger import PACE


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any], str]:
    """Exit code, the last line of stdout, and all of it."""
    code = cli.main(["run", "--device", "cpu", *arguments])
    out = capsys.readouterr().out
    return code, json.loads(out.splitlines()[-1]), out


def test_green_run(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code, summary, out = run(capsys, "loader-stall", "--out", str(tmp_path), "--junitxml", str(tmp_path / "j.xml"))
    assert code == 0
    assert summary["red"] == []
    assert summary["incidents"] == 1
    assert "caught: STALLED" in out
    assert summary["records"].startswith("regression/cpu/")  # seen from here
    entries, damaged = ledger.read([Path(summary["records"])])
    assert damaged == []
    assert {(entry.part, entry.verdict.value, entry.ok) for entry in entries} == {
        ("faulty", "STALLED", True),
        ("product", "PASSED", True),
    }
    assert "loader-stall" in (tmp_path / "j.xml").read_text()


def test_a_fault_in_the_product_turns_it_red(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, summary, out = run(capsys, "--inject", "tie-break", "--out", str(tmp_path))
    assert code == 1
    assert summary["red"] == ["tie-break"]
    assert "RED" in out


@pytest.mark.nightly
def test_any_fault_in_the_product_turns_it_red(tmp_path: Path, device: torch.device) -> None:
    """Twelve at random, each in a suite of its own that is judged by its exit code and its output alone."""
    missed = []
    for incident_id in random.sample(listing.IDS, 12):
        command = [sys.executable, "-m", "regression", "run", "--inject", incident_id, "--device", device.type]
        suite = subprocess.run([*command, "--out", tmp_path], cwd=ROOT, capture_output=True, text=True, check=False)
        if suite.returncode != 1 or f'"red": ["{incident_id}"]' not in suite.stdout:
            missed.append(f"{incident_id}: exit code {suite.returncode}\n{suite.stdout}{suite.stderr}")
    assert missed == []


def test_a_detector_that_does_not_fire_turns_it_red(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both halves pass, and one of them should not."""
    monkeypatch.setattr(listing, "IDS", ("a-repro",))
    monkeypatch.setattr(listing, "module_of", lambda _id: repros.__name__)
    code, summary, out = run(capsys, "--out", str(tmp_path))
    assert code == 1
    assert summary["red"] == ["a-repro"]
    assert "the detector did not fire: expected WRONG, got PASSED" in out


def test_nothing_checked_is_no_success(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tie_break, "INCIDENT", replace(tie_break.INCIDENT, needs=Needs.GPU))
    code, summary, _ = run(capsys, "tie-break", "--out", str(tmp_path))
    assert code == 2
    assert summary["skipped"] == {"tie-break": "needs 1 GPU; this run has 0"}


def test_an_interrupted_run_is_not_green_in_junit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of two is done when the CI cancels the job."""

    def interrupted(repros: Sequence[Repro], **_: int) -> Iterator[Finding]:
        yield Finding(repros[0], Evidence(wrong=("w",)), PACE)
        raise KeyboardInterrupt

    monkeypatch.setattr(runner, "run", interrupted)
    path = tmp_path / "j.xml"
    arguments = ["run", "tie-break", "--device", "cpu", "--out", str(tmp_path), "--junitxml", str(path)]
    assert cli.main(arguments) == INTERRUPTED
    suite = ElementTree.parse(path).getroot()
    assert (suite.get("tests"), suite.get("failures"), suite.get("errors")) == ("2", "0", "1")
    assert [case.get("name") for case in suite if case.find("error") is not None] == ["product"]


def test_junit_that_cannot_be_written_is_refused_before_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["run", "tie-break", "--device", "cpu", "--out", str(tmp_path), "--junitxml", str(tmp_path)]) == 2
    said = capsys.readouterr()
    assert "is a folder" in said.err
    assert said.out == ""


def test_the_last_line_names_the_backends_of_the_repros(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a repro names them itself, and with Triton all three."""

    def one_that_names_them(repros_of_it: Sequence[Repro], **arguments: Any) -> Iterator[Finding]:
        return run_all([replace(repros_of_it[1], part="names_its_backends")], **arguments)

    run_all = runner.run
    monkeypatch.setattr(listing, "IDS", ("a-repro",))
    monkeypatch.setattr(listing, "module_of", lambda _id: repros.__name__)
    monkeypatch.setattr(runner, "run", one_that_names_them)
    code, summary, _ = run(capsys, "--out", str(tmp_path))
    assert code == 0
    entries, _ = ledger.read_all(tmp_path)
    [entry] = entries
    assert summary["backends"] == list(entry.evidence.notes)
    if importlib.util.find_spec("triton") is not None:
        assert summary["backends"] == ["reference", "torch", "triton"]


def test_a_run_without_triton_says_what_it_did_not_prove(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All green is not all: the backend stands beside the skipped incidents, and in the text."""
    monkeypatch.setattr(runner, "run", lambda repros, **_: iter([Finding(repros[1], Evidence(wrong=()), PACE)]))
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "triton" else found(name))
    code, summary, out = run(capsys, "tie-break", "--out", str(tmp_path))
    assert code == 0
    assert summary["backends"] == ["reference", "torch"]
    assert list(summary["skipped"]) == ["backend triton"]
    assert "skipped: backend triton: Triton is not installed" in out


def test_the_summary_is_printed_though_junit_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The disk is full at the end of the run."""
    monkeypatch.setattr(runner, "run", lambda repros, **_: iter([Finding(repros[0], Evidence(wrong=("w",)), PACE)]))
    monkeypatch.setattr(ledger, "write_junit", mock.Mock(side_effect=OSError("no space left")))
    path = str(tmp_path / "j.xml")
    assert cli.main(["run", "tie-break", "--device", "cpu", "--out", str(tmp_path), "--junitxml", path]) == 2
    said = capsys.readouterr()
    assert json.loads(said.out.splitlines()[-1])["incidents"] == 1
    assert "no space left" in said.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["no-such"], "no incident is called 'no-such'"),
        (["--inject", "no-such"], "no incident is called 'no-such'"),
        (["--jobs", "0"], "--jobs must be at least 1; got 0"),
        (["--soak", "0"], "--soak must be above 0 minutes; got 0.0"),
        (["--soak", "nan"], "--soak must be above 0 minutes; got nan"),
        (["tie-break", "--soak", "1"], "--soak trains instead"),
        (["-k", "no-such"], "no incident's id contains 'no-such'"),
        (["-k", "tie", "dup-blocks"], "-k chooses incidents by a part of their id"),
    ],
)
def test_wrong_arguments(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", "--device", "cpu", *arguments]) == 2
    assert words in capsys.readouterr().err


def test_exit_code_passes_through_a_pipe(tmp_path: Path) -> None:
    """As a CI calls it: `pipefail` keeps the red one."""
    line = (
        f"set -o pipefail; '{sys.executable}' -m regression run no-such --out '{tmp_path}' 2>&1 | tee '{tmp_path}/log'"
    )
    assert subprocess.run(["bash", "-c", line], cwd=ROOT, stdout=subprocess.DEVNULL, check=False).returncode == 2
