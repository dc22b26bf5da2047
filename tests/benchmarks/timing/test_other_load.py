"""Time that others spent on the CPU is told from one's own."""

from __future__ import annotations

import subprocess
import sys
import time
from types import SimpleNamespace

import psutil
import pytest

from benchmarks.timing.other_load import OtherLoad


def test_others_are_the_whole_machine_less_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    now = SimpleNamespace(clock=0.0, machine=SimpleNamespace(user=100.0, steal=0.0, idle=0.0), own=50.0)
    monkeypatch.setattr(time, "perf_counter", lambda: now.clock)
    monkeypatch.setattr(psutil, "cpu_times", lambda: now.machine)
    own = SimpleNamespace(cpu_times=lambda: SimpleNamespace(user=now.own, system=0.0))
    monkeypatch.setattr(psutil, "Process", lambda: own)
    load = OtherLoad()
    now.clock, now.machine, now.own = 2.0, SimpleNamespace(user=103.0, steal=2.0, idle=9.0), 51.0
    assert load.cores() == 2.0  # 5 s of the machine, 1 of them our own, in 2 s
    now.clock = 0.05
    assert load.cores() is None


def test_a_busy_neighbour_is_seen() -> None:
    load = OtherLoad()
    spinning = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        time.sleep(1.5)
        cores = load.cores()
    finally:
        spinning.kill()
        spinning.wait()
    assert cores is not None
    assert cores > 0.3
