"""What was timed against what can be seen of the same call from outside: by the wall clock, and on other inputs.

Samples are taken on inputs that every run shares, and nobody looks at what those calls return. So the call is watched
some more times, by the host's raw clock. On inputs that no call has seen it must be as fast as on the timed ones; which
of these calls is compared with the oracle cannot be told from inside it. And the GPU's events must fit between the
launch and the end of its work.
"""

from __future__ import annotations

import itertools
import math
import resource
import secrets
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.cases.outcome import Correctness
from benchmarks.cases.work import Work
from benchmarks.correctness import anti_cheat, row_sampling
from benchmarks.correctness.verify import IncorrectError, NonFiniteError
from benchmarks.timing import clock_check, device_clock, host_clock, l2_persistence
from benchmarks.timing.latency import Timing

_FRESH_FACTOR, _FRESH_SPARE_MS = 1.25, 0.1
"""A call on other inputs may take this many times as long as on the timed ones, and so much more."""
_SPARE_MS = 0.05
_SHORTER, _LONGER = 0.9, 1.25
"""Shares of the events' time that the wall clock must reach, and may exceed beside the launch."""
_TRIES = 10
"""How often a host that was held up is asked again before a call is refused."""
_MOST_DECOYS = 2
_ASLEEP_MS, _ASLEEP_SHARE = 1.0, 0.1
"""A call on the host may sleep so long, and this share of its time: a machine that others use holds it up."""
_SETTLED_S = 0.5
"""How long other threads, where there are any, get to write to an output that is wrong."""


@dataclass(frozen=True)
class Observation:
    """One call by the host's raw clock."""

    wall_ms: float
    """From the call to the end of the device's work."""
    host_ms: float
    """Until the call returned."""
    asleep_ms: float
    """Of these, how long the process did not run, where the calling thread ever waited by itself."""


def _waits() -> int:
    """How often this thread has given up the processor by itself."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw


class Observer:
    """Calls something and watches it."""

    def __init__(self, call: Callable[[], tuple[Tensor, ...]], device: str, make_ready: Callable[[], object]) -> None:
        """`make_ready` runs ahead of each call."""
        self._call, self._device, self._make_ready = call, device, make_ready
        self._returned = anti_cheat.OtherInputs()
        self._kept: list[tuple[Tensor, Tensor]] = []
        self.seen: list[Observation] = []

    def observe(self) -> tuple[Tensor, ...]:
        """What one call returns; the observation is the last of `seen`."""
        self._make_ready()
        self._wait()
        waits, before, begin = _waits(), time.process_time(), host_clock.raw_s()
        outputs = self._call()
        returned, ran = host_clock.raw_s(), time.process_time() - before  # of all threads: a backward has its own
        waited = _waits() > waits
        self._wait()
        end = host_clock.raw_s()
        host_ms = (returned - begin) * 1e3
        asleep_ms = max(0.0, host_ms - ran * 1e3) if waited else 0.0  # else it was the scheduler that held it up
        self.seen.append(Observation((end - begin) * 1e3, host_ms, asleep_ms))
        return outputs

    def observe_two(self) -> None:
        """Two calls in a row, on inputs that differ. Raises IncorrectError where they return the same."""
        outputs = anti_cheat.OtherInputs()
        first = [x.detach().clone() for x in self.observe()]  # a graph's are overwritten; to look at them takes time
        second = self.observe()
        outputs.require_new(first)
        outputs.require_new(second)

    def observe_other_inputs(self) -> tuple[Tensor, ...]:
        """The same, whose outputs must not be those of the observation before, nor change any more."""
        outputs = self.observe()
        anti_cheat.require_plain_tensors(outputs)
        self._kept = [(x, x.detach().clone()) for x in outputs] if self._device == "cpu" else []
        if len(self.seen) <= 2:  # later ones are on the same inputs, with another gradient of the output
            self._returned.require_new(outputs)
        return outputs

    def require_settled(self) -> None:
        """Raises IncorrectError where the outputs of the last observation have changed since the call returned."""
        for i, (x, then) in enumerate(self._kept):
            if not torch.equal(x.detach().nan_to_num(), then.nan_to_num()):
                raise IncorrectError(f"output {i} changed after the call had returned: another thread computes it")

    def _wait(self) -> None:
        if self._device == "cuda":
            device_clock.wait()


def recheck(
    work: Work,
    call: Callable[[], tuple[Tensor, ...]],
    timing: Timing | None,
    device: str,
    seed: int,
    rows_share: float = 1.0,
) -> Correctness:
    """The call's correctness on inputs that no call has seen. Raises IncorrectError naming how it looked fast.

    `call` is the work's own, or a graph of it; `timing` is what was measured of it, None where nothing was;
    `rows_share` is that of `Recheck`.
    """
    assert work.recheck is not None
    touch, cold = anti_cheat.Touch(work.inputs.values()), timing is not None and timing.cache == "cold"
    timed, fresh, checked = (
        Observer(call, device, _ready(device, cold, before)) for before in (touch, _nothing, _nothing)
    )
    if timing is not None and device == "cuda":
        require_events(timing.latency_ms, timed)
        clock_check.require_told_clock()
    if cold:
        l2_persistence.require_unchanged()

    def timed_ms() -> float:
        """A call on the timed inputs, just written as other ones are: that takes the caches from the first call."""
        timed.observe()  # what remembers the last call's inputs remembers these
        touch.undo()
        if work.redraw is not None:
            work.redraw(row_sampling.TIMED_SEED)
        timed.observe()
        touch.undo()
        return timed.seen[-1].wall_ms

    def pair() -> tuple[float, float]:
        """(ms on inputs that no call has seen, on the timed ones); these are the inputs again at the end."""
        assert work.redraw is not None
        on_timed_ms = timed_ms()
        work.redraw(row_sampling.new_seed())
        fresh.observe()
        work.redraw(row_sampling.TIMED_SEED)
        return fresh.seen[-1].wall_ms, on_timed_ms

    pairs = [pair() for _ in range(secrets.randbelow(_MOST_DECOYS + 1) if work.redraw else 0)]
    on_timed_ms = timed_ms()
    try:
        correctness = work.recheck(checked.observe_other_inputs, seed, rows_share)
    except (IncorrectError, NonFiniteError):
        if len(sys._current_frames()) > 1:
            time.sleep(_SETTLED_S)
        checked.require_settled()
        raise
    checked.require_settled()
    if work.redraw is not None and len(checked.seen) > 1:
        pairs.append((checked.seen[1].wall_ms, on_timed_ms))
        work.redraw(row_sampling.TIMED_SEED)
        require_same_pace(itertools.chain(pairs, (pair() for _ in range(_TRIES))))
    if touch.changes_something:
        require_computed_anew(timed)
        touch.undo()
    if timing is not None and timing.queued_ahead:
        require_awake(timed.seen + fresh.seen)
    return correctness


def require_events(latency_ms: float, timed: Observer) -> None:
    """Raises IncorrectError unless the time between the events is what a caller waits for, the launch aside."""
    waited_ms, rest_ms = 0.0, math.inf
    for _ in range(_TRIES):
        timed.observe()
        seen = timed.seen[-1]
        waited_ms, rest_ms = max(waited_ms, seen.wall_ms), min(rest_ms, seen.wall_ms - seen.host_ms)
        long_enough = waited_ms >= _SHORTER * latency_ms - _SPARE_MS
        if long_enough and rest_ms <= _LONGER * latency_ms + _SPARE_MS:
            return
    if not long_enough:
        raise IncorrectError(
            f"the events say {latency_ms:.4g} ms, but after {waited_ms:.4g} ms there was nothing to wait for:"
            " torch.cuda.synchronize or the events were replaced"
        )
    raise IncorrectError(
        f"the events say {latency_ms:.4g} ms, but the GPU worked for {rest_ms:.4g} ms after the launch: the timer was"
        " replaced, or another process keeps the GPU busy"
    )


def require_computed_anew(timed: Observer) -> None:
    """Raises IncorrectError where calls that follow one another return the same although one value of each input
    changes between them. A change may alter nothing (a query that sees one key), but not every time."""
    for left in reversed(range(_TRIES)):
        try:
            timed.observe_two()
            break
        except IncorrectError:
            if not left:
                raise


def require_same_pace(pairs: Iterable[tuple[float, float]]) -> None:
    """Raises IncorrectError unless in one of the pairs, (ms on inputs that no call has seen, on the timed ones), the
    first is not longer."""
    slower = []
    for fresh_ms, timed_ms in pairs:
        if fresh_ms <= _FRESH_FACTOR * timed_ms + _FRESH_SPARE_MS:
            return
        slower.append((fresh_ms, timed_ms))
    fresh_ms, timed_ms = min(slower)
    raise IncorrectError(
        f"on inputs that no call has seen a call takes {fresh_ms:.4g} ms, on the timed ones {timed_ms:.4g} ms: the"
        " timed inputs are recognised, or results remembered"
    )


def require_awake(seen: Sequence[Observation]) -> None:
    """Raises IncorrectError where every call slept on the host, which lets the GPU cool down outside the timing."""
    calm = min(seen, key=lambda one: one.asleep_ms)
    asleep_ms = calm.asleep_ms
    if asleep_ms > max(_ASLEEP_MS, _ASLEEP_SHARE * calm.host_ms):
        raise IncorrectError(
            f"each call sleeps on the host for {asleep_ms:.4g} ms or more, outside of what the GPU's events time: an"
            " idle GPU raises its clocks"
        )


def _ready(device: str, cold: bool, before: Callable[[], object]) -> Callable[[], object]:
    """What runs ahead of a call: `before`, and a flush of L2 where calls are cold."""
    return device_clock.EventSampler(_nothing, before, cold=cold).make_ready if device == "cuda" else before


def _nothing() -> None:
    """What runs ahead of a call where nothing need be done."""
