"""A paired trial: two new processes, one per side, whose samples of a case are interleaved: A B, B A, A B, ...

The pair is what counts as one observation. Both processes are new, so that what a process has for its whole life (where
its memory lies, in what order it was started) differs from pair to pair; and since the samples of both sides stand next
to each other within a second or two, what comes and goes on the machine (clocks, neighbours) meets both. Only one of
the two works at a time.

On a CPU two pairs run at a time, each pinned to a core of its own, because a process that comes back to another core
starts with cold caches; not more than two, because the cores share the memory.
"""

from __future__ import annotations

import dataclasses
import math
import os
import statistics
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.ab import moderated, stages
from benchmarks.ab.child import WorkerProcess
from benchmarks.ab.result import Rules
from benchmarks.ab.sequential import PairFailure, PairTiming
from benchmarks.ab.stages import StageClock
from benchmarks.ab.starter import PairStarter, SideError, blame
from benchmarks.cases.key import Key
from benchmarks.cases.outcome import FAULTS, CaseOutcome

PREPARE_DEADLINE_S = 600.0
"""Compilation and the oracle included."""
SAMPLE_DEADLINE_S = 120.0
_SAMPLE_MS = {"cpu": 50.0, "cuda": 15.0}
"""A sample of short calls lasts about this long, beside its first call."""
_MOST_CALLS = {"cpu": 20, "cuda": 8}
"""On a GPU two samples of one process differ by 0.1 to 0.4 %, and each call takes some ms of the host's time."""
_ONE_CALL_MS = {"cpu": 20.0, "cuda": 30.0}
"""From here on a sample is one call: caches weigh little in it. On a CPU whose speed changes within a tenth of a second
neighbouring calls differ by 7 %, medians of calls further apart by 8 % in twice the time. No case that was calibrated
on a GPU takes so long."""
_MOST_CORES = 2
_SIBLINGS = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"


@dataclass(frozen=True)
class PairedSamples:
    """The interleaved samples of a pair's two processes on one case."""

    base_ms: tuple[float, ...]
    head_ms: tuple[tuple[float, ...], ...]
    """Per sample: as it is, then with each slowdown injected."""
    peaks_mib: tuple[float, float] | None = None
    """Peak memory of a call of BASE and of HEAD; None where it was not asked for, and on a CPU."""

    def timed(self, level: int = 0) -> PairTiming:
        """One observation; `level` is 0 for HEAD as it is, i for the i-th slowdown."""
        head_ms = [sample[level] for sample in self.head_ms]
        ratio = moderated.pseudomedian(self._log_ratios(level))
        return PairTiming(statistics.median(self.base_ms), statistics.median(head_ms), ratio, self.peaks_mib)

    def enough(self, rules: Rules) -> bool:
        """Whether further samples would say little more; by the spread alone, so that it favours no answer."""
        count = len(self.base_ms)
        if count < rules.min_samples or count % 2:
            return False
        return count >= rules.max_samples or standard_error(self._log_ratios(0)) <= rules.target_standard_error

    def _log_ratios(self, level: int) -> list[float]:
        pairs = zip(self.base_ms, self.head_ms, strict=True)
        return [math.log(head_ms[level] / base_ms) for base_ms, head_ms in pairs]


def standard_error(ratios: Sequence[float]) -> float:
    """Of the Hodges-Lehmann estimate, from the median distance to it, which outliers do not widen."""
    centre = moderated.pseudomedian(ratios)
    spread = 1.4826 * statistics.median(abs(ratio - centre) for ratio in ratios)
    return 1.05 * spread / math.sqrt(len(ratios))  # efficiency pi / 3 under normal noise


class WorkerPair:
    """Two children, BASE and HEAD, on "cpu" or "cuda"."""

    def __init__(self, base: WorkerProcess, head: WorkerProcess, device: str, clock: StageClock) -> None:
        self._children, self._device, self._clock = (base, head), device, clock

    def run(
        self, key: Key, rules: Rules, first: int, slowdowns: Sequence[float] = (), *, check: bool = True
    ) -> PairedSamples | PairFailure:
        """Prepare one case on both sides, then sample them alternately, side `first` (0 BASE, 1 HEAD) before the other.

        Both sides do the work of the slowdowns, so that it leaves the same caches to either's next call; HEAD's is
        read. `check`: the oracle is asked before the samples, and again after them (`_finish`). Raises SideError.
        """
        request = {"prepare": dataclasses.asdict(key), "device": self._device, "check": check}
        together = self._device == "cpu" or not check or self._fits_twice(key)
        prepared = self._ask_both(request, request, together=together)
        if isinstance(prepared, PairFailure):
            return prepared
        self._clock.add_sides([answer["stages_s"] for answer in prepared], together=together)
        with self._clock.stage(stages.WARM_UP):
            latencies_ms = [self._ask_one(side, {"slowdowns": list(slowdowns)})["latency_ms"] for side in (0, 1)]
        calls = calls_per_sample(min(latencies_ms), self._device)
        samples = PairedSamples((), ())
        with self._clock.stage(stages.SAMPLES):
            while not samples.enough(rules):
                sample_ms = {}
                for side in (0, 1) if (len(samples.base_ms) + first) % 2 == 0 else (1, 0):
                    sample_ms[side] = self._ask_one(side, {"sample": calls})["sample_ms"]
                base_ms, head_ms = (*samples.base_ms, sample_ms[0][0]), (*samples.head_ms, tuple(sample_ms[1]))
                samples = PairedSamples(base_ms, head_ms)
        if not check:
            return samples
        with self._clock.stage(stages.FINISH):
            finished = self._finish()
        if isinstance(finished, PairFailure):
            return finished
        base_mib, head_mib = (answer.get("peak_mem_mib") for answer in finished)
        if base_mib is None or head_mib is None:
            return samples
        return dataclasses.replace(samples, peaks_mib=(base_mib, head_mib))

    def _finish(self) -> list[dict[str, Any]] | PairFailure:
        """The oracle's second question, on other inputs.

        On a GPU it is put to HEAD alone, which is what is judged, and the sides answer one after the other, since how
        long a call takes on other inputs is part of it. On a CPU both answer at the same time: what the oracle leaves
        in the heap of a process must be alike.
        """
        on_cpu = self._device == "cpu"
        requests = [{"finish": True, "other_inputs": asked} for asked in (on_cpu, True)]
        return self._ask_both(requests[0], requests[1], together=on_cpu)

    def _fits_twice(self, key: Key) -> bool:
        """Whether the GPU has the oracle's memory for both sides at a time."""
        fits: bool = self._ask_one(0, {"fits_twice": dataclasses.asdict(key), "device": self._device})["fits"]
        return fits

    def _ask_one(self, side: int, request: Mapping[str, Any]) -> dict[str, Any]:
        with blame(side):
            self._children[side].ask(request)
            return self._children[side].answer(SAMPLE_DEADLINE_S)

    def _ask_both(
        self, base: Mapping[str, Any], head: Mapping[str, Any], *, together: bool
    ) -> list[dict[str, Any]] | PairFailure:
        """Both answers, asked for at the same time or one after the other."""
        asked, answers = 0, []
        for side in (0, 1):
            while asked <= (1 if together else side):
                with blame(asked):
                    self._children[asked].ask((base, head)[asked])
                asked += 1
            with blame(side):
                answers.append(self._children[side].answer(PREPARE_DEADLINE_S))
        outcomes = [CaseOutcome(answer["outcome"]) for answer in answers]
        if set(outcomes) == {CaseOutcome.PASSED}:
            return answers
        said = zip(("BASE", "HEAD"), outcomes, answers, strict=True)
        why = "; ".join(f"{side} {outcome.value}: {told['reason']}" for side, outcome, told in said if told["reason"])
        return PairFailure(outcomes[0], outcomes[1], why)


def calls_per_sample(latency_ms: float, device: str) -> int:
    """For either side alike, or one of them would count its first call and the other not."""
    if latency_ms >= _ONE_CALL_MS[device]:
        return 1
    return 1 + max(1, min(_MOST_CALLS[device], math.ceil(_SAMPLE_MS[device] / latency_ms)))


def run(
    starter: PairStarter,
    keys: Sequence[Key],
    rules: Rules,
    first: int,
    slowdowns: Sequence[float] = (),
    *,
    check: bool = True,
    clock: StageClock | None = None,
) -> list[PairedSamples | PairFailure]:
    """What came of each case, in order; after a fault the rest goes on in a new pair. `clock` counts the seconds of its
    stages. For the rest see `WorkerPair.run`."""
    cores = _cores()[: len(keys)] if starter.device == "cpu" else [None]

    def sample(pair: WorkerPair, key: Key) -> PairedSamples | PairFailure:
        return pair.run(key, rules, first, slowdowns, check=check)

    clock = clock or StageClock()
    runners = [_CoreRunner(starter, core, sample, clock) for core in cores]
    with ThreadPoolExecutor(len(runners)) as pool:
        try:
            shares = [pool.submit(runner.run, keys[i :: len(runners)]) for i, runner in enumerate(runners)]
            found = [share.result() for share in shares]
        except BaseException:
            for runner in runners:
                runner.stop()
            raise
    return [found[i % len(runners)][i // len(runners)] for i in range(len(keys))]


def _cores() -> list[int | None]:
    """Logical CPUs of `_MOST_CORES` different cores, or of as many as there are; [None] where they cannot be told."""
    if not hasattr(os, "sched_getaffinity"):
        return [None]
    first_of: dict[str, int | None] = {}
    for cpu in sorted(os.sched_getaffinity(0)):
        siblings = Path(_SIBLINGS.format(cpu))
        first_of.setdefault(siblings.read_text() if siblings.exists() else str(cpu), cpu)
    return list(first_of.values())[:_MOST_CORES]


class _CoreRunner:
    """Runs its share of the cases, one pair of processes at a time."""

    def __init__(
        self,
        starter: PairStarter,
        core: int | None,
        sample: Callable[[WorkerPair, Key], PairedSamples | PairFailure],
        clock: StageClock,
    ) -> None:
        self._starter, self._core, self._sample, self._clock = starter, core, sample, clock
        self._children: list[WorkerProcess] = []
        self._lock, self._stopped = threading.Lock(), False

    def run(self, keys: Sequence[Key]) -> list[PairedSamples | PairFailure]:
        """What came of each case, in order."""
        found: list[PairedSamples | PairFailure] = []
        while len(found) < len(keys):
            try:
                with ExitStack() as stack:
                    with self._clock.stage(stages.START):
                        pair = self._pair(stack)
                    self._until_fault(pair, keys, found)
            except SideError as error:  # before its first case: this side cannot even be imported
                found += [error.result] * (len(keys) - len(found))
        return found

    def stop(self) -> None:
        """From another thread: end the children, whatever they do, and start no others."""
        self._starter.close()  # `start`, which has the lock, may wait for one of these
        with self._lock:
            self._stopped = True
            for child in self._children:
                child.kill()

    def _pair(self, stack: ExitStack) -> WorkerPair:
        with self._lock:
            if self._stopped:
                raise InterruptedError("the trial was stopped")
            self._children = self._starter.start()
            stack.callback(self._close, list(self._children))
        for side, child in enumerate(self._children):
            with blame(side):
                child.begin(self._core)
        return WorkerPair(self._children[0], self._children[1], self._starter.device, self._clock)

    def _close(self, children: Sequence[WorkerProcess]) -> None:
        """At the same time: each frees gigabytes, and a context on a GPU."""
        with self._clock.stage(stages.END), ThreadPoolExecutor(len(children)) as pool:
            list(pool.map(WorkerProcess.close, children))

    def _until_fault(self, pair: WorkerPair, keys: Sequence[Key], found: list[PairedSamples | PairFailure]) -> None:
        """Go on until a case may have left a process that fails at everything, as a kernel's fault does on a GPU."""
        for key in keys[len(found) :]:
            try:
                result = self._sample(pair, key)
            except SideError as error:
                result = error.result
            found.append(result)
            if isinstance(result, PairFailure) and (result.base in FAULTS or result.head in FAULTS):
                return
