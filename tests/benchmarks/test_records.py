"""A record without a green gate holds no number; a damaged line is named, never a crash."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import records
from benchmarks.records import Check, Gate, Outcome, Record
from tests.benchmarks.synthetic import FINGERPRINT, GREEN, failed, key, passed


@pytest.mark.parametrize(
    "record",
    [passed(key()), failed(key(implementation="sdpa-flash"), Outcome.UNSUPPORTED, "no <kernel> & no 'luck'")],
    ids=["passed", "failed"],
)
def test_reads_back_what_was_written(tmp_path: Path, record: Record) -> None:
    path = records.run_path(tmp_path, FINGERPRINT)
    records.append(path, record)
    records.append(path, record)
    assert records.read_runs(tmp_path) == ([record, record], [])


def test_run_path_names_machine_time_and_commit(tmp_path: Path) -> None:
    assert records.run_path(tmp_path, FINGERPRINT) == tmp_path / "runs/cpu/20260102T030405Z-0123456789.jsonl"


@pytest.mark.parametrize("outcome", [outcome for outcome in Outcome if outcome is not Outcome.PASSED])
@pytest.mark.parametrize(
    "number", [{"latency_ms": 1.0}, {"samples_ms": (1.0,)}, {"tokens_per_s": 1.0}, {"peak_mem_mib": 0.0}], ids=str
)
def test_no_number_unless_passed(outcome: Outcome, number: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must be None with outcome"):
        Record(key(), outcome, "a reason", FINGERPRINT, "command", GREEN, **number)


@pytest.mark.parametrize("error", [3e-7, None], ids=["beyond the budget", "not finite"])
def test_passed_needs_a_green_gate(error: float | None) -> None:
    red = Gate(8, (Check("o", 1e-7, 2e-7), Check("dq", error, 2e-7)), "torch")
    for gate in (None, red):
        with pytest.raises(ValueError, match="needs a green gate"):
            Record(key(), Outcome.PASSED, None, FINGERPRINT, "command", gate, latency_ms=1.0)


@pytest.mark.parametrize("latency_ms", [0.0, -1.0, float("nan"), float("inf")])
def test_a_number_is_a_number(latency_ms: float) -> None:
    with pytest.raises(ValueError, match="latency_ms must be finite and above 0"):
        Record(key(), Outcome.PASSED, None, FINGERPRINT, "command", GREEN, latency_ms=latency_ms)


def test_passed_needs_a_number_and_failure_a_reason() -> None:
    with pytest.raises(ValueError, match="PASSED needs a number"):
        Record(key(), Outcome.PASSED, None, FINGERPRINT, "command", GREEN)
    with pytest.raises(ValueError, match="CRASHED needs a reason"):
        Record(key(), Outcome.CRASHED, None, FINGERPRINT, "command")


def test_damaged_lines_are_named_and_the_rest_is_read(tmp_path: Path) -> None:
    good = passed(key())
    tampered = json.loads(good.to_json()) | {"outcome": "INCORRECT", "reason": "wrong"}
    lines = [good.to_json(), good.to_json()[:100], "[]", '{"schema_version": 99}', json.dumps(tampered)]
    path = tmp_path / "runs" / "cpu" / "a.jsonl"
    path.parent.mkdir(parents=True)
    path.write_bytes("\n".join(lines).encode() + b"\n\xff\xfe\n" + good.to_json().encode())
    found, damaged = records.read_runs(tmp_path)
    assert found == [good, good]
    assert [(line.path, line.line) for line in damaged] == [(path, number) for number in (2, 3, 4, 5, 6)]
    assert "schema_version must be 1; got 99" in damaged[2].why
    assert "must be None with outcome INCORRECT" in damaged[3].why


def test_name_holds_what_tells_cases_apart() -> None:
    assert key().name == "prefill-forward/4x2x16/b1/s64/float32/nsa"
    assert dataclasses.replace(key(), head_dim_v=8).what == "4x2x16:8"
    assert key("train-step", model="125m").case == "train-step/125m/b1/s64/float32"
