"""Measuring case after case with an eye on the GPU: each begins when the GPU is free and not hot, one that heat slowed
down is measured once more, and what was noticed stands in its record."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

from benchmarks.cases.key import Key
from benchmarks.cases.outcome import CaseOutcome
from benchmarks.runner import Measurement
from benchmarks.timing import gpu_watch
from benchmarks.timing.gpu_watch import GpuWatch

Measure = Callable[[Sequence[Key]], Iterator[Measurement]]
"""One measurement per key, in order, each made when it is asked for."""


def run(keys: Sequence[Key], measure: Measure, watch: GpuWatch | None) -> Iterator[Measurement]:
    """One measurement per key, in order; as they are without a watch."""
    measurements = measure(keys)
    if watch is None:
        yield from measurements
        return
    for key in keys:
        noticed = watch.ready()
        measured = next(measurements)
        if measured.record.outcome is CaseOutcome.THROTTLED:
            noticed |= watch.cool()
            noticed[gpu_watch.RETRIED] = f"measured again after {measured.record.reason}"
            (measured,) = measure([key])
        if gpu_watch.OTHER_PROCESS not in noticed and (others := watch.computing()):
            noticed[gpu_watch.OTHER_PROCESS] = f"{', '.join(map(str, others))} began to compute on the GPU meanwhile"
        yield dataclasses.replace(measured, record=dataclasses.replace(measured.record, gpu_conditions=noticed))
