"""Interactive charts as plain dicts for Plotly: what all of them share.

Plotly's Python objects would take a hundred times as long. Colours are names of the style sheet's custom properties
("var(--nsa)"): the page's script puts in what they are in the reader's scheme.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterable
from typing import Any

from benchmarks.report.style import in_short

Chart = dict[str, Any]
AXIS: Chart = {"gridcolor": "var(--rule)", "zeroline": False, "automargin": True, "linecolor": "var(--rule)"}
LAYOUT: Chart = {
    "paper_bgcolor": "var(--paper)",
    "plot_bgcolor": "var(--paper)",
    "font": {"color": "var(--ink)", "family": "system-ui, sans-serif", "size": 12},
    "hoverlabel": {"bgcolor": "var(--paper)", "font": {"color": "var(--ink)"}, "align": "left"},
    "legend": {"orientation": "h", "y": -0.14, "yanchor": "top"},
    "margin": {"l": 8, "r": 12, "t": 28, "b": 8},
    "hovermode": "closest",
    "dragmode": "zoom",
}


def safe(text: str) -> str:
    """For a text of a chart: Plotly reads some HTML."""
    return html.escape(text, quote=False)


def log_axis(values: Iterable[float | None], **more: Any) -> Chart:
    """A logarithmic axis with ticks at 1, 2 and 5 of each decade, where two of them lie between these values."""
    known = [value for value in values if value]
    low, high = min(known, default=1.0) / 1.1, max(known, default=1.0) * 1.1
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks = [step * 10.0**decade for decade in decades for step in (1, 2, 5)]
    ticks = [tick for tick in ticks if low <= tick <= high]
    marked = {"tickvals": ticks, "ticktext": [in_short(tick) for tick in ticks]} if len(ticks) > 1 else {"nticks": 4}
    return {**AXIS, "type": "log", **marked, **more}


def digits(value: float | None) -> float | None:
    """Enough for a picture."""
    return None if value is None else float(f"{value:.5g}")
