"""Measuring in a guarded child: a kernel that hangs or dies costs one record, not the run.

The process is kept from case to case, so that kernels stay compiled; one that stalled, died or crashed on a GPU (whose
context may be poisoned) is replaced. Each contender has a process of its own, so that what its package does to it
touches no other figure. `python -m benchmarks.worker` is the child, which answers requests through a pipe that carries
Python objects.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

import nsa
from benchmarks import runner
from benchmarks.baselines import BASELINES
from benchmarks.cases.key import NSA, Key
from benchmarks.cases.outcome import CaseOutcome
from benchmarks.correctness import row_sampling
from benchmarks.history.records import Record
from benchmarks.peak_memory import out_of_memory
from benchmarks.runner import Measurement, Prepare
from benchmarks.timing.latency import SamplingPlan
from benchmarks.workloads.prepare import prepare
from harness import forced, repository
from harness.fingerprint import Fingerprint
from harness.isolate import Child

DEADLINE_S = {"cuda": 180.0, "cpu": 600.0}
"""Per case, compilation and oracle included, by device: some nine times the longest seen on a GPU (20 s), and enough
for the longest text on a slow CPU."""
_START_S = 300.0
_STACKS_S = 20.0
"""On a busy machine."""


def run(
    keys: Sequence[Key],
    device: str,
    plan: SamplingPlan,
    fingerprint: Fingerprint,
    command: Callable[[Key], str],
    prepare: Prepare = prepare,
    deadline_s: float | None = None,
    seed: int | None = None,
    path: Sequence[Path] = (),
) -> Iterator[Measurement]:
    """One measurement per key, in order, whatever happens to the process that measures; `DEADLINE_S` unless given, and
    for `seed` see `runner.run`. `path`: folders that the process searches first, the first of which holds nsa/.

    A contender that gave no answer on one case is not asked for another: each would take the whole deadline.
    """
    deadline_s = DEADLINE_S[device] if deadline_s is None else deadline_s
    seed = row_sampling.new_seed() if seed is None else seed
    workers: dict[str | None, _Worker] = {}
    hung: dict[str, str] = {}
    try:
        for key in keys:
            contender = _contender(key)
            if contender in hung:
                reason = f"not tried: it gave no answer on {hung[contender]}"
                yield Measurement(Record(key, CaseOutcome.STALLED, reason, fingerprint, command(key)))
                continue
            if contender not in workers:
                workers[contender] = _Worker(device, plan, fingerprint, prepare, seed, path)
            worker = workers[contender]
            measured = worker.measure(key, command(key), deadline_s)
            outcome = measured.record.outcome
            if worker.ended or (device == "cuda" and outcome is CaseOutcome.CRASHED):
                workers.pop(contender).close()
            if contender is not None and outcome is CaseOutcome.STALLED:
                hung[contender] = key.case
            yield measured
    finally:
        for worker in workers.values():
            worker.close()


def _contender(key: Key) -> str | None:
    """Whose process measures the key; None is that of NSA and of the baselines of this repository."""
    return None if key.implementation == NSA or key.implementation in BASELINES else key.implementation


def import_error(path: Sequence[Path]) -> str | None:
    """Why a process cannot import the benches over the nsa/ of `path` (see `run`), in one line; None where it can."""
    ours, theirs = Pipe()
    ours.close()  # nobody asks, so that it ends once it has imported
    with theirs, _child(theirs, path, log=True) as child:
        try:
            code = child.wait(_START_S)
        except subprocess.TimeoutExpired:
            return f"no end within {_START_S:.0f} s"
        last = (child.log_tail().splitlines() or [_ending(code)])[-1]
        return None if code == 0 else last.replace(f"{path[0]}{os.sep}", "")  # gone when it is read


def _child(pipe: Connection, path: Sequence[Path], *, log: bool) -> Child:
    where = {"PYTHONPATH": os.pathsep.join(map(str, path))} if path else {}
    cwd = path[0] if path else repository.ROOT
    return Child("benchmarks.worker", {"pipe": pipe.fileno()}, where, cwd=cwd, log=log, files=[pipe.fileno()])


class _Worker:
    """The process, and the pipe to it."""

    def __init__(
        self,
        device: str,
        plan: SamplingPlan,
        fingerprint: Fingerprint,
        prepare: Prepare,
        seed: int,
        path: Sequence[Path] = (),
    ) -> None:
        self._fingerprint, self._path = fingerprint, path
        self._pipe, theirs = Pipe()
        with theirs:  # the child holds the only other end: when it dies, this one ends
            self._child = _child(theirs, path, log=False)
        self._measures = (device, plan, fingerprint, prepare, seed)
        self.ended = False
        self._started = False

    def measure(self, key: Key, command: str, deadline_s: float) -> Measurement:
        """The measurement of a key; STALLED or CRASHED where the process does not give one."""
        try:
            if not self._started:  # importing PyTorch counts for no case
                self._pipe.send(self._measures)
                self._started = self._pipe.poll(_START_S) and self._imported_ours(self._pipe.recv())
            self._pipe.send((key, command))
            begin = time.perf_counter()
            if self._pipe.poll(deadline_s):
                measured: Measurement = self._pipe.recv()
                elapsed_s = time.perf_counter() - begin
                if reason := impossible(measured, key, elapsed_s):
                    return self._refused(key, CaseOutcome.INCORRECT, reason, command)
                return _told(measured, elapsed_s)
            reason = f"no answer within {deadline_s:.0f} s; it stood {self._where()}"
            outcome = CaseOutcome.STALLED
        except ImportError as error:
            reason, outcome = str(error), CaseOutcome.CRASHED
        except (EOFError, OSError):
            reason, outcome = f"the process that measured it {_ending(self._child.wait())}", CaseOutcome.CRASHED
        self.ended = True
        return self._refused(key, outcome, reason, command)

    def _imported_ours(self, imported: str) -> bool:
        """Raises ImportError where the process would measure another nsa/ than that of its path."""
        if self._path and not imported.startswith(str(self._path[0])):
            raise ImportError(f"the process imported {imported}, which is not of {self._path[0]}")
        return True

    def close(self) -> None:
        """End it, whatever it does, and leave nothing behind."""
        self._child.end(grace_s=0.0)
        self._child.close()
        self._pipe.close()

    def _refused(self, key: Key, outcome: CaseOutcome, reason: str, command: str) -> Measurement:
        return Measurement(Record(key, outcome, reason, self._fingerprint, command))

    def _where(self) -> str:
        """Where its main thread stands: the innermost line of this project, or of anything."""
        self._child.events(0.0)  # the worker's process id, for one
        return innermost(self._child.threads(_STACKS_S))


def _told(measured: Measurement, elapsed_s: float) -> Measurement:
    """With what this process knows of it: how long it took, and what its allocator lacked."""
    record = measured.record
    lacked = out_of_memory(record.reason or "") if record.outcome is CaseOutcome.OUT_OF_MEMORY else None
    return replace(measured, record=replace(record, case_s=elapsed_s, out_of_memory=lacked))


def impossible(measured: Measurement, key: Key, elapsed_s: float) -> str | None:
    """Why a measurement that came after so many seconds, by this process's clock, cannot be one of this key."""
    if measured.record.key != key:
        return f"the process that measured it sent a record of {measured.record.key.name}"
    covered_s = sum(measured.raw.samples_ms) / 1e3 if measured.raw else 0.0
    if covered_s > elapsed_s:
        return f"its samples cover {covered_s:.4g} s of the {elapsed_s:.4g} s that it took: its timer was replaced"
    return None


def innermost(stacks: str) -> str:
    """Of faulthandler's stacks, innermost first, the line that a person looks at."""
    main = stacks.rpartition("Current thread")[2] or stacks
    frames = re.findall(r'File "([^"]+)", line (\d+) in (\S+)', main)
    if not frames:
        return "where no stack could be had"
    ours = [frame for frame in frames if re.search(r"/(nsa|benchmarks)/", frame[0])]
    path, line, function = (ours or frames)[0]
    return f"in {function}, {'/'.join(path.split('/')[-3:])}:{line}"


def _ending(code: int) -> str:
    if code < 0:
        return f"was ended by {signal.Signals(-code).name}"
    return f"ended with code {code}"


def _first(command: str, _key: Key) -> str:
    return command


def main() -> None:
    """Measure what is asked for until nobody asks any more."""
    pipe: Connection = Connection(json.loads(sys.argv[1])["pipe"])
    try:
        device, plan, fingerprint, prepare, seed = pipe.recv()
    except EOFError:
        return
    forced.cap_memory()
    pipe.send(nsa.__file__)
    while True:
        try:
            key, command = pipe.recv()
        except EOFError:
            return
        (measured,) = runner.run([key], device, plan, fingerprint, partial(_first, command), prepare, seed)
        pipe.send(runner.unless_changed(measured))


if __name__ == "__main__":
    main()
