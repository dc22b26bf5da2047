"""The machines that people have: `python -m benchmarks run --quick` on each, with an NVML that tells of it.

The GPU is a fake and every figure is the CPU's, which each record says. Two run as a user types it, in a process whose
children measure; the others in this process. What is tried of one case is the machine's key, its conditions, what the
console says of them, and who is refused.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import runner, worker
from benchmarks.__main__ import main
from benchmarks.cases.outcome import CaseOutcome
from benchmarks.history import reservations, run_file
from benchmarks.history.records import Record
from benchmarks.timing.gpu_watch import COOLED, OTHER_PROCESS, WAITED
from harness.repository import ROOT
from tests.fake_nvml import process
from tests.fake_nvml.boards import ALONE, BOARDS, Board, Course, OnGpu

CASE = "prefill-forward/8x2x64/b1/s512/float32/nsa"
IN_THIS_PROCESS = ("a100-80gb-sxm", "a100-80gb-pcie-capped-200w", "a100-40gb-pcie", "a100-80gb-sxm-mig-3g-40gb")
IN_A_NEW_ONE = ("3090", "gpu-geforce-rtx-5090")


def recorded(results: Path, machine: str) -> Record:
    """The one record of the run, which lies under this machine's name and says that the figure is the CPU's."""
    (found,), damaged = run_file.read_all(results)
    assert damaged == []
    assert [path.name for path in (results / "runs").iterdir()] == [machine]
    assert (found.fingerprint.machine, found.outcome) == (machine, CaseOutcome.PASSED)
    assert found.fingerprint.device == BOARDS[machine].name
    assert found.fingerprint.cpu.endswith(f"({process.SAID})")
    assert f"--gpu {machine} " in found.command
    assert found.fingerprint.gpu_clocks is not None
    assert found.fingerprint.gpu_settings is not None
    return found


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measures in this process, and without a user's rights to the clocks."""
    monkeypatch.setattr(worker, "run", runner.run)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("machine", IN_THIS_PROCESS)
def test_each_board_is_measured_under_its_own_key(
    machine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    process.install(monkeypatch, BOARDS[machine])
    assert main(["run", "--quick", "--cases", CASE, "--out", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    found = recorded(tmp_path, machine)
    assert json.loads(said.splitlines()[-1])["machine"] == machine
    assert f"{process.SAID}: NVIDIA A100" in said
    assert found.gpu_conditions == {}
    settings, clocks = found.fingerprint.gpu_settings, found.fingerprint.gpu_clocks
    assert settings is not None
    assert clocks is not None
    assert settings.capped is ("-capped-" in machine) is ("200 W, the board's own is 300 W: this is the" in said)
    assert ("PCIe 80 GB, capped to 200 W" in said) is settings.capped
    assert clocks.power_limit_w == (200.0 if settings.capped else 400.0)
    assert (settings.may_lock_clocks is False) is (machine == "a100-40gb-pcie") is ("no right to lock" in said)
    assert ("a MIG slice" in said) is ("-mig-" in machine)


def typed(machine: str, results: Path, other_pid: int | None) -> subprocess.CompletedProcess[str]:
    """What a user types, on that machine."""
    command = [sys.executable, "-m", "benchmarks", "run", "--quick", "--cases", CASE, "--out", str(results)]
    environment = {**process.variables(machine, other_pid), "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)


@pytest.mark.parametrize("machine", IN_A_NEW_ONE)
def test_a_command_whose_children_measure_meets_the_same_machine(machine: str, tmp_path: Path) -> None:
    done = typed(machine, tmp_path, os.getpid())
    assert done.returncode == 0, done.stderr
    found = recorded(tmp_path, machine)
    noticed: Any = found.gpu_conditions
    marks = reservations.with_device(found, found.fingerprint)
    if machine == "3090":
        assert f"pid {os.getpid()}, 8000 MiB, SMs 97 % busy) to end" in noticed[WAITED]
        assert noticed[COOLED] == "waited 20 s to cool from 90 to 74 degrees C"
        assert all(f"note: {noticed[name]}" in done.stdout for name in (WAITED, COOLED))
        assert "the GPU draws a screen" in marks
    else:
        assert noticed == {}
        assert "the GPU draws a screen" not in marks
    assert "persistence mode is off" in done.stdout


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("board", "why"),
    [
        (BOARDS["a100-40gb-sxm"].telling(processes=(OnGpu(),)), "computed on the GPU too, for as long as was waited"),
        (BOARDS["vgpu"], "is a vGPU: other guests"),
    ],
    ids=["another process", "vGPU"],
)
def test_what_no_figure_can_be_had_of_is_refused(
    board: Board, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    process.install(monkeypatch, board, os.getppid())
    assert main(["run", "--quick", "--cases", CASE, "--out", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert why in said
    assert (f"pid {os.getppid()}" in said) is (board is not BOARDS["vgpu"])
    assert run_file.read_all(tmp_path) == ([], [])


@pytest.mark.usefixtures("here")
def test_a_process_that_comes_during_the_run_is_in_the_record_and_on_the_console(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    at_first = (ALONE,) * 6
    board = BOARDS["a100-40gb-sxm"].telling(processes=Course((*at_first, (OnGpu(),))))
    process.install(monkeypatch, board, os.getppid())
    assert main(["run", "--quick", "--cases", CASE, "--out", str(tmp_path)]) == 0
    found = recorded(tmp_path, "a100-40gb-sxm")
    assert found.gpu_conditions is not None
    words = found.gpu_conditions[OTHER_PROCESS]
    assert f"pid {os.getppid()}" in words
    assert reservations.of(found)[OTHER_PROCESS] == words
    said = capsys.readouterr().out
    assert f"NOT TRUSTWORTHY: {words}" in said
    assert "1 beside another process on the GPU" in said
