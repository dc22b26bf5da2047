"""How long a GPU takes from one small kernel to the next when both are queued: a constant of the process.

Two processes of the same code on one H200 differ in it: 1.58 to 1.61 us in some, 1.74 to 1.81 us in most others, the
same within 0.2 % for as long as a process lives, whatever core it runs on and whoever else uses the GPU. It is drawn
when the process gets its context. A call of many short kernels is 3 % slower in the one than in the other (prefill of
2048 tokens, 12 heads: 289.5 or 297 us); a CUDA graph is not, since its kernels are not fetched one by one.
"""

from __future__ import annotations

import statistics

import torch

_KERNELS = 200
_TRIALS = 5
_TRIES = 4
_AHEAD_CYCLES = 6_000_000  # the GPU spins for some 3 ms while the host queues the kernels


def measure_ns() -> float:
    """Of this process on the current GPU; the median of some trials."""
    x = torch.zeros(1, device="cuda").add_(1)  # loads the kernel
    return statistics.median(_trial_ns(x) for _ in range(_TRIALS))


def _trial_ns(x: torch.Tensor) -> float:
    """Taken again, behind a longer spin, where the host had not queued all kernels in time."""
    for longer in range(_TRIES):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(_AHEAD_CYCLES << longer)
        begin.record()
        for _ in range(_KERNELS):
            x.add_(1)
        end.record()
        queued = not begin.query()
        end.synchronize()
        if queued:
            break
    return float(begin.elapsed_time(end)) * 1e6 / _KERNELS
