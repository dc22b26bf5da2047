"""The watchdog: a stall leaves stacks and an exit code of its own; a slow run at its own pace is left alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from nsa.train.monitoring import monitors, watchdog
from nsa.train.monitoring.watchdog import EXIT_STALLED, StopRequest, Watchdog, dump_on_signal
from tests.nsa.train.runs import ROOT

STALL = """
import sys, threading, time
from pathlib import Path
from nsa.train.monitoring.watchdog import Watchdog
def waits_forever():
    threading.Event().wait()
def say(why):
    print(why, flush=True)
with Watchdog(Path(sys.argv[1]), floor_s=0.3, first_s=float(sys.argv[2]), on_stall=say) as guard:
    if sys.argv[3] == "later":
        for _ in range(3):
            guard.beat(0.01)
    waits_forever()
"""


@pytest.mark.parametrize(("first_s", "when", "says"), [("0.5", "at once", "0.5 s"), ("60", "later", "0.3 s")])
def test_a_stall_is_dumped_and_ended(first_s: str, when: str, says: str, tmp_path: Path) -> None:
    stacks = tmp_path / "stacks.txt"
    done = subprocess.run(
        [sys.executable, "-c", STALL, str(stacks), first_s, when],
        cwd=ROOT, capture_output=True, text=True, timeout=60, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=False,
    )  # fmt: skip
    assert done.returncode == EXIT_STALLED
    assert says in done.stdout
    assert "waits_forever" in stacks.read_text()


def _guard(folder: Path, ended: list[int], **seconds: float) -> Watchdog:
    limits = {"floor_s": 0.1, "first_s": 0.1, **seconds}
    return Watchdog(folder / "stacks", **limits, on_stall=lambda why: None, end=ended.append)


class Clock:
    """Stands still until `passes`, which returns once the watchdog has judged the new time, or ended the run."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, ended: list[int]) -> None:
        self._now_s, self._judged, self._ended = 0.0, threading.Semaphore(0), ended
        judge = monitors.silence
        calendar = {"strftime": time.strftime, "gmtime": time.gmtime}
        monkeypatch.setattr(watchdog, "time", SimpleNamespace(monotonic=lambda: self._now_s, **calendar))

        def judged(*arguments: float, **options: float) -> monitors.Alarm | None:
            alarm = judge(*arguments, **options)
            self._judged.release()
            return alarm

        monkeypatch.setattr(monitors, "silence", judged)

    def passes(self, seconds: float) -> None:
        self._now_s += seconds
        while self._judged.acquire(blocking=False):
            pass
        for _ in range(2):  # the first may have read the clock before
            while not self._judged.acquire(timeout=0.05) and not self._ended:
                pass


def test_slow_steps_are_no_stall(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[int] = []
    clock = Clock(monkeypatch, ended)
    with _guard(tmp_path, ended, first_s=5.0) as guard:
        for _ in range(4):
            guard.beat(0.1)
            clock.passes(0.9)  # longer than the floor, shorter than ten steps
        assert ended == []
        clock.passes(0.2)
    assert ended == [EXIT_STALLED]


def test_a_pause_has_the_first_steps_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[int] = []
    clock = Clock(monkeypatch, ended)
    with _guard(tmp_path, ended, first_s=5.0) as guard:
        guard.beat(0.001)
        with guard.patiently():
            clock.passes(4.9)
        assert ended == []
        clock.passes(0.2)
    assert ended == [EXIT_STALLED]


def test_sigusr1_dumps_the_stacks(tmp_path: Path) -> None:
    end = dump_on_signal(tmp_path / "stacks")
    os.kill(os.getpid(), signal.SIGUSR1)
    end()
    assert "test_sigusr1_dumps_the_stacks" in (tmp_path / "stacks").read_text()


def test_a_second_signal_ends_at_once() -> None:
    with StopRequest() as request:
        os.kill(os.getpid(), signal.SIGTERM)
        assert request.signal is signal.SIGTERM
        with pytest.raises(SystemExit) as ended:
            signal.raise_signal(signal.SIGTERM)
    assert ended.value.code == 143
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
