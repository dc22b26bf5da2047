"""Every end of a child becomes a verdict, and what must be alone runs alone."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

import pytest

from regression import child, listing, runner
from regression.contract import Bound, Evidence, Incident, Needs, ReproVerdict
from regression.detectors.backends import COMPILING_S
from regression.runner import Finding, Repro
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


def test_passes() -> None:
    finding = found("passes")
    assert finding.verdict is ReproVerdict.PASSED
    assert finding.ok
    assert finding.reason is None
    assert finding.pace.steps == 3
    assert finding.pace.figures == {"loss": pytest.approx(1 / 3), "bad": None, "low": None}
    assert {aspect.name for aspect in finding.aspects} == {"wrong", "error"}


def test_a_repro_is_given_the_backends_that_can_be_imported() -> None:
    assert found("names_its_backends").evidence.notes == child.backends()


@pytest.mark.parametrize(
    ("part", "verdict", "words"),
    [
        ("wrong", ReproVerdict.WRONG, "row 3"),
        ("says_nothing", ReproVerdict.WRONG, "no evidence"),
        ("skips", ReproVerdict.SKIPPED, "skipped although the machine has what it needs: no mood"),
        ("raises", ReproVerdict.CRASHED, "KeyError: 'k'"),
        ("runs_out_of_memory", ReproVerdict.OUT_OF_MEMORY, "MemoryError: no more"),
        ("exits", ReproVerdict.CRASHED, "status 3 without evidence; the end of its log: last line"),
        ("segfaults", ReproVerdict.CRASHED, "status -11"),
        ("no_such_function", ReproVerdict.CRASHED, "AttributeError"),
        ("gives_the_wrong_type", ReproVerdict.CRASHED, "what it sent cannot be read: TypeError"),
        ("garbles_an_event", ReproVerdict.CRASHED, "what it sent cannot be read: JSONDecodeError"),
        ("leaves_a_word_out", ReproVerdict.CRASHED, "what it sent cannot be read: KeyError: 'at'"),
    ],
)
def test_ends(part: str, verdict: ReproVerdict, words: str) -> None:
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
    incident = replace(repros.INCIDENT, expects=ReproVerdict.CRASHED, says="strict_asserts")
    assert Finding(Repro(incident, "faulty", DEVICE), evidence, PACE).ok is caught


@pytest.mark.parametrize("part", ["raises", "exits", "segfaults", "no_such_function"])
def test_a_faulty_variant_that_dies_is_not_caught(part: str) -> None:
    finding = found(part)
    incident = replace(repros.INCIDENT, expects=ReproVerdict.CRASHED, says="row 3")
    faulty = replace(finding, repro=Repro(incident, "faulty", DEVICE))
    assert not faulty.ok
    assert "expected CRASHED from a detector that observed it" in (faulty.reason or "")


@pytest.mark.parametrize(("ops", "caught"), [(2.0, True), (1.0, False)])
def test_every_aspect_that_an_incident_names_must_fire(ops: float, caught: bool) -> None:
    """One of two detectors of the same fault is blind: the verdict alone would not show it."""
    incident = replace(repros.INCIDENT, expects=ReproVerdict.SLOW, fires=("ops", "host_syncs"))
    evidence = Evidence(ops=Bound(ops, 1.0), host_syncs=Bound(1, 0))
    finding = Finding(Repro(incident, "faulty", DEVICE), evidence, PACE)
    assert finding.verdict is ReproVerdict.SLOW
    assert finding.ok is caught
    assert caught or "expected SLOW with ops red too" in (finding.reason or "")


def test_a_crash_that_is_expected_must_be_named() -> None:
    with pytest.raises(ValueError, match="says must name the crash"):
        replace(repros.INCIDENT, expects=ReproVerdict.CRASHED)


def test_an_aspect_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match=r"fires must be among end, .*; got opps"):
        replace(repros.INCIDENT, fires=("opps",))


def test_guard_that_is_killed_is_noticed() -> None:
    finding = found("kills_its_guard")
    assert finding.verdict is ReproVerdict.CRASHED
    assert "without evidence" in (finding.reason or "")


def test_a_stall_is_a_verdict_with_its_stacks() -> None:
    finding = found("stalls")
    assert finding.verdict is ReproVerdict.STALLED
    assert "in stalls" in (finding.evidence.stacks or "")


def test_slow_is_not_stalled() -> None:
    """2 s of silence are fine for one that takes 0.7 s a step, though the floor is 1 s."""
    assert found("slow_but_alive").verdict is ReproVerdict.PASSED


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
    assert finding.allowed_skip
    assert finding.reason == "needs 2 GPUs; this run has 1"


@pytest.mark.gpu
def test_a_poisoned_context_does_not_reach_the_next_child() -> None:
    poisoned = found("poisons_the_context", LOADS_CUDA)
    assert poisoned.verdict is ReproVerdict.CRASHED
    assert "CUDA" in (poisoned.reason or "")
    assert found("uses_the_gpu", LOADS_CUDA).verdict is ReproVerdict.PASSED


@pytest.mark.gpu
def test_a_host_sync_in_a_graph_is_seen_by_the_capture_itself() -> None:
    finding = found("a_graph_of_a_host_sync", LOADS_CUDA)
    assert finding.verdict is ReproVerdict.WRONG
    assert "no CUDA graph" in (finding.reason or "")
