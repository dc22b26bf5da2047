"""A guarded child that measures one version of nsa/ on request: requests and answers as lines of JSON."""

from __future__ import annotations

import json
import os
import select
import subprocess
import time
from collections.abc import Mapping
from typing import Any

from benchmarks.ab.checkout import Sources
from benchmarks.cases.outcome import CaseOutcome
from harness import isolate

THREADS = 1
"""On the CPU. Threads that wait for one another double the noise: each of them can be held up."""
_START_DEADLINE_S = 120.0
_KEEP_FREED_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**34), "MALLOC_TOP_PAD_": str(2**26)}
"""glibc gives freed memory back or keeps it, depending on what happens to lie above it: one process then pays for
thousands of page faults in every call, and the next one, of the same code, for none (30 ms or 36 ms)."""


class WorkerError(Exception):
    """The child ended or fell silent."""

    def __init__(self, outcome: CaseOutcome, reason: str) -> None:
        self.outcome = outcome
        super().__init__(reason)


class WorkerProcess:
    """One `benchmarks.ab.worker` over one version of nsa/."""

    def __init__(self, sources: Sources) -> None:
        """Raises WorkerError where it cannot start or would measure another nsa/."""
        self._answers = bytearray()
        self._child = isolate.Child(
            "benchmarks.ab.worker",
            {},
            {
                **_KEEP_FREED_MEMORY,
                "PYTHONPATH": os.pathsep.join([str(sources.folder), str(sources.benches)]),
                "OMP_NUM_THREADS": str(THREADS),
            },
            cwd=sources.folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._folder = sources.folder
        self._begun, self._launch_interval_ns = False, 0.0
        self._context_asked = self._context_awaited = False

    def begin(self, core: int | None) -> None:
        """Wait until it has imported; then it keeps to this core. Raises WorkerError where nsa/ is not this side's."""
        if self._begun:
            return
        self.ask({"threads": THREADS, "core": core})
        imported = self.answer(_START_DEADLINE_S)["nsa"]
        if not imported.startswith(str(self._folder)):
            raise WorkerError(CaseOutcome.CRASHED, f"the child imported {imported}, which is not of {self._folder}")
        self._begun = True

    def ask_for_context(self) -> None:
        """Have it make its context on the GPU, unless it was asked before; several processes do so at a time."""
        if self._context_asked:
            return
        self._context_asked = self._context_awaited = True
        self.ask({"context": True})

    def wait_for_context(self) -> None:
        """Until the context that was asked for is made. Raises WorkerError."""
        if self._context_awaited:
            self.answer(_START_DEADLINE_S)
            self._context_awaited = False

    def launch_interval_ns(self) -> float:
        """Of this process on the GPU; measured once. Raises WorkerError."""
        if not self._launch_interval_ns:
            self.ask({"launch_interval": True})
            self._launch_interval_ns = self.answer(_START_DEADLINE_S)["launch_interval_ns"]
        return self._launch_interval_ns

    def ask(self, request: Mapping[str, Any]) -> None:
        """Send a request; the answer is fetched with `answer`."""
        try:
            self._child.stdin.write(json.dumps(request).encode() + b"\n")
            self._child.stdin.flush()
        except BrokenPipeError as error:
            raise self._ended() from error

    def answer(self, deadline_s: float) -> dict[str, Any]:
        """The next answer. Raises WorkerError: STALLED after the deadline, CRASHED where the process ended."""
        pipe, end = self._child.stdout.fileno(), time.monotonic() + deadline_s
        while b"\n" not in self._answers:
            ready, _, _ = select.select([pipe], [], [], max(0.0, end - time.monotonic()))
            if not ready:
                raise WorkerError(CaseOutcome.STALLED, f"no answer within {deadline_s:.0f} s")
            read = os.read(pipe, 65536)
            if not read:
                raise self._ended()
            self._answers += read
        line, _, rest = bytes(self._answers).partition(b"\n")
        self._answers = bytearray(rest)
        found: dict[str, Any] = json.loads(line)
        return found

    def kill(self) -> None:
        """End it, whatever it does; whoever waits for its answer gets a WorkerError. It is gone when this returns."""
        self._child.end(grace_s=0.0)

    def close(self) -> None:
        """End it and leave nothing behind."""
        self.kill()
        self._child.close()

    def _ended(self) -> WorkerError:
        code = self._child.wait()
        words = self._child.log_tail().strip().splitlines()
        return WorkerError(
            CaseOutcome.CRASHED, f"the child ended with code {code}: {words[-1] if words else 'no word'}"
        )
