"""`pytest benchmarks/workloads`: collected, filtered and exported as usual, with our samples and our verdict."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.history import run_file, samples
from harness.repository import ROOT

CASE = "prefill-forward/8x2x64/b1/s512/float32"
NAMED = f"{CASE}/nsa or {CASE}/sdpa-flash"

WRONG_NSA = """
from nsa import torch_backend
right = torch_backend.combine
torch_backend.combine = lambda *arguments: right(*arguments) * 1.001
"""


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """pytest on the cases in a process of its own: the plugin is left out of the tests' own."""
    words = [sys.executable, "-m", "pytest", "benchmarks/workloads", "-p", "no:cacheprovider", "--gpu", "cpu"]
    own = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}  # xdist's worker
    environment = {**own, "PYTHONPATH": os.pathsep.join([str(ROOT), str(folder)]), "OMP_NUM_THREADS": "1"}
    done = [*words, "--results", str(folder), *arguments]
    return subprocess.run(done, cwd=ROOT, capture_output=True, text=True, env=environment, timeout=600)


def test_samples_and_records_are_ours(tmp_path: Path) -> None:
    exported = tmp_path / "exported.json"
    done = run(tmp_path, "-k", NAMED, "--benchmark-json", str(exported))
    assert done.returncode == 0, done.stdout
    assert " 2 passed" in done.stdout
    found, damaged = run_file.read_all(tmp_path)
    assert damaged == []
    (path,) = (tmp_path / "runs" / "cpu").glob("*.jsonl")
    samples_ms = {raw.name: raw.samples_ms for raw in samples.read_raw(path)}
    data = json.loads(exported.read_text())
    assert data["machine_info"]["nsa"]["machine"] == "cpu"
    for record, shown in zip(found, sorted(data["benchmarks"], key=lambda one: one["name"], reverse=True), strict=True):
        assert shown["name"] == f"test_case[{record.key.name}]"
        assert shown["group"] == CASE
        assert shown["stats"]["data"] == [sample / 1e3 for sample in samples_ms[record.key.name]]
        assert shown["stats"]["median"] * 1e3 == pytest.approx(record.latency_ms)
        assert shown["extra_info"]["command"] == record.command


def test_a_wrong_nsa_fails_and_writes_why(tmp_path: Path) -> None:
    (tmp_path / "wrong_nsa.py").write_text(WRONG_NSA)
    done = run(tmp_path, "-p", "wrong_nsa", "-k", f"{CASE}/nsa")
    assert done.returncode == 1
    assert "INCORRECT: o: error " in done.stdout
    ((record,), _) = run_file.read_all(tmp_path)
    assert record.outcome.value == "INCORRECT"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["-p", "no:benchmark"],
            "benchmarks/workloads needs pytest-benchmark: install it, and leave out -p no:benchmark",
        ),
        (["--gpu", "h200"], "this session needs an NVIDIA H200; found: "),
    ],
)
def test_what_cannot_run_says_so_before_it_measures(arguments: list[str], said: str, tmp_path: Path) -> None:
    done = run(tmp_path, *arguments)
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert said in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_quick_is_the_default_and_a_part_of_the_whole(tmp_path: Path) -> None:
    quick, whole = (
        set(run(tmp_path, "--collect-only", "-q", "-k", "decode", *more).stdout.splitlines())
        for more in ([], ["--full"])
    )
    names = {line for line in quick if "test_case[decode/" in line}
    assert names
    assert names < whole
