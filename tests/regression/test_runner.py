"""Every end of a child becomes a verdict, and none of them leaves a process behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from benchmarks.history.fingerprint import ROOT
from regression import listing, runner
from regression.calls import COMPILING_S
from regression.deadline import Deadline
from regression.evidence import Bound, Evidence
from regression.incident import Incident, Needs
from regression.process import Child
from regression.runner import Finding, Repro
from regression.verdict import Verdict
from tests.regression import repros
from tests.regression.test_ledger import PACE

# "cuda", because a child for the CPU first imports PyTorch, and these repros do without
DEVICE = "cuda"
LOADS_CUDA = replace(repros.INCIDENT, floor_s=COMPILING_S)  # where the repro itself imports PyTorch and finds the GPU


@pytest.fixture(autouse=True)
def these_repros(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listing, "module_of", lambda _id: repros.__name__)


def found(part: str, incident: Incident = repros.INCIDENT) -> Finding:
    [finding] = runner.run([Repro(incident, part, DEVICE)], gpus=1, jobs=1)
    return finding


def alive(pids: list[int]) -> list[int]:
    """Which of them still run; a zombie that nobody has reaped yet runs no more."""

    def runs(pid: int) -> bool:
        try:
            return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    return [pid for pid in pids if runs(pid)]


def test_passes() -> None:
    finding = found("passes")
    assert finding.verdict is Verdict.PASSED
    assert finding.ok
    assert finding.reason is None
    assert finding.pace.steps == 3
    assert finding.pace.figures == {"loss": pytest.approx(1 / 3), "bad": None, "low": None}
    assert {aspect.name for aspect in finding.aspects} == {"wrong", "error"}


@pytest.mark.parametrize(
    ("part", "verdict", "words"),
    [
        ("wrong", Verdict.WRONG, "row 3"),
        ("says_nothing", Verdict.WRONG, "no evidence"),
        ("skips", Verdict.SKIPPED, "skipped although the machine has what it needs: no mood"),
        ("raises", Verdict.CRASHED, "KeyError: 'k'"),
        ("runs_out_of_memory", Verdict.OUT_OF_MEMORY, "MemoryError: no more"),
        ("exits", Verdict.CRASHED, "status 3 and said nothing; its last words: last words"),
        ("segfaults", Verdict.CRASHED, "status -11"),
        ("no_such_function", Verdict.CRASHED, "AttributeError"),
        ("gives_the_wrong_type", Verdict.CRASHED, "what it told cannot be read: TypeError"),
        ("garbles_an_event", Verdict.CRASHED, "what it told cannot be read: JSONDecodeError"),
        ("leaves_a_word_out", Verdict.CRASHED, "what it told cannot be read: KeyError: 'at'"),
    ],
)
def test_ends(part: str, verdict: Verdict, words: str) -> None:
    finding = found(part)
    assert finding.verdict is verdict
    assert not finding.ok
    assert words in (finding.reason or "")


@pytest.mark.parametrize(
    ("evidence", "caught"),
    [
        (Evidence(exception="NameError: strict_asserts"), True),
        (Evidence(exception="NameError: strict_asserts", uncaught=True), False),
        (Evidence(exception="ModuleNotFoundError: no_such_module"), False),
    ],
)
def test_a_crash_counts_as_caught_only_where_the_detector_saw_the_very_one(evidence: Evidence, caught: bool) -> None:
    incident = replace(repros.INCIDENT, expects=Verdict.CRASHED, says="strict_asserts")
    assert Finding(Repro(incident, "faulty", DEVICE), evidence, PACE).ok is caught


@pytest.mark.parametrize("part", ["raises", "exits", "segfaults", "no_such_function"])
def test_a_faulty_variant_that_dies_is_not_caught(part: str) -> None:
    finding = found(part)
    incident = replace(repros.INCIDENT, expects=Verdict.CRASHED, says="row 3")
    faulty = replace(finding, repro=Repro(incident, "faulty", DEVICE))
    assert not faulty.ok
    assert "expected CRASHED from a detector that observed it" in (faulty.reason or "")


@pytest.mark.parametrize(("ops", "caught"), [(2.0, True), (1.0, False)])
def test_every_aspect_that_an_incident_names_must_fire(ops: float, caught: bool) -> None:
    """One of two detectors of the same fault is blind: the verdict alone would not show it."""
    incident = replace(repros.INCIDENT, expects=Verdict.SLOW, fires=("ops", "host_syncs"))
    evidence = Evidence(ops=Bound(ops, 1.0), host_syncs=Bound(1, 0))
    finding = Finding(Repro(incident, "faulty", DEVICE), evidence, PACE)
    assert finding.verdict is Verdict.SLOW
    assert finding.ok is caught
    assert caught or "expected SLOW with ops red too" in (finding.reason or "")


def test_a_crash_that_is_expected_must_be_named() -> None:
    with pytest.raises(ValueError, match="says must name the crash"):
        replace(repros.INCIDENT, expects=Verdict.CRASHED)


def test_an_aspect_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match=r"fires must be among end, .*; got opps"):
        replace(repros.INCIDENT, fires=("opps",))


def test_guard_that_is_killed_is_noticed() -> None:
    finding = found("kills_its_guard")
    assert finding.verdict is Verdict.CRASHED
    assert "said nothing" in (finding.reason or "")


def test_guard_that_is_killed_takes_the_repro_along() -> None:
    task: dict[str, Any] = {
        "module": repros.__name__,
        "function": "kills_its_guard",
        "device": DEVICE,
        "inject": None,
        "options": {},
    }
    with Child("regression.child", task) as child:
        _until(lambda: child.events(0.1) and child.worker is not None)
        assert child.worker is not None
        pid = child.worker
        _until(lambda: not alive([pid]))


def test_slow_is_not_stalled() -> None:
    """2 s of silence are fine for one that takes 0.7 s a step, though the floor is 1 s."""
    assert found("slow_but_alive").verdict is Verdict.PASSED


def test_who_goes_on_making_steps_is_not_stalled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twenty steps of 0.6 s on the test's clock: together longer than any silence that is allowed between two."""

    class Told:
        running, now_s, left = True, 0.0, 20

        def events(self, wait_s: float) -> list[dict[str, Any]]:
            self.now_s += 0.6
            self.left -= 1
            step = {"event": "step", "at": self.now_s, "figures": {}}
            return [step if self.left else {"event": "ended", "status": 0}]

        def stacks(self) -> str:
            return ""

        last_words = stacks

    child, pace = Told(), Deadline(1.0)
    monkeypatch.setattr(runner, "time", SimpleNamespace(monotonic=lambda: child.now_s))
    pace.imported(0.0, 0.1)
    assert runner.watch(child, pace, threading.Event()).stalled_after_s is None  # type: ignore[arg-type]
    assert pace.allowed_s < 12 < child.now_s + 1


def test_stall_is_ended_with_its_stacks_and_all_its_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(repros.PIDS, str(tmp_path / "pids"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # other tests run repros at the same time
    finding = found("stalls")
    assert finding.verdict is Verdict.STALLED
    assert finding.evidence.stacks is not None
    assert "in stalls" in finding.evidence.stacks
    assert alive([int(pid) for pid in (tmp_path / "pids").read_text().split()]) == []
    assert [path.name for path in tmp_path.iterdir()] == ["pids"]


def test_what_a_repro_leaves_running_is_ended() -> None:
    finding = found("leaves_a_process")
    assert finding.verdict is Verdict.PASSED
    assert alive([int(finding.pace.figures["pid"] or 0)]) == []


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_runner_that_ends_in_the_middle_of_a_stall_leaves_nothing(how: signal.Signals, tmp_path: Path) -> None:
    """Not the repro, not its guard, not its children, whatever session they are in; and the next run works."""
    pids = tmp_path / "pids"
    environment = {**os.environ, repros.PIDS: str(pids), "TMPDIR": str(tmp_path)}
    with subprocess.Popen(
        [sys.executable, "-m", "tests.regression.stalled_run", "stalls"],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as suite:
        _until(pids.exists)
        running = [int(pid) for pid in pids.read_text().split()]
        assert alive(running) == running
        suite.send_signal(how)
        suite.wait(20)
        _until(lambda: not alive(running))
    _until(lambda: not list(tmp_path.glob("nsa-regression-*")))
    assert found("passes").verdict is Verdict.PASSED


def _until(true: Callable[[], object], within_s: float = 20.0) -> None:
    end = time.monotonic() + within_s
    while not true():
        assert time.monotonic() < end, "it did not come to pass"
        time.sleep(0.05)


def test_what_must_be_alone_runs_after_the_others_and_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four of them, each listed before one of three that only get on when all three run at once."""
    alone = replace(repros.INCIDENT, alone=True)
    planned = [Repro(alone, "passes", DEVICE), Repro(repros.INCIDENT, "passes", DEVICE)] * 3 + [
        Repro(alone, "wrong", DEVICE)
    ]
    all_three, running, company = threading.Barrier(3), list[Repro](), list[tuple[bool, int]]()

    def judged(repro: Repro, *_: object) -> Finding:
        running.append(repro)
        if not repro.incident.alone:
            all_three.wait(10)
        time.sleep(0.05)  # in which a neighbour would show
        company.append((repro.incident.alone, len(running)))
        running.remove(repro)
        return Finding(repro, Evidence(wrong=()), PACE)

    monkeypatch.setattr(runner, "_judged", judged)
    findings = list(runner.run(planned, gpus=1, jobs=7))
    assert len(findings) == len(planned)
    assert [alone for alone, _ in company] == [False] * 3 + [True] * 4
    assert [running for alone, running in company if alone] == [1] * 4


def test_two_gpus_are_needed() -> None:
    [finding] = runner.run([Repro(replace(repros.INCIDENT, needs=Needs.TWO_GPUS), "passes", DEVICE)], gpus=1, jobs=1)
    assert finding.ok
    assert finding.lawful_skip
    assert finding.reason == "needs 2 GPUs; this run has 1"


@pytest.mark.gpu
def test_a_poisoned_context_does_not_reach_the_next_child() -> None:
    poisoned = found("poisons_the_context", LOADS_CUDA)
    assert poisoned.verdict is Verdict.CRASHED
    assert "CUDA" in (poisoned.reason or "")
    assert found("uses_the_gpu", LOADS_CUDA).verdict is Verdict.PASSED


@pytest.mark.gpu
def test_a_host_sync_in_a_graph_is_seen_by_the_capture_itself() -> None:
    finding = found("a_graph_of_a_host_sync", LOADS_CUDA)
    assert finding.verdict is Verdict.WRONG
    assert "no CUDA graph" in (finding.reason or "")
