"""Which tiles are the fastest: candidates around those of the table, what was found of each, and the next table.

The pure core of `nsa.tune` and of `python -m benchmarks tune`: nothing here runs a kernel.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from nsa.triton_backend.tuning import MIN_DOT, WIDTHS, LaunchConfig, Table

MAX_ROWS, MAX_KEYS, MAX_WARPS, MAX_STAGES = 128, 128, 8, 4
WORTH = 0.02
"""A gain below this share of the latency is not worth another table."""


@dataclass(frozen=True)
class Trial:
    """What was found of one candidate."""

    kernel: str
    tuned: LaunchConfig
    outcome: str
    """"measured", "does not fit", "wrong" or "failed"."""
    latency_ms: float | None = None
    interval_ms: tuple[float, float] | None = None
    """Where the median lies."""
    detail: str | None = None
    """How wrong, or the error."""


def candidates(current: LaunchConfig) -> list[LaunchConfig]:
    """The present launch, then every one whose sizes are half, the same or twice, with a stage more or less."""
    found = [current]
    for rows, keys, warps, stages in product(
        _around(current.rows, MIN_DOT, MAX_ROWS),
        _around(current.keys, MIN_DOT, MAX_KEYS),
        _around(current.num_warps, 1, MAX_WARPS),
        range(max(current.num_stages - 1, 1), min(current.num_stages + 1, MAX_STAGES) + 1),
    ):
        for registers in {current.max_registers, None}:
            candidate = dataclasses.replace(
                current, rows=rows, keys=keys, num_warps=warps, num_stages=stages, max_registers=registers
            )
            if candidate not in found:
                found.append(candidate)
    return found


def neighbours(current: LaunchConfig) -> list[LaunchConfig]:
    """Those of `candidates` that differ from the present launch in one size."""
    own = dataclasses.astuple(current)
    return [
        one
        for one in candidates(current)
        if sum(a != b for a, b in zip(own, dataclasses.astuple(one), strict=True)) == 1
    ]


def _around(size: int, least: int, most: int) -> list[int]:
    return [x for x in (size, size // 2, size * 2) if least <= x <= most]


def best(trials: Sequence[Trial]) -> Trial:
    """The fastest candidate that is right; the first, which is the table's own, unless another is surely faster.

    Surely: the intervals of the two medians do not meet, and the gain is worth it. Raises ValueError where the table's
    own was not measured, since then nothing is known to be better.
    """
    own = trials[0]
    if own.outcome != "measured" or own.latency_ms is None or own.interval_ms is None:
        raise ValueError(f"{own.kernel}: the table's own launch was not measured: {own.outcome} ({own.detail})")
    fastest = own
    for trial in trials[1:]:
        if trial.latency_ms is None or trial.interval_ms is None:
            continue
        sure = trial.interval_ms[1] < own.interval_ms[0] and trial.latency_ms < own.latency_ms * (1 - WORTH)
        if sure and trial.latency_ms < (fastest.latency_ms or 0.0):
            fastest = trial
    return fastest


def changed(table: Table, width: str, chosen: Mapping[str, LaunchConfig], how: str) -> Table:
    """The table with other launches for one of `WIDTHS`."""
    if width not in WIDTHS:
        raise ValueError(f"width must be one of {', '.join(WIDTHS)}; got {width!r}")
    launches: Mapping[str, LaunchConfig] = getattr(table, width)
    of_widths: dict[str, Any] = {width: {**launches, **chosen}}
    return dataclasses.replace(table, how=how, **of_widths)


def text(table: Table) -> str:
    """A table as the file that `nsa.triton_backend.tuning.table` reads: one launch per line."""
    widths = []
    for width in WIDTHS:
        launches: Mapping[str, LaunchConfig] = getattr(table, width)
        rows = [f'    "{name}": {json.dumps(_given(tuned))}' for name, tuned in launches.items()]
        widths.append(f'  "{width}": {{\n' + ",\n".join(rows) + "\n  }" if rows else f'  "{width}": {{}}')
    if table.masked:
        of_widths = []
        for width, launches in table.masked.items():
            rows = [f'      "{name}": {json.dumps(_given(tuned))}' for name, tuned in launches.items()]
            of_widths.append(f'    "{width}": {{\n' + ",\n".join(rows) + "\n    }")
        widths.append('  "masked": {\n' + ",\n".join(of_widths) + "\n  }")
    return f'{{\n  "how": {json.dumps(table.how, ensure_ascii=False)},\n' + ",\n".join(widths) + "\n}\n"


def _given(tuned: LaunchConfig) -> dict[str, int]:
    return {name: value for name, value in dataclasses.asdict(tuned).items() if value is not None}
