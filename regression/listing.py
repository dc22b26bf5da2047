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
)
_COLUMNS = (("id", 22), ("symptom", 34), ("cause", 44), ("detector", 44), ("expects", 13), ("since", 7))


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


def table(incidents: Sequence[Incident]) -> str:
    """One row per incident; long cells go on below."""
    rows = [tuple(name for name, _ in _COLUMNS), *(_cells(incident) for incident in incidents)]
    return "\n".join(line for row in rows for line in _lines(row))


def _cells(incident: Incident) -> tuple[str, ...]:
    return tuple(str(getattr(getattr(incident, name), "value", getattr(incident, name))) for name, _ in _COLUMNS)


def _lines(row: Sequence[str]) -> list[str]:
    widths = [width for _, width in _COLUMNS]
    cells = [textwrap.wrap(cell, width) or [""] for cell, width in zip(row, widths, strict=True)]
    return [
        "  ".join((cell[i] if i < len(cell) else "").ljust(width) for cell, width in zip(cells, widths, strict=True))
        .rstrip()
        for i in range(max(map(len, cells)))
    ]  # fmt: skip
