"""One worker process of `compare`: it prepares a case, asks the oracle, and takes samples when it is told to.

Usage: python -m benchmarks.ab.worker, with the sources of one side first on the path. Requests come as JSON lines on
stdin, each is answered by one JSON line on stdout; end of file ends the process, so that none outlives its parent.

    {"threads": 1, "core": 0}                    -> {"nsa": "/.../nsa/__init__.py"}
    {"context": true}                            -> {}, once it has a context on the GPU
    {"launch_interval": true}                    -> {"launch_interval_ns": of this process on the GPU}
    {"fits_twice": {...key...}, "device": "cuda"} -> {"fits": whether both sides may prepare the case at a time}
    {"prepare": {...key...}, "device": "cpu", "check": true}    -> {"outcome": "PASSED", "reason": null, "stages_s": {}}
    {"slowdowns": [0.01, 0.03]}                  -> {"latency_ms": of a call}
    {"sample": 3}                                -> {"sample_ms": [latency, latency of each slowdown]}, of so many calls
    {"finish": true, "other_inputs": true}       -> {"outcome": "PASSED", "reason": null, "peak_mem_mib": of a call}

An exception of the case becomes its outcome; `stages_s` says what its preparation took (`stages`). `finish` with
`other_inputs` asks the oracle again, on inputs that no call has seen. A peak of memory is told on a GPU; None on a CPU,
where these processes keep what they free.
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

import nsa
from benchmarks import errors
from benchmarks.ab import injection, stages
from benchmarks.ab.stages import StageClock
from benchmarks.cases.key import NSA, Key
from benchmarks.cases.outcome import CaseOutcome
from benchmarks.correctness import anti_cheat, integrity, row_sampling
from benchmarks.timing import l2_persistence, latency, launch_interval, memory
from benchmarks.timing.rotating_inputs import RotatingInputs
from benchmarks.workloads.prepare import fits_twice, prepare

_WARM_UPS = 2
_ROWS_SHARE = {"cpu": 1.0, "cuda": 0.2}
"""Of the rows that `run` compares with the second implementation: on an H200 these took a third of a first pair."""
_NO_LIMIT_S = 3600.0  # the parent has the deadline


class Worker:
    """What stands prepared in this process: at most one case."""

    def __init__(self) -> None:
        self._case: _Case | None = None
        self._allocated_bytes = 0
        """On the GPU after the last collection: what no case holds."""

    def answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to one request."""
        if "threads" in request:
            torch.set_num_threads(request["threads"])
            if request["core"] is not None:
                os.sched_setaffinity(0, {request["core"]})
            return {"nsa": nsa.__file__}
        if "context" in request:
            torch.zeros(1, device="cuda")
            return {}
        if "launch_interval" in request:
            return {"launch_interval_ns": launch_interval.measure_ns()}
        if "fits_twice" in request:
            return {"fits": fits_twice(Key(**request["fits_twice"]), request["device"])}
        if "prepare" in request:
            self._case = None  # its tensors go before the next one's come
            clock = StageClock()
            answer = self._outcome(lambda: self._prepare(clock, **request))
            return {**answer, "stages_s": clock.seconds()}
        assert self._case is not None, "a case must be prepared first"
        if "slowdowns" in request:
            return {"latency_ms": self._case.inject(request["slowdowns"])}
        if "sample" in request:
            return {"sample_ms": self._case.sample(request["sample"])}
        case = self._case
        answer = self._outcome(lambda: case.finish(request["other_inputs"]))
        return {**answer, "peak_mem_mib": self._case.peak_mem_mib}

    def _prepare(self, clock: StageClock, prepare: Mapping[str, Any], device: str, check: bool) -> None:
        with clock.stage(stages.FREE):
            self._free(device)
        self._case = _Case(Key(**prepare), device, check, clock)
        if device == "cuda" and check:  # what the oracle took: the other side's comes next, and may need the room
            with clock.stage(stages.FREE):
                torch.cuda.empty_cache()

    def _free(self, device: str) -> None:
        """What the last case left on a GPU. Only where a cycle of objects still holds some of it does Python have to
        look through all of PyTorch's, which takes a tenth of a second."""
        if device != "cuda":
            return
        if torch.cuda.memory_allocated() > self._allocated_bytes:
            gc.collect()
            self._allocated_bytes = torch.cuda.memory_allocated()
        torch.cuda.empty_cache()

    def _outcome(self, step: Callable[[], None]) -> dict[str, Any]:
        try:
            step()
        except Exception as error:
            outcome, reason = errors.classify(error, NSA)
            return {"outcome": outcome.value, "reason": reason}
        return {"outcome": CaseOutcome.PASSED.value, "reason": None}


class _Case:
    """One case, green if it was checked."""

    def __init__(self, key: Key, device: str, check: bool, clock: StageClock) -> None:
        self._key, self._device, self._seed = key, device, row_sampling.new_seed()
        with clock.stage(stages.INPUTS):
            if device == "cuda":
                l2_persistence.bytes_at_first()
            self._work = prepare(key, device)
            self._inputs = anti_cheat.digests(self._work.inputs) if check else {}
        with clock.stage(stages.FIRST_CALL), self._work.refusals():
            self._work.check(self._seed) if check else self._work.call()
        with clock.stage(stages.COPIES):
            self._rotating = RotatingInputs(self._work, key, device)
        self._staged: injection.StagedSlowdown | None = None
        self.peak_mem_mib: float | None = None

    def inject(self, slowdowns: Sequence[float]) -> float:
        """Warm up, find how many ms a call takes, and add the slowdowns to it; for a time when nothing else runs."""
        latency_ms = min(self._rotating.time(_plan(_WARM_UPS)).samples_ms)
        if slowdowns:
            self._staged = injection.StagedSlowdown(latency_ms, slowdowns, self._device)
        return latency_ms

    def sample(self, calls: int) -> list[float]:
        """[median latency, median with each slowdown injected], ms.

        The first of several is left out: the other side has taken the caches, which costs it 5 % and makes it vary by
        10 % where calls are short.
        """
        first = min(calls - 1, 1)
        timing = self._rotating.time(_plan(calls), self._staged)
        if self._staged is None:
            return [statistics.median(timing.samples_ms[first:])]
        steps, taken_ms = self._rotating.steps, self._staged.take_samples_ms()
        # those before the samples tried how long the GPU must be kept waiting, those after them whether it was done
        end = len(taken_ms) - steps * timing.later_calls
        counted_ms = taken_ms[end - steps * (calls - first) : end]
        return [statistics.median(stage) for stage in zip(*counted_ms, strict=True)]

    def finish(self, other_inputs: bool) -> None:
        """Raises where the calls changed their inputs, or the benches, or are wrong on inputs that none has seen."""
        anti_cheat.require_unchanged(self._work.inputs, self._inputs)
        if self._device == "cuda":
            peak = memory.of_work(self._work)
            self.peak_mem_mib = None if peak is None else peak.mib
        if other_inputs:
            self._rotating.recheck(self._seed, _ROWS_SHARE[self._device])
        integrity.require_intact()


def _plan(samples: int) -> latency.SamplingPlan:
    return latency.SamplingPlan(
        samples, min_time_s=0.0, wall_limit_s=_NO_LIMIT_S, warmup_calls=0, end_to_end=False, clocks=False
    )


def main() -> None:
    """Answer until stdin ends. What libraries print goes to stderr, so that it cannot break the answers."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    worker = Worker()
    for line in sys.stdin:
        print(json.dumps(worker.answer(json.loads(line)), allow_nan=False), file=answers, flush=True)


if __name__ == "__main__":
    main()
