"""What no record can hold is found by its field, and what honest ones hold is let pass."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.commands import options
from benchmarks.history import merge, plausible, run_file
from tests.benchmarks.stored import write
from tests.benchmarks.synthetic import FINGERPRINT, key, passed


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ({"latency_ms": 1e300}, "record.latency_ms must be at most 1e+09; got 1e+300"),
        ({"latency_ms": -1e10}, "record.latency_ms must be at most 1e+09; got -1e+10"),
        ({"latency_ms": float("nan")}, "record.latency_ms must be at most 1e+09; got nan"),
        ({"interval_ms": (1.0, 1e12)}, "record.interval_ms[1] must be at most 1e+09"),
        ({"clocks": {"power_w_median": 1e9}}, "record.clocks.power_w_median must be at most 1e+06"),
        ({"tokens_per_s": 1e13}, "record.tokens_per_s must be at most 1e+12"),
        ({"steps": 10**60}, "record.steps must be at most 3.5e+38"),
        ({"reason": "a\x1b[31mb"}, "record.reason must hold no control characters; got 'a\\x1b[31mb'"),
        ({"reason": "a\u202eb"}, "record.reason must hold no control characters"),
        ({"reason": "a\rb"}, "record.reason must hold no control characters"),
        ({"a\x07": 1}, "a name in record must hold no control characters"),
        ({"reason": "two\nlines\tof words: é", "tokens_per_s": 1.3e8, "seed": 2**62, "passed": True, "x": None}, None),
        ({"flops": 1e18, "bytes_moved": 1e15, "first_step_s": 3e3, "samples": [1, 2.0], "loss": 1e38}, None),
    ],
)
def test_what_cannot_be(value: Any, why: str | None) -> None:
    found = plausible.objection(value, "record")
    assert found == why or (found is not None and why is not None and found.startswith(why))


def test_a_line_of_an_incident_is_refused_and_the_others_come_along(tmp_path: Path) -> None:
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    good = {"fingerprint": {}, "incident": "x", "verdict": "PASSED", "schema_version": 1}
    lines = [good, {**good, "pace": {"seconds": 1e300}}, {**good, "reason": "\x1b[2J"}]
    path = theirs / "regression" / "cpu" / "one.jsonl"
    path.parent.mkdir(parents=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    merged = merge.MergeResult()
    merge.merge(theirs, ours, merged)
    assert merged.new_lines == 1
    assert [one.partition(".jsonl:")[2] for one in merged.refused] == [
        "2: line.pace.seconds must be at most 3.5e+38; got 1e+300",
        "3: line.reason must hold no control characters; got '\\x1b[2J'",
    ]


def test_every_record_that_is_kept_would_be_merged_again() -> None:
    found = run_file.read_all(options.RESULTS)[0]
    if not found:
        pytest.skip(f"no run in {options.RESULTS}")
    assert [why for one in found if (why := merge.impossible(one))] == []


def test_a_record_names_its_case(tmp_path: Path) -> None:
    wild = dataclasses.replace(passed(key()), fingerprint=dataclasses.replace(FINGERPRINT, cpu="a\x1b[2J"))
    write(tmp_path / "theirs", wild)
    merged = merge.MergeResult()
    merge.merge(tmp_path / "theirs", tmp_path / "ours", merged)
    (why,) = merged.refused
    assert why.endswith(f"{wild.key.name}: record.fingerprint.cpu must hold no control characters; got 'a\\x1b[2J'")
