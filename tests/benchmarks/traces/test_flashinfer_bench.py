"""flashinfer-bench's own tools read what `export` writes; `nox -s traces` installs them, without what needs a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from benchmarks.__main__ import main
from benchmarks.cases.outcome import CaseOutcome
from benchmarks.history import run_file
from benchmarks.traces import dataset, definition, trace
from tests.benchmarks.synthetic import CONFIG, FINGERPRINT, failed, key, passed

fib = pytest.importorskip("flashinfer_bench.data", reason="flashinfer-bench is not installed; `nox -s traces` tests it")

RECORDS = [
    *(passed(key(mode, length=length)) for mode in definition.KINDS for length in (64, 128)),
    passed(key(implementation="sdpa-flash")),
    *(failed(key(), outcome, "why") for outcome in trace.STATUS if outcome is not CaseOutcome.PASSED),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the cases of every suite, and a trace of each status."""
    results = tmp_path_factory.mktemp("results")
    path = run_file.create(results, FINGERPRINT)
    for record in RECORDS:
        run_file.append(path, record)
    exported = tmp_path_factory.mktemp("exported") / "set"
    assert main(["export", "--format", "flashinfer-bench", str(exported), "--results", str(results)]) == 0
    return exported


def test_its_own_classes_take_every_file(folder: Path) -> None:
    """Each workload and trace is of a definition, and gives every input of it a shape."""
    found = fib.TraceSet.from_path(str(folder))
    assert len(found.definitions) == len(list((folder / "definitions").rglob("*.json")))
    assert sum(map(len, found.traces.values())) == len(RECORDS)
    statuses = Counter(one.evaluation.status.value for traces in found.traces.values() for one in traces)
    assert statuses == Counter(trace.STATUS[record.outcome] for record in RECORDS)
    for name, traces in [*found.workloads.items(), *found.traces.items()]:
        for one in traces:
            shapes = found.definitions[name].get_input_shapes(one.workload.axes)
            assert len(shapes) == len(one.workload.inputs)
    (decode,) = (one for one in found.definitions.values() if one.name == definition.name(key("decode")))
    assert decode.const_axes == {
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim_k": 16,
        "head_dim_v": 16,
        "num_branches": 3,
    }
    assert len(CONFIG.__dataclass_fields__) == sum(
        f"'{field}'" in decode.reference for field in CONFIG.__dataclass_fields__
    )


def test_its_command_line_sums_them_up(folder: Path) -> None:
    program = (
        "import logging, sys; from flashinfer_bench.cli import main; logging.basicConfig(level='INFO'); main.cli()"
    )
    command = [sys.executable, "-c", program, "report", "best", "--local", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = fib.TraceSet.from_path(str(folder)).summary()
    green = sum(record.outcome is CaseOutcome.PASSED for record in RECORDS)
    assert (found["total"], found["passed"]) == (len(RECORDS), green)
    assert found["min_latency_ms"] == 10.0


def test_what_its_tools_rewrite_comes_back_as_it_was(folder: Path, tmp_path: Path) -> None:
    found = fib.TraceSet.from_path(str(folder))
    for name, traces in found.traces.items():
        fib.save_jsonl_file(traces, tmp_path / "traces" / f"{name}.jsonl")
    back, refused = dataset.read(tmp_path)
    assert refused == []
    assert Counter(map(run_file.full_line, back)) == Counter(map(run_file.full_line, RECORDS))


def test_what_its_schema_forbids_is_seen() -> None:
    """That the classes accept everything here says something."""
    made = trace.encode(passed(key()))
    fib.Trace.model_validate_json(json.dumps(made))
    del made["evaluation"]["performance"]
    with pytest.raises(ValueError, match="must include performance"):
        fib.Trace.model_validate_json(json.dumps(made))
    case = definition.definition(key())
    case["inputs"]["q"]["shape"][0] = "batches"
    with pytest.raises(ValueError, match='references undefined axis "batches"'):
        fib.Definition.model_validate_json(json.dumps(case))
