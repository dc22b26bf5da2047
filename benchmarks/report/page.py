"""The HTML of the page: verdicts first, then pictures, what was not measured and why, and on what. All text escaped."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import PurePath

from benchmarks.console import figure
from benchmarks.records import Damaged, Outcome, Record
from benchmarks.report.plots import Picture
from benchmarks.verdict import Comparison, speed_up

STYLE = """
:root { color-scheme: light }
body { font: 15px/1.45 system-ui, sans-serif; color: #1a1a1a; background: #fff; margin: 2rem auto; max-width: 76rem;
  padding: 0 1rem }
h1, h2, h3 { line-height: 1.2 } h2 { margin-top: 2.5rem; border-bottom: 2px solid #0072B2 }
table { border-collapse: collapse; margin: 1rem 0; display: block; overflow-x: auto }
th, td { padding: .3rem .7rem; border-bottom: 1px solid #ddd; text-align: left; vertical-align: top }
td.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap }
td.passed { color: #00614a } td.other { color: #a33f00; font-weight: 600 }
img { max-width: 100%; height: auto } code { font-size: .9em; overflow-wrap: anywhere } small { color: #555 }
"""


def render(compared: Sequence[Comparison], damaged: Sequence[Damaged], pictures: Sequence[Picture]) -> str:
    """The whole page."""
    machines = list(dict.fromkeys(comparison.nsa.fingerprint.machine for comparison in compared))
    body = ["<h1>Native Sparse Attention: what was measured</h1>"]
    if not machines:
        body.append("<p>No run is recorded yet: <code>nox -s bench</code> measures this machine.</p>")
    else:
        body.append(
            "<p>The newest run with a baseline of each case on each machine. A figure stands here only where the"
            " output met the float64 oracle in the same process; a ratio names its baseline and is taken within one"
            " run.</p>"
        )
    for machine in machines:
        here = [comparison for comparison in compared if comparison.nsa.fingerprint.machine == machine]
        body += _machine(machine, here, [picture for picture in pictures if picture.machine == machine])
    body += _damaged(damaged)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>NSA benches</title><style>{STYLE}</style></head>\n<body>\n" + "\n".join(body) + "\n</body></html>\n"
    )


def _machine(machine: str, here: Sequence[Comparison], pictures: Sequence[Picture]) -> list[str]:
    newest = max((comparison.nsa.fingerprint for comparison in here), key=lambda fingerprint: fingerprint.utc)
    return [
        f"<h2>{escape(newest.device)} <small>({escape(machine)})</small></h2>",
        "<h3>Verdicts</h3>",
        *_verdicts(here),
        *_pictures(pictures),
        *_not_measured(here),
        "<h3>Measured on</h3>",
        _table(
            ("what", "value"),
            [
                (f"<td>{escape(name)}</td>", f"<td>{escape('unknown' if value is None else str(value))}</td>")
                for name, value in dataclasses.asdict(newest).items()
            ],
        ),
    ]


def _verdicts(here: Sequence[Comparison]) -> list[str]:
    names = list(dict.fromkeys(other.key.implementation for c in here for other in c.baselines))
    head = (
        "case",
        "outcome",
        "backend that ran",
        "NSA",
        *(f"{name} (NSA is … × as fast)" for name in names),
    )
    rows = []
    for comparison in here:
        nsa, by_name = comparison.nsa, {other.key.implementation: other for other in comparison.baselines}
        kind = "passed" if nsa.outcome is Outcome.PASSED else "other"
        rows.append(
            (
                f"<td><code>{escape(nsa.key.case)}</code></td>",
                f'<td class="{kind}">{nsa.outcome.value}</td>',
                f"<td>{escape(nsa.gate.path if nsa.gate else 'none')}</td>",
                _number(figure(nsa)),
                *(_versus(nsa, by_name.get(name)) for name in names),
            )
        )
    return [_table(head, rows)]


def _versus(nsa: Record, other: Record | None) -> str:
    if other is None:
        return _number("not run")
    faster = speed_up(nsa, other)
    times = "" if faster is None else f" ({faster:.2f}×)"
    return _number((figure(other) or other.outcome.value) + times)


def _number(text: str) -> str:
    return f'<td class="number">{escape(text or "none")}</td>'


def _pictures(pictures: Sequence[Picture]) -> list[str]:
    shown = []
    for picture in pictures:
        source, svg = escape(picture.png), escape(PurePath(picture.png).with_suffix(".svg").name)
        shown.append(
            f'<figure><img src="{source}" alt="{escape(picture.title)}">'
            f'<figcaption>{escape(picture.title)} (<a href="{svg}">SVG</a>)</figcaption></figure>'
        )
    return ["<h3>Pictures</h3>", *shown] if shown else []


def _not_measured(here: Sequence[Comparison]) -> list[str]:
    missing = [record for c in here for record in (c.nsa, *c.baselines) if record.outcome is not Outcome.PASSED]
    if not missing:
        return ["<h3>Not measured</h3>", "<p>Nothing: every implementation passed on every case.</p>"]
    rows = [
        (
            f"<td><code>{escape(record.key.name)}</code></td>",
            f"<td>{record.outcome.value}</td>",
            f"<td>{escape(record.reason or '')}</td>",
            f"<td><code>{escape(record.command)}</code></td>",
        )
        for record in missing
    ]
    return ["<h3>Not measured, and why</h3>", _table(("measurement", "outcome", "reason", "to see it again"), rows)]


def _damaged(damaged: Sequence[Damaged]) -> list[str]:
    if not damaged:
        return []
    rows = [
        (f"<td><code>{escape(str(line.path))}</code></td>", _number(str(line.line)), f"<td>{escape(line.why)}</td>")
        for line in damaged
    ]
    return ["<h2>Lines that are no record</h2>", _table(("file", "line", "why"), rows)]


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """`rows` hold finished <td> cells."""
    top = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "\n".join(f"<tr>{''.join(cells)}</tr>" for cells in rows)
    return f"<table><thead><tr>{top}</tr></thead><tbody>\n{body}\n</tbody></table>"
