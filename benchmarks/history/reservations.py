"""Why a figure is not to be trusted although the outputs are right: a busy CPU or GPU, few samples, a wide spread.

It is kept, and these reasons are told where it is read. `accept` takes no level that rests on such figures, unless a
person says why.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from benchmarks.history.record_line import ClockLine, RecordLine
from benchmarks.history.records import Record
from benchmarks.timing.clocks import ClockSummary
from benchmarks.timing.gpu_watch import UNSEEN, UNTRUSTED
from benchmarks.timing.latency import median_interval
from harness.fingerprint import Fingerprint

LOAD, UNMET, FEW_SAMPLES = "load", "unmet", "few_samples"
_LEAST_LOAD, _LOAD_OF_THREADS = 0.25, 0.1
"""Cores that others may keep busy: this many, or this share of the threads that are measured where that is more."""
_DRIFT, _UNSTEADY = 0.03, 0.05
"""How far a GPU's clock may move over the samples, and lie below their median, before the figure is marked."""
FEWEST_SAMPLES = next(count for count in range(1, 100) if median_interval([1.0] * count) is not None)
"""With fewer, nothing says how well the median is known."""


def of(record: Record) -> dict[str, str]:
    """Each reason by its name, in words; empty where there is none, or no figure."""
    return _reasons(record, record.fingerprint)


def _reasons(figures: Record | RecordLine, fingerprint: Fingerprint) -> dict[str, str]:
    """The same of a record's line in a file, which has no fingerprint."""
    if figures.latency_ms is None:
        return {}
    found = {}
    if (load := _load(figures, fingerprint)) is not None:
        found[LOAD] = load
    if figures.unmet is not None:
        found[UNMET] = f"unmet precision ({figures.unmet})"
    if figures.samples is not None and figures.samples.count < FEWEST_SAMPLES:
        found[FEW_SAMPLES] = f"only {figures.samples.count} sample(s)"
    noticed = figures.gpu_conditions or {}
    found |= {name: noticed[name] for name in UNTRUSTED if name in noticed}
    return found


def _load(figures: Record | RecordLine, fingerprint: Fingerprint) -> str | None:
    """What a busy CPU does to a figure of the CPU; a GPU's own time does not depend on it."""
    if fingerprint.driver is not None:
        return None
    allowed = max(_LEAST_LOAD, _LOAD_OF_THREADS * fingerprint.threads)
    where = f"on the cores of {fingerprint.threads} thread(s)"
    if figures.other_load is not None:
        return f"load {figures.other_load:.1f} of other processes {where}" if figures.other_load > allowed else None
    if fingerprint.load is not None and fingerprint.load > allowed:  # not known beside the case itself
        return f"load {fingerprint.load:.1f} before the run {where}"
    return None


def with_device(figures: Record | RecordLine, fingerprint: Fingerprint) -> tuple[str, ...]:
    """What the pages tell: these reasons, and what the device did, which `accept` lets pass."""
    found = list(_reasons(figures, fingerprint).values())
    if figures.latency_ms is None:
        return ()
    if figures.queued_ahead is False:
        found.append("the device waited for the host: the figure holds launches too")
    if figures.clocks is not None:
        found += _of_clocks(figures.clocks)
    if fingerprint.gpu_settings is not None and fingerprint.gpu_settings.display:
        found.append("the GPU draws a screen")
    noticed = figures.gpu_conditions or {}
    return (*found, noticed[UNSEEN]) if UNSEEN in noticed else tuple(found)


def _of_clocks(clocks: ClockSummary | ClockLine) -> list[str]:
    found = []
    if throttled := clocks.throttled:
        found.append(f"{sum(throttled.values())} samples at lowered clocks ({', '.join(throttled)})")
    if clocks.sm_mhz_drift is not None and abs(clocks.sm_mhz_drift) > _DRIFT:
        percent = f"{100 * clocks.sm_mhz_drift:+.0f} %"
        found.append(f"the SM clock drifted by {percent} over the samples, up to {clocks.temperature_c_max} degrees C")
    elif not throttled and clocks.sm_mhz_min < (1 - _UNSTEADY) * clocks.sm_mhz_median:
        found.append(f"clocks are not locked: SM {clocks.sm_mhz_min} MHz beside a median of {clocks.sm_mhz_median:.0f}")
    return found


def count(records: Iterable[Record]) -> dict[str, int]:
    """How many figures have each reason, and "figures": how many have one at all; empty where none has."""
    found = [reasons for record in records if (reasons := of(record))]
    return {"figures": len(found), **Counter(name for reasons in found for name in reasons)} if found else {}
