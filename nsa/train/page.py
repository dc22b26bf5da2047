"""page.html of a run: verdict and reasons first, then its curves; one file, no script, opens from the disk."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
import matplotlib
from markupsafe import Markup
from matplotlib.figure import Figure

from nsa.train import files, series
from nsa.train.history import History

_WIDTH, _HEIGHT = 7.2, 2.6
_MARKS = ("-", "--", ":")
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "nsa",
    "font.size": 8,
    "axes.grid": True,
    "grid.alpha": 0.3,
}
Curve = list[tuple[int, float]]


def write(run: History, headline: str, checks: Sequence[tuple[str, str, str]]) -> Path:
    """`checks` are (name, "good" | "bad" | "unknown", reason)."""
    environment = jinja2.Environment(loader=jinja2.PackageLoader("nsa.train", "."), autoescape=True)
    html = environment.get_template("page.html").render(
        headline=headline,
        checks=checks,
        figures=[(title, Markup(picture)) for title, picture in _figures(run)],
        facts=_facts(run),
        settings=sorted((name, s["value"], s["origin"]) for name, s in run.environment.get("settings", {}).items()),
        notes=run.environment.get("notes", []),
    )
    path = run.folder / "page.html"
    files.replace(path, html)
    return path


def _facts(run: History) -> list[tuple[str, object]]:
    env, metrics = run.environment, run.metrics
    parameters = env.get("parameters")
    return [
        ("device", env.get("device")),
        ("torch", env.get("torch")),
        ("parameters", None if parameters is None else f"{parameters:,}"),
        ("data", env.get("data_source")),
        ("ranks", env.get("ranks")),
        ("lives", run.lives),
        ("last loss, nats", metrics.get("loss")),
        ("validation loss, nats", metrics.get("val_loss")),
        ("median tokens/s", metrics.get("tokens_per_s_median")),
    ]


def _figures(run: History) -> list[tuple[str, str]]:
    memory = {name: run.series(name) for name in ("allocated_mib", "reserved_mib", "rss_mib")}
    shares = {
        branch: [(r["step"], r["gate_shares"][branch]) for r in run.steps if r.get("gate_shares")]
        for branch in ("compressed", "selected", "window")
    }
    wanted: list[tuple[str, dict[str, Curve], str]] = [
        ("Loss", {"training": run.series("loss"), "validation": list(run.validations)}, "nats"),
        ("Throughput", {"all ranks": run.series("tokens_per_s")}, "tokens/s"),
        ("Memory", memory, "MiB"),
        ("Gates: share of each branch", shares, "share"),
        ("Gates: entropy, mean over heads", {"entropy": run.series("gate_entropy_mean_nats")}, "nats"),
        ("Gradient norm", {"before clipping": run.series("grad_norm")}, "norm"),
        ("Wait for data", {"first rank": run.series("data_wait_ms")}, "ms"),
    ]
    return [(title, _svg(curves, unit)) for title, curves, unit in wanted if any(curves.values())]


def _svg(curves: dict[str, Curve], unit: str) -> str:
    """Lines that differ in their dashes too; long ones are thinned to medians."""
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(_WIDTH, _HEIGHT), layout="constrained")
        axes = figure.subplots()
        for (name, curve), mark in zip(curves.items(), _MARKS, strict=False):
            if not curve:
                continue
            thinned, stride = series.thin([value for _, value in curve])
            steps = [curve[min(i * stride + stride // 2, len(curve) - 1)][0] for i in range(len(thinned))]
            axes.plot(steps, thinned, mark, label=name, marker="o" if len(thinned) < 30 else None, markersize=3)
        axes.set_xlabel("optimiser step")
        axes.set_ylabel(unit)
        axes.legend(loc="best")
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    picture = buffer.getvalue()
    return picture[picture.index("<svg") :]
