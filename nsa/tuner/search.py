"""The search behind `nsa.tune`: kernel after kernel, from the launch in force to better ones, each kept at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from nsa.io import cannot_write
from nsa.triton_backend import architecture, tuning
from nsa.triton_backend.tuning import LaunchConfig, Table
from nsa.tuner import candidates, trials, tuned
from nsa.tuner.candidates import Trial
from nsa.tuner.trials import Timed
from nsa.tuner.tuned import Launches, Where
from nsa.workload import Workload

_WARM_UP_CALLS, _CALLS = 3, 20
_LOW, _HIGH = 5, 14
"""Of 20 ordered samples, what the median lies between with a probability of 95 % (binomial)."""


@dataclass(frozen=True)
class Search:
    """The search on one GPU, with what it asks of that GPU handed in."""

    where: Where
    trial: Callable[[trials.Workload, str, LaunchConfig, Table], Trial]
    """Runs, compares and times one launch of a kernel."""
    fits: Callable[[str, LaunchConfig, Table, trials.Workload], bool]
    """Whether a launch compiles, fits the shared memory, and serves the shape."""
    say: Callable[[str], object]

    def tune(self, shapes: Sequence[Workload]) -> None:
        """Put in force what is known; then measure what is not, keep it and put it in force."""
        known = tuned.read(self.where, self.say)
        tuned.put_in_force(self.where.capability, known)
        for shape in shapes:
            width, times = tuning.width(shape.head_dim_k, shape.head_dim_v, shape.dtype)
            if times > 1:
                self.say(f"{shape}: rows are wider than those of any table; nothing to choose")
                continue
            if not tuning.has_tiles_of_its_own(shape.dtype):
                self.say(f"{shape}: float32 takes half the rows and keys of 16-bit types; nothing to choose")
                continue
            timing = self._timing(shape, width)
            for kernel in tuning.shipped_table(self.where.capability).narrow:
                name = tuning.own_name(kernel, shape.group)
                if name in known.get(width, {}) or (shape.kind == "prefill" and "backward" in kernel):
                    continue
                if (launch := self._best(kernel, timing)) is not None:
                    known = self._kept(known, width, name, launch)
                    tuned.put_in_force(self.where.capability, known)

    def _timing(self, shape: Workload, width: str) -> trials.Workload:
        return trials.Workload(
            self.where.capability, width, shape.group, shape.head_dim_k, shape.head_dim_v, shape.num_kv_heads,
            shape.tokens, shape.dtype, batch=shape.batch, config=shape.config,
        )  # fmt: skip

    def _best(self, kernel: str, timing: trials.Workload) -> LaunchConfig | None:
        """The fastest launch, found by steps that change one size each; None where the kernel does not serve the
        shape, or is wrong or fails as it is."""
        table = tuning.table(self.where.capability)
        start = table.of(kernel, timing.width, timing.group)
        if not self.fits(kernel, start, table, timing):
            return None
        first = best = self.trial(timing, kernel, start, table)
        if first.outcome != "measured":
            self.say(f"{kernel}: left as it is, which was not measured: {first.outcome} ({first.detail})")
            return None
        tried = {start}
        while True:
            near = [one for one in candidates.neighbours(best.tuned) if one not in tried]
            tried.update(near)
            found = [self.trial(timing, kernel, one, table) for one in near if self.fits(kernel, one, table, timing)]
            better = candidates.best([best, *found])
            if better is best:
                break
            best = better
        self.say(f"{kernel}: {first.latency_ms:.3f} -> {best.latency_ms:.3f} ms; {len(tried)} launches looked at")
        return best.tuned

    def _kept(self, known: Launches, width: str, name: str, launch: LaunchConfig) -> Launches:
        """What is known now: in the cache, or in this process alone where that cannot be written."""
        try:
            return tuned.add(self.where, {width: {name: launch}}, self.say)
        except OSError as error:
            self.say(f"{name} for this process alone: {cannot_write(error, 'XDG_CACHE_HOME') or error}")
            return {**known, width: {**known.get(width, {}), name: launch}}


def on_gpu(device: torch.device, say: Callable[[str], object]) -> Search:
    """The search on the GPU that is here."""
    where = Where(torch.cuda.get_device_name(device), architecture.of(device), tuned.sources_sha256())
    return Search(where, lambda timing, *launch: timing.trial(*launch, _timed), trials.fits, say)


def _timed(call: Callable[[], object]) -> Timed:
    """The GPU's own time of a call, between two events."""
    for _ in range(_WARM_UP_CALLS):
        call()
    samples_ms = []
    for _ in range(_CALLS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        samples_ms.append(float(begin.elapsed_time(end)))
    samples_ms.sort()
    return Timed((samples_ms[_CALLS // 2 - 1] + samples_ms[_CALLS // 2]) / 2, (samples_ms[_LOW], samples_ms[_HIGH]))
