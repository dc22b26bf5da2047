"""Runs side by side at equal steps: loss, throughput, memory; the first one named is the baseline."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nsa.io import atomic_write, to_json
from nsa.train import run_folder
from nsa.train.monitoring import monitors
from nsa.train.monitoring.health import WARM_UP_STEPS
from nsa.train.run_folder import RunHistory

SETTINGS_THAT_MAY_DIFFER = (
    "model.", "train.out_dir", "telemetry.", "runtime.compile", "runtime.cuda_graph", "runtime.use_flash",
)  # fmt: skip
_MARKS = ("-", "--", ":", "-.")


class NotComparableError(ValueError):
    """Runs on other data, with other steps or other hardware; the message names what differs."""


@dataclass(frozen=True)
class Comparison:
    """One run against the first."""

    name: str
    val_loss: float | None
    """At the last step that both validated, nats."""
    val_loss_ratio: float | None
    """To the first run's at that step."""
    tokens_per_s: float | None
    """Median, without warm-up."""
    tokens_per_s_ratio: float | None
    peak_mib: float | None

    def record(self) -> dict[str, Any]:
        return self.__dict__.copy()


def compare(folders: Sequence[Path]) -> list[Comparison]:
    """Raises NotComparableError, and NoRunError for a folder without a run."""
    runs = [run_folder.read_run(folder) for folder in folders]
    for run in runs[1:]:
        if differing := _differing(runs[0], run):
            raise NotComparableError(f"{run.folder} is not comparable with {runs[0].folder}: {differing}")
    return [_compared(run, runs[0]) for run in runs]


def draw(folders: Sequence[Path], path: Path) -> None:
    """Training loss (medians of stretches) and validation loss over the steps."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 3.4), layout="constrained")
    axes = figure.subplots()
    for mark, run in zip(_MARKS, map(run_folder.read_run, folders), strict=False):
        curve = run.series("loss")
        losses, stride = monitors.thin([loss for _, loss in curve])
        steps = [curve[i * stride + stride // 2][0] for i in range(len(losses))]
        (line,) = axes.plot(steps, losses, mark, linewidth=0.9, alpha=0.6, label=f"{run.folder.name}, training")
        if run.validations:
            xs, ys = zip(*run.validations, strict=True)
            axes.plot(
                xs, ys, mark, color=line.get_color(), marker="o", markersize=3, label=f"{run.folder.name}, held out"
            )
    axes.set(xlabel="optimiser step", ylabel="loss, nats")
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})


def write(folders: Sequence[Path], out: Path) -> str:
    """<out>.json and <out>.svg; returns the table."""
    found = compare(folders)
    draw(folders, out.with_suffix(".svg"))
    record = {
        "steps": run_folder.read_run(folders[0]).metrics.get("steps"),
        "device": run_folder.read_run(folders[0]).environment.get("device"),
        "data": run_folder.read_run(folders[0]).environment.get("data_source"),
        "runs": [one.record() for one in found],
    }
    atomic_write(out.with_suffix(".json"), to_json(record, indent=2) + "\n")
    return table(found)


def table(found: Sequence[Comparison]) -> str:
    rows = [("run", "held-out loss", "ratio", "tokens/s", "ratio", "peak MiB")]
    rows += [
        (
            one.name, _figure(one.val_loss, ".4f"), _figure(one.val_loss_ratio, ".4f"),
            _figure(one.tokens_per_s, ",.0f"), _figure(one.tokens_per_s_ratio, ".3f"), _figure(one.peak_mib, ",.0f"),
        )
        for one in found
    ]  # fmt: skip
    wide = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, wide, strict=True)).rstrip() for row in rows
    )


def _compared(run: RunHistory, base: RunHistory) -> Comparison:
    both = sorted(dict(run.validations).keys() & dict(base.validations).keys())
    loss = dict(run.validations)[both[-1]] if both else None
    base_loss = dict(base.validations)[both[-1]] if both else None
    speed, base_speed = _speed(run), _speed(base)
    peak = [mib for name in ("peak_mib", "rss_mib") for _, mib in run.series(name)]
    return Comparison(
        run.folder.name,
        loss,
        None if loss is None or base_loss is None else loss / base_loss,
        speed,
        None if speed is None or base_speed is None else speed / base_speed,
        max(peak, default=None),
    )


def _speed(run: RunHistory) -> float | None:
    speeds = [speed for _, speed in run.series("tokens_per_s")][WARM_UP_STEPS:]
    return statistics.median(speeds) if speeds else None


def _differing(a: RunHistory, b: RunHistory) -> str:
    """What must be the same and is not."""
    settings = [run.environment.get("settings", {}) for run in (a, b)]
    found = [
        f"{name} {settings[0][name]['value']} -> {settings[1].get(name, {}).get('value')}"
        for name in settings[0]
        if not name.startswith(SETTINGS_THAT_MAY_DIFFER)
        and settings[0][name]["value"] != settings[1].get(name, {}).get("value")
    ]
    facts = ("device", "torch", "data_source", "ranks")
    found += [
        f"{name} {a.environment.get(name)} -> {b.environment.get(name)}"
        for name in facts
        if a.environment.get(name) != b.environment.get(name)
    ]
    return ", ".join(found)


def _figure(value: float | None, form: str) -> str:
    return "unknown" if value is None else format(value, form)
