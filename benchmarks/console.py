"""What a run prints: one plain line per measurement, a table at the end."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.cases import NSA
from benchmarks.records import Record
from benchmarks.verdict import Comparison, speed_up


def progress(record: Record, done: int, total: int, elapsed_s: float, earlier: Sequence[Record]) -> str:
    """[ 3/20   12 s] decode/8x2x64/b4/s16384/float32/nsa  PASSED  84.4 ms  0.19x as fast as sdpa-flash"""
    width = len(str(total))
    line = f"[{done:>{width}}/{total} {elapsed_s:4.0f} s] {record.key.name:<58} {record.outcome.value}"
    if record.reason:
        return f"{line}  {record.reason}"
    ratios = [_ratio(record, other) for other in earlier if other.key.case == record.key.case]
    return "  ".join([line, figure(record), *(ratio for ratio in ratios if ratio)])


def figure(record: Record) -> str:
    """The latency, or the peak of a case that measures memory; "" where there is neither."""
    if record.latency_ms is not None:
        return f"{_digits(record.latency_ms)} ms"
    return "" if record.peak_mem_mib is None else f"{_digits(record.peak_mem_mib)} MiB"


def _digits(x: float) -> str:
    """Four digits where there is a fraction to show."""
    return f"{x:.0f}" if x >= 1000 else f"{x:.4g}"


def _ratio(record: Record, other: Record) -> str:
    if record.key.implementation != NSA:
        return ""
    faster = speed_up(record, other)
    return "" if faster is None else f"{faster:.2f}x as fast as {other.key.implementation}"


def table(comparisons: Sequence[Comparison]) -> str:
    """One line per case: NSA, then each baseline with how many times as fast NSA is."""
    lines = [f"{'case':<52} {'nsa':>12}  baselines (NSA is so many times as fast)"]
    for comparison in comparisons:
        nsa = comparison.nsa
        cells = []
        for other in comparison.baselines:
            faster = speed_up(nsa, other)
            times = "" if faster is None else f" ({faster:.2f}x)"
            cells.append(f"{other.key.implementation} {figure(other) or other.outcome.value}{times}")
        lines.append(f"{nsa.key.case:<52} {figure(nsa) or nsa.outcome.value:>12}  {', '.join(cells)}")
    return "\n".join(lines)
