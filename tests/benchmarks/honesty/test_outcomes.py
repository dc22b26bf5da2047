"""What a run says of a fault: exit codes, the last line, red baselines, and no page that shows it as good."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.cases.outcome import CaseOutcome
from benchmarks.report.pages import build
from containers import pipeline
from containers.pipeline import PipelineStep, PipelineStepResult
from tests.benchmarks.honesty.conftest import Run
from tests.benchmarks.honesty.pages import DENSE, Cells, page
from tests.benchmarks.stored import write
from tests.benchmarks.synthetic import failed, key, passed

FAULTS = ["INCORRECT", "NONFINITE", "CRASHED", "STALLED", "COMPILE_ERROR"]


@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_of_nsa_ends_a_run_with_1(fault: str, run: Run) -> None:
    wrong = failed(key(), CaseOutcome(fault), "why")
    code, told = run([passed(DENSE), wrong, passed(key(length=128))])
    assert (code, told["faults"]) == (1, [key().name])
    assert told["outcomes"] == {"PASSED": 2, fault: 1}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_red_baseline_is_named_on_the_last_line(fault: str, run: Run) -> None:
    code, told = run([failed(DENSE, CaseOutcome(fault), "why"), passed(key())])
    assert (code, told["faults"]) == (0, [])
    assert told["red_baselines"] == {DENSE.name: fault}


def test_a_baseline_that_is_absent_or_refuses_is_not_red(run: Run) -> None:
    outcomes = (CaseOutcome.NOT_PRESENT, CaseOutcome.UNSUPPORTED, CaseOutcome.OUT_OF_MEMORY, CaseOutcome.THROTTLED)
    _, told = run([*(failed(DENSE, outcome, "why") for outcome in outcomes), passed(key())])
    assert told["red_baselines"] == {}


def test_a_red_baseline_is_in_the_summary_of_a_pipeline_and_on_the_page(tmp_path: Path) -> None:
    step = PipelineStep("bench", "bench", ())
    text = pipeline.summary(
        [PipelineStepResult(step, 0, 1.0, {"faults": [], "red_baselines": {DENSE.name: "INCORRECT"}})]
    )
    assert DENSE.name in text
    assert "INCORRECT" in text
    write(tmp_path, failed(DENSE, CaseOutcome.INCORRECT, "why"), passed(key()))
    said = f"NSA is wrong on none; of the baselines {DENSE.name} is INCORRECT."
    assert said in Cells(build(tmp_path).index).text


@pytest.mark.parametrize("outcome", [*FAULTS, "THROTTLED", "OUT_OF_MEMORY"])
def test_no_page_shows_passed_or_good_for_what_did_not_pass(outcome: str, tmp_path: Path) -> None:
    write(tmp_path, failed(key(), CaseOutcome(outcome), "why"))
    found = page(tmp_path)
    assert found.row(key().case, outcome)
    assert found.kinds(outcome) == {"bad"}
    assert found.kinds("PASSED") == set()
    index = Cells(tmp_path / "report" / "index.html")
    assert "0 of 1 measurements passed" in index.text
    assert (f"NSA is wrong on {key().case}" in index.text) == (outcome in FAULTS)


def test_the_summary_counts_what_passed(tmp_path: Path) -> None:
    refused = failed(key(implementation="sdpa-cudnn"), CaseOutcome.UNSUPPORTED, "why")
    write(tmp_path, passed(DENSE), refused, passed(key()))
    assert page(tmp_path).kinds("PASSED") == {"good"}
    assert "2 of 3 measurements passed; NSA is wrong on none." in Cells(tmp_path / "report" / "index.html").text
