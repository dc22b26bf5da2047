"""What a run prints: one plain line per measurement, a bar with the time left on a terminal, a table at the end."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from types import TracebackType

from tqdm import tqdm

from benchmarks.cases.key import NSA, Key
from benchmarks.contenders import Verdict
from benchmarks.history import reservations
from benchmarks.history.records import Record
from benchmarks.history.speedup import BaselineComparison, speed_up
from benchmarks.timing import gpu_watch


class RunProgress:
    """Lines of finished measurements on stdout; on a terminal, below them on stderr, what runs and the time left."""

    def __init__(self, keys: Sequence[Key]) -> None:
        self._keys = keys
        self._done: list[Record] = []
        self._begin = time.perf_counter()
        self._bar = tqdm(total=len(keys), unit="case", leave=False, dynamic_ncols=True, disable=None)  # None: no log
        self._name_next()

    def __enter__(self) -> RunProgress:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._bar.close()

    def finished(self, record: Record) -> None:
        """Print its line."""
        elapsed_s = time.perf_counter() - self._begin
        line = progress(record, len(self._done) + 1, len(self._keys), elapsed_s, self._done)
        tqdm.write(line, file=sys.stdout)
        sys.stdout.flush()
        self._done.append(record)
        self._bar.update()
        self._name_next()

    def _name_next(self) -> None:
        if len(self._done) < len(self._keys):
            self._bar.set_postfix_str(self._keys[len(self._done)].name)


def progress(record: Record, done: int, total: int, elapsed_s: float, earlier: Sequence[Record]) -> str:
    """[ 3/20   12 s,   68 s left] decode/8x2x64/b4/s16384/float32/nsa  PASSED  84.4 ms  0.19x as fast as sdpa-flash

    The time left takes what is to come to be as long as what is done.
    """
    width, left_s = len(str(total)), elapsed_s / done * (total - done)
    clock = f"{elapsed_s:4.0f} s, {left_s:4.0f} s left"
    line = f"[{done:>{width}}/{total} {clock}] {record.key.name:<66} {record.outcome.value}"
    done_about_it = [text for name, text in (record.gpu_conditions or {}).items() if name in gpu_watch.TOLD]
    if record.reason:
        return "  ".join([line, record.reason, *done_about_it])
    ratios = [_ratio(record, other) for other in earlier if other.key.case == record.key.case]
    reasons = reservations.of(record).values()
    warning = [f"NOT TRUSTWORTHY: {'; '.join(reasons)}"] if reasons else []
    return "  ".join([line, figure(record), *(ratio for ratio in ratios if ratio), *done_about_it, *warning])


def figure(record: Record) -> str:
    """The latency, or the peak of a case that measures memory; "" where there is neither."""
    if record.latency_ms is not None:
        return f"{_digits(record.latency_ms)} ms"
    return "" if record.peak_mem_mib is None else f"{_digits(record.peak_mem_mib)} MiB"


def _marked(record: Record) -> str:
    """The figure, with a question mark where it is not to be trusted."""
    return f"{figure(record)}{'?' * bool(reservations.of(record))}"


def warning(records: Sequence[Record]) -> str:
    """What the question marks of the table mean; "" where there are none."""
    counted = reservations.count(records)
    if not counted:
        return ""
    words = {
        reservations.LOAD: "under load",
        reservations.UNMET: "with unmet precision",
        reservations.FEW_SAMPLES: "of too few samples",
        gpu_watch.OTHER_PROCESS: "beside another process on the GPU",
        gpu_watch.HOT: "of a hot GPU",
    }
    why = ", ".join(f"{counted[name]} {said}" for name, said in words.items() if name in counted)
    return (
        f"?: NOT TRUSTWORTHY, {counted['figures']} of {len(records)} figures ({why}); measure again on an idle machine"
    )


def _digits(x: float) -> str:
    """Four digits where there is a fraction to show."""
    return f"{x:.0f}" if x >= 1000 else f"{x:.4g}"


def _ratio(record: Record, other: Record) -> str:
    if record.key.implementation != NSA:
        return ""
    faster = speed_up(record, other)
    return "" if faster is None else f"{faster:.2f}x as fast as {other.key.implementation}"


def table(comparisons: Sequence[BaselineComparison]) -> str:
    """One line per case: NSA, then each baseline with how many times as fast NSA is."""
    width = max((len(comparison.nsa.key.case) for comparison in comparisons), default=len("case"))
    lines = [f"{'case':<{width}} {'nsa':>12}  baselines (NSA is so many times as fast; random inputs unless named)"]
    for comparison in comparisons:
        nsa = comparison.nsa
        cells = []
        for other in comparison.baselines:
            faster = speed_up(nsa, other)
            times = "" if faster is None else f" ({faster:.2f}x)"
            cells.append(f"{other.key.implementation} {_marked(other) or other.outcome.value}{times}")
        lines.append(f"{nsa.key.case:<{width}} {_marked(nsa) or nsa.outcome.value:>12}  {', '.join(cells)}".rstrip())
    return "\n".join(lines)


def fits(records: Sequence[Record], title: str) -> str:
    """Of a GPU that is forced to be another one: one line per case, its peak memory or why it has none."""
    width = max((len(record.key.case) for record in records), default=len("case"))
    lines = [f"{title}: results and memory; nothing was timed", f"{'case':<{width}} {'peak memory':>12}"]
    for record in records:
        lines.append(f"{record.key.case:<{width}} {figure(record) or record.outcome.value:>12}")
    return "\n".join(lines)


def verdict_table(verdicts: Mapping[str, Mapping[str, tuple[Verdict, str]]]) -> str:
    """One line per contender and case; a contender of which no case was asked has a line that says so."""
    width = max((len(case) for by_case in verdicts.values() for case in by_case), default=len("case"))
    lines = []
    for name, by_case in verdicts.items():
        lines.append(f"{name}, beside NSA in this run:{'' if by_case else ' none of these cases is an attention'}")
        lines += [f"  {case:<{width}}  {found.value:<12}  {why}" for case, (found, why) in by_case.items()]
    return "\n".join(lines)
