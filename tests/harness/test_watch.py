"""The silence that is allowed follows the child's own pace, and a child that exceeds it is ended."""

from __future__ import annotations

import signal
import tempfile
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from harness import watch
from harness.watch import ChildEnd, Deadline
from tests.harness import workers
from tests.harness.processes import FLOOR_S, alive, watched


def paced(*steps_s: float, floor_s: float = 5.0, import_s: float = 1.0) -> Deadline:
    """One that imported, then made these steps."""
    made, at = Deadline(floor_s), 100.0
    made.imported(at, import_s)
    for step_s in steps_s:
        at += step_s
        made.step(at)
    return made


def test_before_the_import_it_follows_the_imports_of_others() -> None:
    assert Deadline(5.0).allowed_s == watch.IMPORT_FLOOR_S
    assert Deadline(5.0, known_import_s=10.0).allowed_s == 300


def test_first_step_has_the_allowance_of_a_compilation() -> None:
    assert paced().allowed_s == 30
    assert paced(import_s=4.0).allowed_s == 120


def test_fast_steps_have_the_floor() -> None:
    assert paced(0.1, 0.1, 0.1).allowed_s == 5


def test_slow_steps_are_given_ten_times_their_median() -> None:
    """Steps of 51 s, which a fixed watchdog of 180 s nearly took for a hang, may be silent for 510 s."""
    assert paced(60, 51, 51, 51).allowed_s == 510


def test_uneven_steps_are_given_three_times_the_longest() -> None:
    assert paced(0.1, 0.1, 0.1, 0.1, 40).allowed_s == 120


def test_a_slow_machine_is_given_twice_its_import() -> None:
    assert paced(0.1, 0.1, import_s=20.0).allowed_s == 40


def test_longest_silence_is_between_beats() -> None:
    assert paced().longest_s is None
    assert paced(3.0).longest_s == pytest.approx(3)
    assert paced(3.0, 1.0, 7.0).longest_s == pytest.approx(7)


def test_a_worker_that_ends_is_heard_to_its_end() -> None:
    end, sent = watched("ends")
    assert [event["event"] for event in sent] == ["started", "imported", "step", "step", "step", "ended"]
    assert end == ChildEnd(status=0, log_tail="the end of the log")


def test_a_worker_that_dies_leaves_its_status_and_its_stack() -> None:
    end, _ = watched("segfaults")
    assert end.status == -signal.SIGSEGV
    assert "in segfaults" in end.log_tail


def test_who_goes_on_making_steps_is_not_stalled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twenty steps of 0.6 s on the test's clock: together longer than any silence that is allowed between two."""

    class FakeChild:
        running, now_s, left = True, 0.0, 20

        def events(self, wait_s: float) -> list[dict[str, Any]]:
            self.now_s += 0.6
            self.left -= 1
            step = {"event": "step", "at": self.now_s, "figures": {}}
            return [step if self.left else {"event": "ended", "status": 0}]

        def stacks(self) -> str:
            return ""

        log_tail = stacks

    child, pace = FakeChild(), Deadline(1.0)
    monkeypatch.setattr(watch, "time", SimpleNamespace(monotonic=lambda: child.now_s))
    pace.imported(0.0, 0.1)
    assert watch.watch(child, pace, threading.Event()).stalled_after_s is None  # type: ignore[arg-type]
    assert pace.allowed_s < 12 < child.now_s + 1


def test_stall_is_ended_with_its_stacks_and_all_its_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(workers.PIDS, str(tmp_path / "pids"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # other tests run children at the same time
    end, _ = watched("stalls")
    assert end.stalled_after_s is not None
    assert end.stalled_after_s > FLOOR_S
    assert end.stacks is not None
    assert "in stalls" in end.stacks
    assert alive([int(pid) for pid in (tmp_path / "pids").read_text().split()]) == []
    assert [path.name for path in tmp_path.iterdir()] == ["pids"]


def test_what_a_worker_leaves_running_is_ended() -> None:
    end, sent = watched("leaves_a_process")
    [pid] = [event["figures"]["pid"] for event in sent if event["event"] == "step"]
    assert end.status == 0
    assert alive([pid]) == []
