"""How much longer than its lower bound each part takes, from the committed records of an H200.

The records of PORTABLE were measured before `hopper/` existed, with the kernels that all other GPUs take. A part's time
is its bound times a factor, and a fixed time that shows at short lengths (launches, filling and emptying the GPU). All
are fitted at once to the records of parts, of whole forward passes, which are sums of parts, and of backward passes:
the least squares of relative errors. The error is found by leaving each record out in turn: fitted to the others, by
how much is that one missed?
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import scipy  # its parts take a second, see `ab/moderated.py`

from benchmarks.cases.key import NSA, PART, Key
from benchmarks.estimates import bounds, parts
from benchmarks.estimates.kernel_table import KernelTable
from benchmarks.estimates.parts import Launches, PartBound
from benchmarks.estimates.stored import LeftOut, PartFit
from benchmarks.estimates.work import CONFIG, PrefillShape
from benchmarks.history.store import Store
from nsa import NSAConfig

MACHINE = "h200"
PORTABLE = "67507c6e4c"
"""The last measured commit before `hopper/`: its kernels serve every other GPU still."""
FORWARD, BOTH = "prefill-forward", "prefill-forward-backward"


@dataclass(frozen=True)
class Sample:
    """One record and the bounds of the parts that it is the sum of."""

    case: str
    measured_ms: float
    least_ms: Mapping[str, float]
    """By part."""


def fit(samples: Sequence[Sample]) -> list[PartFit]:
    """A factor and a fixed time per part, in the order of the samples. Raises ValueError without any."""
    if not samples:
        raise ValueError("no record to calibrate on")
    names = list(dict.fromkeys(part for one in samples for part in one.least_ms))
    rows = np.zeros((len(samples), 2 * len(names)))
    for row, one in zip(rows, samples, strict=True):
        for part, least_ms in one.least_ms.items():
            row[2 * names.index(part) :][:2] = least_ms / one.measured_ms, 1 / one.measured_ms
    found, _ = scipy.optimize.nnls(rows, np.ones(len(samples)))
    records = [sum(part in one.least_ms for one in samples) for part in names]
    return [
        PartFit(part, float(factor), float(fixed_ms), count)
        for part, factor, fixed_ms, count in zip(names, found[::2], found[1::2], records, strict=True)
    ]


def leave_one_out(samples: Sequence[Sample]) -> list[LeftOut]:
    """Each record predicted from the others; none of a part that no other record has."""
    found = []
    for i, one in enumerate(samples):
        others = [*samples[:i], *samples[i + 1 :]]
        fits = {each.part: each for each in fit(others)} if others else {}
        if one.least_ms.keys() <= fits.keys():
            predicted = sum(predicted_ms(part, least_ms, fits) for part, least_ms in one.least_ms.items())
            found.append(LeftOut(one.case, next(iter(one.least_ms)) if len(one.least_ms) == 1 else None,
                                 one.measured_ms, predicted))  # fmt: skip
    return found


def predicted_ms(part: str, least_ms: float, fits: Mapping[str, PartFit]) -> float:
    """A part's time from its bound. Raises KeyError where no record of the part was fitted."""
    return fits[part].factor * least_ms + fits[part].fixed_ms


def samples(results: Path, table: KernelTable) -> list[Sample]:
    """Parts, whole forward passes and backward passes as PORTABLE measured them, with today's bounds."""
    on, measured = Launches(table, bounds.target(MACHINE)), _measured(results)
    found = []
    for case, (key, latency_ms) in measured.items():
        shape = _shape(key)
        if key.mode == BOTH:
            forward = measured.get(case.replace(BOTH, FORWARD, 1))
            if forward is not None:
                found.append(_sample(case, latency_ms - forward[1], [parts.backward(shape, on)]))
            continue
        asked = key.mode.removeprefix(PART).replace("-", " ") if key.mode.startswith(PART) else ""
        found.append(_sample(case, latency_ms, [one for one in parts.forward(shape, on) if one.part.startswith(asked)]))
    return found


def _sample(case: str, measured_ms: float, of: Sequence[PartBound]) -> Sample:
    return Sample(case, measured_ms, {one.part: one.least_ms for one in of})


def _measured(results: Path) -> dict[str, tuple[Key, float]]:
    """By case, the newest latency that PORTABLE measured: random inputs, L2 flushed, the default configuration."""
    found: dict[str, tuple[Key, float]] = {}
    for record in sorted(Store(results, MACHINE).records(), key=lambda one: one.fingerprint.utc):
        key = record.key
        wanted = key.mode in (FORWARD, BOTH) or key.mode.startswith(PART)
        plain = (key.implementation, key.inputs, key.cache, key.launch) == (NSA, "random", "cold", "eager")
        at_commit = (record.fingerprint.commit or "").startswith(PORTABLE)
        if wanted and plain and at_commit and record.latency_ms is not None and _is_default(key):
            found[key.case] = key, record.latency_ms
    return found


def _is_default(key: Key) -> bool:
    return key.config is not None and NSAConfig.from_mapping(key.config) == CONFIG and key.batch == 1


def _shape(key: Key) -> PrefillShape:
    return PrefillShape(key.heads, key.num_kv_heads, key.head_dim_k, key.head_dim_v, key.num_keys)
