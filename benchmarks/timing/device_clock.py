"""The GPU's own time of a call: two events around it, with the work queued before the GPU comes to it.

A host that launches kernel after kernel cannot always keep ahead of the GPU, and the gaps would be measured as work.
So the GPU first spins for about as long as the host needs to launch the call; when it comes to the first event,
everything behind it stands in the queue. Where the call itself waits for the GPU, or launches more than the queue
holds, this cannot be; then the samples hold launch latency, and `queued_ahead` is False.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

_TRIES = 3  # how often the spin is made longer before the call is held to wait for the GPU itself
_LONGEST_SPIN_S = 0.2
_SPARE_S = 5e-5
_FLUSH_L2_SIZES = 2
_CALIBRATION_CYCLES = 2_000_000
_SPARE_WAIT_MS = 0.05  # by how much waiting for the work may take longer than waiting for an idle GPU
_UNJOINED_SHARE = 0.1
_SLOWEST_WAIT_MS = 0.2
"""Beyond what is allowed: a wait that is longer still is no slow host's, and refused without comparing."""
_TURNS = 3
"""Waits are compared in so many turns of four calls, in which each kind comes once at an even and once at an odd place:
calls that alternate between two copies of the inputs are in both."""


class UnjoinedWorkError(Exception):
    """The GPU still worked after the call's last event: on another stream, which nobody waits for."""


def wait() -> None:
    """Until the GPU has done everything."""
    torch.cuda.synchronize()


class EventSampler:
    """Samples of one call on the current GPU and stream."""

    def __init__(self, call: Callable[[], object], before: Callable[[], object], *, cold: bool) -> None:
        """`cold`: a buffer larger than L2 is overwritten ahead of each call."""
        self._call, self._before = call, before
        l2_bytes = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
        self._flush = torch.empty(_FLUSH_L2_SIZES * l2_bytes, dtype=torch.int8, device="cuda") if cold else None
        self._host_s: list[float] = []
        self._after_ms: list[float] = []
        self._spin_cycles = 0
        self.queued_ahead = False
        self.calls = 0
        """How many samples have called so far."""

    def plain_sample(self) -> float:
        """One sample, ms, without a spin: for warming up. Notes how long the host took."""
        return self._sample(0)[0]

    def queue_ahead(self) -> None:
        """Find the spin after which the GPU finds everything queued; call it after some plain samples."""
        self._after_ms.clear()
        if not self._host_s:
            self.plain_sample()
        spin_s, cycles_per_s = 2 * statistics.median(self._host_s) + _SPARE_S, _cycles_per_s()
        for _ in range(_TRIES):
            self._spin_cycles = int(min(spin_s, _LONGEST_SPIN_S) * cycles_per_s)
            if self._sample(self._spin_cycles)[1]:
                self.queued_ahead = True
                return
            spin_s *= 2
        self._spin_cycles = 0

    def sample(self) -> float:
        """One sample, ms. Where the host was held up once, it is taken again."""
        for _ in range(_TRIES if self.queued_ahead else 1):
            taken, queued = self._sample(self._spin_cycles)
            if queued:
                return taken
        self.queued_ahead = False
        return taken

    def end_to_end_sample(self) -> float:
        """Wall time, ms, from the call to the end of the GPU's work."""
        self.make_ready()
        wait()
        begin = time.perf_counter()
        self._call()
        wait()
        return (time.perf_counter() - begin) * 1e3

    def make_ready(self) -> None:
        """Run what goes ahead of a call, and flush L2 where calls are cold."""
        self._before()
        if self._flush is not None:
            self._flush.zero_()

    def require_joined(self, latency_ms: float) -> None:
        """Raises UnjoinedWorkError where, since this was asked last, the GPU was mostly not done at a call's end.

        A host that has not waited for some time takes up to 0.1 ms to see that nothing is left (the first calls of a
        process, an H100). So where that took long, waiting at once is compared with waiting when all work has ended.
        """
        allowed_ms = _SPARE_WAIT_MS + _UNJOINED_SHARE * latency_ms
        after_ms = self._median_wait_ms()
        if allowed_ms < after_ms <= allowed_ms + _SLOWEST_WAIT_MS:
            after_ms = self._wait_beside_a_later_one(2 * after_ms / 1e3)
        if after_ms > allowed_ms:
            raise UnjoinedWorkError(
                f"the GPU worked for {after_ms:.3g} ms after the call's end, which took {latency_ms:.3g} ms by its"
                " stream: work on another stream is not waited for"
            )

    def _wait_beside_a_later_one(self, pause_s: float) -> float:
        """By how many ms the GPU is waited for longer at once than after a pause, in which such work would end."""
        waits_ms: dict[float, list[float]] = {0.0: [], pause_s: []}
        for pause in _TURNS * (0.0, pause_s, pause_s, 0.0):
            self._sample(self._spin_cycles, pause)
            waits_ms[pause].append(self._median_wait_ms())
        return statistics.median(waits_ms[0.0]) - statistics.median(waits_ms[pause_s])

    def _median_wait_ms(self) -> float:
        """Of the samples since this was asked last, how much longer the GPU was waited for than an idle one."""
        median = statistics.median(self._after_ms)
        self._after_ms.clear()
        return median

    def _sample(self, spin_cycles: int, pause_s: float = 0.0) -> tuple[float, bool]:
        """(ms, whether the GPU had not come to the first event when everything was queued). The host pauses between the
        call's end and waiting for the rest."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.make_ready()
        if spin_cycles:
            torch.cuda._sleep(spin_cycles)
        begin.record()
        launched = time.perf_counter()
        self._call()
        self.calls += 1
        self._host_s.append(time.perf_counter() - launched)
        end.record()
        queued = not begin.query()
        end.synchronize()
        ended = time.perf_counter()
        while time.perf_counter() - ended < pause_s:  # a core that sleeps is slower afterwards
            pass
        ended = time.perf_counter()
        wait()
        done = time.perf_counter()
        wait()  # nothing is left: what waiting costs a busy host
        self._after_ms.append((2 * done - ended - time.perf_counter()) * 1e3)
        return float(begin.elapsed_time(end)), queued


def _cycles_per_s() -> float:
    """How many cycles of `torch.cuda._sleep` the GPU counts in a second, at the clock that it has now."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(_CALIBRATION_CYCLES)  # the first one loads the kernel
    begin.record()
    torch.cuda._sleep(_CALIBRATION_CYCLES)
    end.record()
    end.synchronize()
    return _CALIBRATION_CYCLES / (begin.elapsed_time(end) / 1e3)
