"""Which incidents there are, in the order of the list they come from."""

from __future__ import annotations

import difflib
import importlib
import textwrap
from collections.abc import Sequence

from regression.contract import Incident

IDS = (
    "step5-stall",
    "step1-stall",
    "step2-stall",
    "unique-60x",
    "dup-blocks",
    "nan-empty-row",
    "dropped-current-block",
    "inverted-mask",
    "single-query-causal",
    "window-leak",
    "no-label-shift",
    "future-normaliser",
    "prefill-decode-split",
    "fp16-adamw",
    "lowp-loss",
    "window-oom",
    "square-mask",
    "workspace-inplace",
    "int32-scatter",
    "strict-mode-crash",
    "dead-route",
    "grad-none-ddp",
    "grad-none-nccl",
    "toy-config-run",
    "mib-gb",
    "loader-stall",
    "fake-counters",
    "uniform-gates",
    "blind-gate",
    "resume-drift",
    "tie-break",
    "slow-drift",
    "unwritten-gradients",
    "equal-scores-when-long",
    "diverging-choices",
    "heads-overread",
    "missing-mask",
)
_COLUMNS = (("id", 22), ("symptom", 34), ("cause", 44), ("detector", 44), ("expects", 13), ("since", 7))
"""Each, and the most characters that it takes."""
_NAMES = tuple(name for name, _ in _COLUMNS)
_TEXTS = ("symptom", "cause", "detector")
"""What gets narrower with the terminal."""
_LEAST_COLUMN = 20


def module_of(incident_id: str) -> str:
    """Where it is written: "regression.incidents.step5_stall"."""
    return f"regression.incidents.{incident_id.replace('-', '_')}"


def known(incident_id: str) -> str:
    """The id itself. ValueError, with the nearest one, for an id that is not on the list."""
    if incident_id not in IDS:
        near = difflib.get_close_matches(incident_id, IDS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else "`python -m regression list` shows all"
        raise ValueError(f"no incident is called {incident_id!r}; {hint}")
    return incident_id


def containing(text: str) -> list[str]:
    """Every id that contains the text, or one of several that " or " joins. ValueError where there is none."""
    parts = [part.strip() for part in text.split(" or ")]
    found = [incident_id for incident_id in IDS if any(part in incident_id for part in parts if part)]
    if not found:
        raise ValueError(f"-k: no incident's id contains {text!r}; `python -m regression list` shows all")
    return found


def load(ids: Sequence[str]) -> list[Incident]:
    """The incidents of these ids, as their files describe them. ValueError for one that cannot be read."""
    found = []
    for incident_id in ids:
        name = module_of(known(incident_id))
        try:
            incident: Incident = importlib.import_module(name).INCIDENT
        except Exception as error:  # whatever its file does when it is imported
            raise ValueError(f"{incident_id} cannot be read: {type(error).__name__}: {error}") from error
        if incident.id != incident_id:
            raise ValueError(f"{name} must describe {incident_id!r}; it says {incident.id!r}")
        found.append(incident)
    return found


def table(incidents: Sequence[Incident], width: int | None = None) -> str:
    """Every incident, in lines of at most `width` characters: a row each, whose long cells go on below, or a paragraph
    each where a row leaves too little for a column. None: one line each, its columns separated by tabs."""
    if width is None:
        return "\n".join("\t".join(row) for row in (_NAMES, *map(_cells, incidents)))
    left = width - sum(widest for name, widest in _COLUMNS if name not in _TEXTS) - 2 * (len(_COLUMNS) - 1)
    if left < len(_TEXTS) * _LEAST_COLUMN:
        return "\n\n".join(_paragraph(_cells(incident), width) for incident in incidents)
    whole = sum(widest for name, widest in _COLUMNS if name in _TEXTS)
    widths = [min(widest, widest * left // whole) if name in _TEXTS else widest for name, widest in _COLUMNS]
    return "\n".join(line for row in (_NAMES, *map(_cells, incidents)) for line in _lines(row, widths))


def _cells(incident: Incident) -> tuple[str, ...]:
    return tuple(str(getattr(getattr(incident, name), "value", getattr(incident, name))) for name in _NAMES)


def _lines(row: Sequence[str], widths: Sequence[int]) -> list[str]:
    cells = [textwrap.wrap(cell, width) or [""] for cell, width in zip(row, widths, strict=True)]
    return [
        "  ".join((cell[i] if i < len(cell) else "").ljust(width) for cell, width in zip(cells, widths, strict=True))
        .rstrip()
        for i in range(max(map(len, cells)))
    ]  # fmt: skip


def _paragraph(cells: Sequence[str], width: int) -> str:
    """The id, then each other column with its name."""
    lines = [cells[0]]
    for name, cell in zip(_NAMES[1:], cells[1:], strict=True):
        lines += textwrap.wrap(cell, width, initial_indent=f"  {name}: ", subsequent_indent="    ")
    return "\n".join(lines)
