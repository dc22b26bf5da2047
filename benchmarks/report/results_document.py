"""The tables and the picture of docs/results.md, from the records.

The document says where a table stands by two comments, `<!-- prefill h200 64x4x128 -->` and `<!-- end -->`: what stands
between them is written anew. A row is of one run, so that its ratios are: the run in which most of the implementations
were measured, the newest of these. Where NSA was measured again since, a second row has its newest figure, so that
figures of one commit stand beside one another.
"""

from __future__ import annotations

import io
import itertools
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib import rc_context
from matplotlib.figure import Figure

from benchmarks.cases.key import NSA
from benchmarks.history.records import Record
from benchmarks.history.store import Store
from benchmarks.report import style
from nsa.io import atomic_write

SHOWN = {NSA: "NSA", "sdpa-cudnn": "cuDNN", "sdpa-flash": "FlashAttention-2", "flash-attn-4": "FlashAttention-4"}
"""Implementations of a row, in this order."""
PREFILL = {"prefill-forward": "forward", "prefill-forward-backward": "forward + backward"}
INPUTS = ("random", "recorded")
PICTURE = "speedup.svg"
"""Beside the document, of its first table of prefills."""
_TABLE = re.compile(r"(<!-- (prefill|decode) ([\w-]+) ([\w:-]+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)


@dataclass(frozen=True)
class ResultsRow:
    """One case in one run."""

    batch: int
    num_keys: int
    commit: str
    inputs: str
    """Their kind, and where recorded ones are from: "recorded (study 8d4d61e)"."""
    latency_ms: Mapping[str, float]
    """By implementation; NSA is among them."""

    def cell(self, implementation: str) -> str:
        """Milliseconds, and for a baseline how many times as long as NSA it takes."""
        if implementation not in self.latency_ms:
            return "–"
        latency_ms = self.latency_ms[implementation]
        figure = f"{latency_ms:.0f}" if latency_ms >= 1000 else f"{latency_ms:.3g}"
        return figure if implementation == NSA else f"{figure} ({latency_ms / self.latency_ms[NSA]:.3g}×)"


def write(results: Path, document: Path) -> bool:
    """Write the tables and the picture anew. Whether anything changed; ValueError for a table without a record."""
    found = content(results, document.read_text(encoding="utf-8"))
    changed = False
    for path, new in ((document, found[0]), (document.with_name(PICTURE), found[1])):
        if not path.exists() or path.read_text(encoding="utf-8") != new:
            atomic_write(path, new)
            changed = True
    return changed


def content(results: Path, text: str) -> tuple[str, str]:
    """(the document, the picture) as the records have them. ValueError for a table that no record is of."""
    by_machine: dict[str, list[Record]] = {}

    def table(match: re.Match[str]) -> str:
        begin, kind, machine, what, _, end = match.groups()
        if machine not in by_machine:
            by_machine[machine] = Store(results, machine).records()
        lines = {"prefill": _prefill, "decode": _decode}[kind](by_machine[machine], what)
        if not lines:
            raise ValueError(f"there is no record for the table `{kind} {machine} {what}` below {results}")
        return begin + "\n".join(lines) + "\n" + end

    new = _TABLE.sub(table, text)
    first = next((match for match in _TABLE.finditer(text) if match[2] == "prefill"), None)
    if first is None:
        raise ValueError("the document has no table of prefills, of which its picture is")
    return new, _picture(by_machine[first[3]], first[3], first[4])


def rows(
    records: Sequence[Record], mode: str, what: str, inputs: str = "random", launch: str = "eager"
) -> Iterator[ResultsRow]:
    """By length: every bfloat16 case on cold caches and such inputs that NSA was measured on, twice where its newest
    run is not the one with the most implementations."""
    measured: dict[tuple[int, int], dict[str, list[Record]]] = defaultdict(lambda: defaultdict(list))
    for record in records:
        key = record.key
        kind = (key.mode, key.what, key.dtype, key.cache, key.inputs, key.launch)
        alike = kind == (mode, what, "bfloat16", "cold", inputs, launch)
        usual_queries = key.num_queries == (1 if mode == "decode" else key.num_keys)
        if alike and usual_queries and key.implementation in SHOWN and record.latency_ms is not None:
            measured[key.batch, key.num_keys][record.fingerprint.utc].append(record)
    for (batch, num_keys), runs in sorted(measured.items(), key=lambda item: (-item[0][0], item[0][1])):
        with_nsa = [run for run in runs.values() if any(one.key.implementation == NSA for one in run)]
        if with_nsa:
            best = max(with_nsa, key=lambda run: (len({one.key.implementation for one in run}), _utc(run)))
            newest = max(with_nsa, key=_utc)
            yield _row(batch, num_keys, inputs, best)
            if newest is not best:
                yield _row(batch, num_keys, inputs, newest)


def _row(batch: int, num_keys: int, inputs: str, run: Sequence[Record]) -> ResultsRow:
    latency_ms = {one.key.implementation: one.latency_ms for one in run if one.latency_ms is not None}
    source = next((one.inputs_source for one in run if one.key.implementation == NSA), None)
    named = f"{inputs} ({source})" if source else inputs
    return ResultsRow(batch, num_keys, (run[0].fingerprint.commit or "unknown")[:10], named, latency_ms)


def _utc(run: Sequence[Record]) -> str:
    return run[0].fingerprint.utc


def _prefill(records: Sequence[Record], what: str) -> list[str]:
    """The rows of a length side by side: forward, and with the backward pass, each on random and recorded inputs."""
    found = [
        (row.num_keys, number, name, row)
        for number, (mode, name) in enumerate(PREFILL.items())
        for inputs in INPUTS
        for row in rows(records, mode, what, inputs)
        if row.batch == 1
    ]
    found.sort(key=lambda one: one[:2])  # stable: random ones first
    lines = [
        _line([_tokens(num_keys), name, row.inputs, *map(row.cell, SHOWN), f"`{row.commit}`"])
        for num_keys, _, name, row in found
    ]
    return [*_head(("tokens", "", "inputs", *_units())), *lines] if lines else []


def _decode(records: Sequence[Record], what: str) -> list[str]:
    found = [row for inputs in INPUTS for row in rows(records, "decode", what, inputs, launch="graph")]
    found.sort(key=lambda row: (-row.batch, row.num_keys))  # stable: random ones first
    lines = [
        _line([f"{row.batch} × {_tokens(row.num_keys)}", row.inputs, *map(row.cell, SHOWN), f"`{row.commit}`"])
        for row in found
    ]
    return [*_head(("sequences × tokens", "inputs", *_units())), *lines] if lines else []


def _units() -> tuple[str, ...]:
    first, *others = SHOWN.values()
    return (f"{first}, ms", *others, "commit")


def _head(names: Sequence[str]) -> list[str]:
    return [_line(names), "|" + "---|" * len(names)]


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _tokens(count: int) -> str:
    return f"{count // 1024}k" if count % 1024 == 0 else str(count)


def _picture(records: Sequence[Record], machine: str, what: str) -> str:
    """An SVG: how many times as long as NSA dense attention takes, by length."""
    with rc_context(style.RC):
        figure = Figure()
        axis = figure.add_subplot()
        number, lengths = 0, set[int]()
        for baseline in ("sdpa-cudnn", "flash-attn-4"):
            for (mode, name), inputs in itertools.product(PREFILL.items(), INPUTS):
                lines: dict[str, list[tuple[int, float]]] = {}  # figures on inputs from elsewhere are no line
                for row in rows(records, mode, what, inputs):
                    if row.batch == 1 and baseline in row.latency_ms:
                        ratio = row.latency_ms[baseline] / row.latency_ms[NSA]
                        points = lines.setdefault(row.inputs, [])
                        if not points or points[-1][0] != row.num_keys:  # the first row has the most implementations
                            points.append((row.num_keys, ratio))
                for named, points in lines.items():
                    lengths.update(num_keys for num_keys, _ in points)
                    label = f"{SHOWN[baseline]}, {name}, {named} inputs"
                    axis.plot(*zip(*points, strict=True), label=label, **style.nth(number))
                    number += 1
        axis.axhline(1.0, color=style.GREY, linewidth=0.8)
        axis.set_xscale("log", base=2)
        axis.set_xticks(sorted(lengths), [_tokens(x) for x in sorted(lengths)])
        axis.minorticks_off()
        axis.set_xlabel(f"tokens ({machine}, {what} heads, bfloat16)")
        axis.set_ylabel("time over NSA's time")
        axis.set_ylim(bottom=0)
        axis.grid(**style.GRID)
        legend = style.legend_inch(axis.get_legend_handles_labels()[1])
        figure.set_size_inches(style.WIDTH_INCH, 3.2 + legend)
        style.frame(figure, top=0.1, bottom=0.5 + legend)
        style.legend_below(figure, [axis])
        out = io.BytesIO()
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    return out.getvalue().decode()
