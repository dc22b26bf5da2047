"""What a run prints stays readable, whatever a repro had to say."""

from __future__ import annotations

from dataclasses import replace

from regression import session
from regression.contract import Evidence
from tests.regression.test_ledger import CAUGHT, RED


def test_a_line_of_progress() -> None:
    finding = replace(CAUGHT, evidence=Evidence(wrong=("row 3",)))
    assert session.progress(finding, 3, 62, 12.3) == (
        "[ 3/62   12 s] a-repro                faulty   WRONG         caught: row 3"
    )


def test_a_long_reason_is_one_line_of_progress_and_whole_in_the_finding() -> None:
    said = "RuntimeError: CUDA error\n" + "word " * 200 + "end"
    finding = replace(RED, evidence=Evidence(exception=said))
    line = session.progress(finding, 1, 2, 0.0)
    assert "\n" not in line
    assert line.endswith("…")
    reason = line[line.index("RED: ") :]
    assert len(reason) == 160
    assert reason.startswith("RED: CRASHED: end: RuntimeError: CUDA error word word")
    assert said in (finding.reason or "")
