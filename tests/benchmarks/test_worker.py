"""A measurement that hangs, dies or breaks its process costs one record."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from benchmarks import runner, worker
from benchmarks.cases.key import Key
from benchmarks.cases.outcome import CaseOutcome
from benchmarks.cases.work import Work
from benchmarks.history.records import Record
from benchmarks.runner import Measurement
from benchmarks.timing.latency import SamplingPlan
from tests.benchmarks.synthetic import FINGERPRINT, key

PLAN = SamplingPlan(min_samples=3, min_time_s=0.0, wall_limit_s=5.0, warmup_calls=1)
SOUND, HANGS, DIES = 64, 65, 66
"""Lengths: what a case of this length does."""
HUNG = "WORKER_TEST_HUNG"
"""Environment variable: a file that is there once a case hangs."""


def prepare(the_key: Key, device: str) -> Work:
    """As always, but for the lengths that name a fault."""
    if the_key.num_keys == HANGS:
        hang_in_a_kernel()
    if the_key.num_keys == DIES:
        os.kill(os.getpid(), signal.SIGSEGV)
    return runner.prepare(the_key, device)


def hang_in_a_kernel() -> None:
    if HUNG in os.environ:
        Path(os.environ[HUNG]).touch()
    while True:
        time.sleep(0.1)


def measured(*lengths: int, deadline_s: float | None = None) -> list[Record]:
    keys = [key(length=length) for length in lengths]
    command = lambda one: f"measure {one.num_keys}"  # noqa: E731
    found = worker.run(keys, "cpu", PLAN, FINGERPRINT, command, prepare, deadline_s, seed=11)
    return [one.record for one in found]


@pytest.fixture
def deadline_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> float:
    """One that is over as soon as a case hangs, for its process; for others it is never over, however slow they are."""
    hung, over_s, whole, lost = tmp_path / "hung", 5.0, Connection.poll, list[Connection]()
    monkeypatch.setenv(HUNG, str(hung))

    def poll(self: Connection, timeout: float | None = 0.0) -> bool:
        if timeout != over_s:
            return whole(self, timeout)
        if lost and self is not lost[0]:
            return whole(self, None)
        while not hung.exists():
            time.sleep(0.05)
        lost.append(self)
        return whole(self, 0.0)

    monkeypatch.setattr(Connection, "poll", poll)
    return over_s


def outcomes(records: Sequence[Record]) -> list[str]:
    return [record.outcome.value for record in records]


def test_a_hung_case_is_stalled_where_it_stood_and_the_next_is_measured(deadline_s: float) -> None:
    records = measured(HANGS, SOUND, deadline_s=deadline_s)
    assert outcomes(records) == ["STALLED", "PASSED"]
    assert records[0].reason is not None
    assert "no answer within 5 s; it stood in hang_in_a_kernel, tests/benchmarks/test_worker.py:" in records[0].reason
    assert records[0].latency_ms is None
    assert [record.command for record in records] == [f"measure {HANGS}", f"measure {SOUND}"]
    assert records[1].correctness is not None
    assert records[1].correctness.seed == 11, "what was drawn is not what the command says"


def test_a_case_that_ends_the_process_says_how() -> None:
    records = measured(SOUND, DIES, SOUND)
    assert outcomes(records) == ["PASSED", "CRASHED", "PASSED"]
    assert records[1].reason == "the process that measured it was ended by SIGSEGV"


def test_nothing_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[int] = []
    spawn = worker._Worker.__init__

    def noted(self: worker._Worker, *arguments: object) -> None:
        spawn(self, *arguments)  # type: ignore[arg-type]
        started.append(self._child._process.pid)

    monkeypatch.setattr(worker._Worker, "__init__", noted)
    run = worker.run([key(length=SOUND), key(length=HANGS)], "cpu", PLAN, FINGERPRINT, str, prepare)
    next(run)
    run.close()  # type: ignore[attr-defined]
    assert len(started) == 1
    with pytest.raises(ProcessLookupError):
        os.kill(started[0], 0)


def test_a_crash_on_a_gpu_is_given_a_new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """A poisoned CUDA context would fail every case after it."""

    class Fake:
        made = 0
        ended = False

        def __init__(self, *_: object) -> None:
            Fake.made += 1

        def measure(self, the_key: Key, command: str, _: float) -> Measurement:
            return Measurement(Record(the_key, CaseOutcome.CRASHED, "an illegal memory access", FINGERPRINT, command))

        def close(self) -> None:
            pass

    monkeypatch.setattr(worker, "_Worker", Fake)
    for device, processes in (("cuda", 3), ("cpu", 1)):
        Fake.made = 0
        list(worker.run([key()] * 3, device, PLAN, FINGERPRINT, str))
        assert Fake.made == processes


@pytest.mark.parametrize(
    ("stacks", "where"),
    [
        ('Current thread 0x1 (most recent call first):\n  File "/x/torch/a.py", line 3 in sync\n'
         '  File "/home/me/nsa/benchmarks/timing.py", line 9 in time\n', "in time, nsa/benchmarks/timing.py:9"),
        ('Thread 0x2:\n  File "/x/b.py", line 1 in other\n\nCurrent thread 0x1:\n  File "/lib/c.py", line 7 in f\n',
         "in f, lib/c.py:7"),
        ("", "where no stack could be had"),
    ],
)  # fmt: skip
def test_innermost(stacks: str, where: str) -> None:
    assert worker.innermost(stacks).replace("/lib", "lib") == where
