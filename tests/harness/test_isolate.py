"""A child ends in any way, and none leaves a process behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest

from harness import guard, isolate
from harness.isolate import Child
from harness.repository import ROOT
from tests.harness import workers
from tests.harness.processes import alive, until, watched

MODULE = workers.__name__


def test_guard_that_is_killed_takes_the_worker_along() -> None:
    with Child("tests.harness.workers", {"function": "kills_its_guard"}) as child:
        until(lambda: child.events(0.1) and child.worker is not None)
        assert child.worker is not None
        pid = child.worker
        until(lambda: not alive([pid]))


def test_the_log_of_a_child_that_was_asked_to_end_is_there() -> None:
    """The guard removes the folder of a parent that is gone, not of one that will read it."""
    with Child(MODULE, {"function": "starts_a_child"}) as child:
        until(lambda: child.events(0.1) and child.worker is not None)
        child.end(grace_s=0.0)
        assert child.wait() == -signal.SIGKILL
        assert child.log_tail() == ""
        assert child.stacks_file.exists()
    assert not child.scratch.exists()


def test_requests_and_answers_are_the_parent_s_own() -> None:
    with Child(MODULE, {"function": "answers"}, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        child.stdin.write(b"what\n")
        assert child.communicate(60.0) == b"WHAT\n\n"
        assert (child.wait(), child.log_tail()) == (3, "a warning")


def test_a_silent_child_has_a_deadline_and_says_where_it_stands() -> None:
    with Child(MODULE, {"function": "starts_a_child"}, stdout=subprocess.PIPE) as child:
        until(lambda: "step" in [event["event"] for event in child.events(0.1)])
        with pytest.raises(subprocess.TimeoutExpired):
            child.communicate(0.1)
        assert "in starts_a_child" in child.threads(20.0)


def test_the_folder_of_a_child_s_child_goes_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own parent cannot remove it, and its guard is killed in the same moment."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with Child(MODULE, {"function": "starts_a_child"}, {"TMPDIR": str(tmp_path)}) as child:
        pids: list[int] = []
        while not pids:
            pids = [event["figures"]["pid"] for event in child.events(0.1) if event["event"] == "step"]
        child.end(grace_s=0.0)
    assert alive(pids) == []
    assert list(tmp_path.iterdir()) == []


def test_another_thread_ends_a_child_that_is_waited_for() -> None:
    with Child(MODULE, {"function": "starts_a_child"}) as child:
        until(lambda: child.events(0.1) and child.worker is not None)
        ending = threading.Timer(0.2, child.end, (0.0,))
        ending.start()
        assert child.wait(60.0) == -signal.SIGKILL
        ending.join()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_no_json_is_refused(value: float) -> None:
    """NaN, which Python writes and reads, is a line that no other reader of JSON takes."""
    read, write = os.pipe()
    with os.fdopen(read, "rb") as sent, os.fdopen(write, "wb") as events:
        with pytest.raises(ValueError, match="JSON"):
            guard.send_event(events.fileno(), "step", figures={"loss": value})
        events.close()
        assert sent.read() == b""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_parent_that_ends_in_the_middle_of_a_stall_leaves_nothing(how: signal.Signals, tmp_path: Path) -> None:
    """Not the worker, not its guard, not its children, whatever session they are in; and the next child works."""
    pids = tmp_path / "pids"
    environment = {**os.environ, workers.PIDS: str(pids), "TMPDIR": str(tmp_path)}
    with subprocess.Popen(
        [sys.executable, "-m", "tests.harness.stalled_parent"],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as parent:
        until(pids.exists)
        running = [int(pid) for pid in pids.read_text().split()]
        assert alive(running) == running
        parent.send_signal(how)
        parent.wait(20)
        until(lambda: not alive(running))
    until(lambda: not list(tmp_path.glob(f"{isolate.SCRATCH_PREFIX}*")))
    assert watched("ends")[0].status == 0
