"""How a run stands, from its files alone: go or no-go with the reasons, as text and as page.html.

The page shows the checks first, then the run's curves; it is one file without a script, and opens from the disk.
"""

from __future__ import annotations

import io
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import jinja2
import matplotlib
from markupsafe import Markup
from matplotlib.figure import Figure

from nsa.config import BRANCHES
from nsa.io import atomic_write
from nsa.train import run_folder
from nsa.train.monitoring import health, monitors
from nsa.train.monitoring.health import WARM_UP_STEPS
from nsa.train.run_folder import RunHistory

MOST_IMBALANCE = 0.05
SILENT_S = 60.0
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


@dataclass(frozen=True)
class Check:
    """One question about the run."""

    name: str
    healthy: bool | None
    """None where the files do not tell."""
    reason: str


def checks(run: RunHistory, *, now: datetime | None = None) -> list[Check]:
    """All of them, in the order of the page."""
    return [check(run) for check in _CHECKS] + [_alive(run, now or datetime.now(timezone.utc))]


def go(found: list[Check]) -> bool:
    """Whether nothing speaks against the run."""
    return all(check.healthy is not False for check in found)


def text(folder: Path) -> str:
    """For a terminal. Raises NoRunError."""
    run = run_folder.read_run(folder)
    found = checks(run)
    lines = [_headline(run, found)]
    lines += [f"  {_word(check.healthy):<8} {check.name:<12} {check.reason}" for check in found]
    return "\n".join(lines)


def write_page(folder: Path) -> Path:
    """page.html, which opens from the disk. Raises NoRunError."""
    run = run_folder.read_run(folder)
    found = checks(run)
    environment = jinja2.Environment(loader=jinja2.PackageLoader("nsa.train", "."), autoescape=True)
    html = environment.get_template("page.html").render(
        headline=_headline(run, found),
        checks=[(check.name, _word(check.healthy), check.reason) for check in found],
        figures=[(title, Markup(picture)) for title, picture in _figures(run)],
        facts=_facts(run),
        settings=sorted((name, s["value"], s["origin"]) for name, s in run.environment.get("settings", {}).items()),
        notes=run.environment.get("notes", []),
    )
    path = folder / "page.html"
    atomic_write(path, html)
    return path


def _headline(run: RunHistory, found: list[Check]) -> str:
    last = run.steps[-1]["step"] if run.steps else 0
    steps = run.metrics.get("steps", "?")
    return f"{'GO' if go(found) else 'NO-GO'}: {run.environment.get('profile', '?')}, step {last} of {steps}"


def _word(healthy: bool | None) -> str:
    return {True: "good", False: "bad", None: "unknown"}[healthy]


def _preflight(run: RunHistory) -> Check:
    overridden = run.environment.get("preflight", {}).get("allow_toy")
    if overridden is None:
        return Check("preflight", None, "no record of it")
    return Check("preflight", not overridden, "; ".join(overridden) or "passed")


def _data(run: RunHistory) -> Check:
    asked = run.environment.get("settings", {}).get("data.dataset", {}).get("value")
    used = run.environment.get("data_source")
    fell_back = used == "synthetic" != asked
    return Check("data", None if used is None else not fell_back, f"{used}, where {asked} was asked for")


def _loss(run: RunHistory) -> Check:
    losses = [loss for _, loss in run.series("loss")]
    if len(losses) < 20:
        return Check("loss", None, f"{len(losses)} steps are too few")
    part = max(5, len(losses) // 10)
    first, last = statistics.fmean(losses[:part]), statistics.fmean(losses[-part:])
    random = run.environment.get("data_source") == "synthetic"
    why = f"mean of {part} steps: {first:.4f} nats at the start, {last:.4f} at the end"
    return Check("loss", None if random else last < first, why + (" (random tokens teach nothing)" if random else ""))


def _finite(run: RunHistory) -> Check:
    if not run.steps:
        return Check("finite", None, "no step yet")
    count, skipped = run.steps[-1].get("non_finite_steps"), run.metrics.get("skipped_steps") or 0
    return Check("finite", None if count is None else count <= skipped, f"{count} steps with NaN or infinity")


def _throughput(run: RunHistory) -> Check:
    speeds = [speed for _, speed in run.series("tokens_per_s")][WARM_UP_STEPS:]
    if not speeds:
        return Check("throughput", None, "not measured")
    alarm = health.throughput(speeds)
    return Check(
        "throughput", alarm is None, alarm.why if alarm else f"median {statistics.median(speeds):,.0f} tokens/s"
    )


def _memory(run: RunHistory) -> Check:
    name = "allocated_mib" if run.series("allocated_mib") else "rss_mib"
    series = [mib for _, mib in run.series(name)][WARM_UP_STEPS:]
    if not series:
        return Check("memory", None, "not measured")
    alarm = health.memory(series, name)
    return Check("memory", alarm is None, alarm.why if alarm else f"at most {max(series):,.0f} MiB ({name})")


def _gates(run: RunHistory) -> Check:
    last = _last_with(run, "gate_entropy_mean_nats")
    if last is None:
        return Check("gates", None, "no statistics")
    entropy, most = last["gate_entropy_mean_nats"], last["gate_max_share_mean"]
    shares = ", ".join(f"{branch} {share:.0%}" for branch, share in last["gate_shares"].items())
    return Check(
        "gates", entropy > 0.5 and most < 0.9, f"entropy {entropy:.3f} nats, largest share {most:.2f}; {shares}"
    )


def _selection(run: RunHistory) -> Check:
    last = _last_with(run, "keys_read")
    if last is None:
        return Check("selection", None, "no statistics")
    wrong = [
        f"{branch}: {last['keys_read'][branch]} read, {predicted} expected"
        for branch, predicted in last["keys_predicted"].items()
        if predicted is not None and predicted != last["keys_read"][branch]
    ]
    mean, most, share = last["selected_keys_mean"], last["selected_keys_max"], last["selection_at_maximum"]
    as_dictated = abs(share - last["selection_at_maximum_expected"]) <= 0.01
    why = f"{mean:.0f} of at most {most} keys per row, {share:.1%} of rows at the maximum"
    return Check("selection", not wrong and as_dictated, "; ".join([why, *wrong]))


def _fallbacks(run: RunHistory) -> Check:
    last = _last_with(run, "fallbacks")
    if last is None:
        return Check("fallbacks", None, "no statistics")
    ran = ", ".join(f"{layers} layers by {backend}" for backend, layers in last.get("backends", {}).items())
    return Check("fallbacks", last["fallbacks"] == 0, f"{last['fallbacks']} layers; {ran or 'nothing was observed'}")


def _checkpoints(run: RunHistory) -> Check:
    every = run.environment.get("settings", {}).get("train.save_every", {}).get("value")
    saved = [event["step"] for event in run.events if event["event"] == "saved"]
    step = run.steps[-1]["step"] if run.steps else 0
    if not every:
        return Check("checkpoints", bool(saved) or None, f"save_every is {every}; saved at {saved[-1:] or 'no step'}")
    late = step - (saved[-1] if saved else 0)
    return Check("checkpoints", late <= every, f"{late} steps since the last one; save_every is {every}")


def _ranks(run: RunHistory) -> Check:
    last = _last_with(run, "rank_imbalance")
    if last is None:
        alone = run.environment.get("ranks") == 1
        return Check("ranks", True if alone else None, "one rank" if alone else "not measured")
    share = last["rank_imbalance"]
    work = ", ".join(f"{ms:.1f}" for ms in last["rank_work_ms"])
    return Check("ranks", share < MOST_IMBALANCE, f"imbalance {share:.1%}; ms of work by rank: {work}")


def _alarms(run: RunHistory) -> Check:
    found = [f"step {e['step']}: {e['sentinel']}: {e['why']}" for e in run.events if e["event"] == "alarm"]
    return Check("alarms", not found, "; ".join(found) or "none")


def _alive(run: RunHistory, now: datetime) -> Check:
    """Whether the run is done, or still speaks."""
    state = run.metrics.get("state")
    if state == "done":
        return Check("state", True, f"done, in {run.attempts} {'attempt' if run.attempts == 1 else 'attempts'}")
    stopped = [event for event in run.events if event["event"] in ("stalled", "stopped")]
    last = run.steps[-1] if run.steps else None
    if stopped and (last is None or stopped[-1]["utc"] >= last["utc"]):
        return Check("state", False, f"{stopped[-1]['event']}: {stopped[-1]['why']}")
    if state is not None and state.startswith("signal"):
        return Check("state", None, f"ended by {state} after step {run.metrics.get('step')}; --resume goes on")
    if last is None:
        return Check("state", None, "no step yet")
    gap_s = (now - datetime.fromisoformat(last["utc"].replace("Z", "+00:00"))).total_seconds()
    steps_s = [ms / 1000 for _, ms in run.series("step_ms")]
    alarm = monitors.silence(gap_s, steps_s, floor_s=SILENT_S)
    return Check("state", alarm is None, alarm.why if alarm else f"running; the last heartbeat is {gap_s:.0f} s old")


def _last_with(run: RunHistory, name: str) -> dict[str, Any] | None:
    return next((record for record in reversed(run.steps) if record.get(name) is not None), None)


_CHECKS: tuple[Callable[[RunHistory], Check], ...] = (
    _preflight, _data, _loss, _finite, _throughput, _memory, _gates, _selection, _fallbacks, _checkpoints, _ranks,
    _alarms,
)  # fmt: skip


def _facts(run: RunHistory) -> list[tuple[str, object]]:
    env, metrics = run.environment, run.metrics
    parameters = env.get("parameters")
    return [
        ("device", env.get("device")),
        ("torch", env.get("torch")),
        ("parameters", None if parameters is None else f"{parameters:,}"),
        ("data", env.get("data_source")),
        ("ranks", env.get("ranks")),
        ("attempts", run.attempts),
        ("last loss, nats", metrics.get("loss")),
        ("validation loss, nats", metrics.get("val_loss")),
        ("median tokens/s", metrics.get("tokens_per_s_median")),
    ]


def _figures(run: RunHistory) -> list[tuple[str, str]]:
    memory = {name: run.series(name) for name in ("allocated_mib", "reserved_mib", "rss_mib")}
    shares = {
        branch: [(r["step"], r["gate_shares"][branch]) for r in run.steps if r.get("gate_shares")]
        for branch in BRANCHES
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
            thinned, stride = monitors.thin([value for _, value in curve])
            steps = [curve[min(i * stride + stride // 2, len(curve) - 1)][0] for i in range(len(thinned))]
            axes.plot(steps, thinned, mark, label=name, marker="o" if len(thinned) < 30 else None, markersize=3)
        axes.set_xlabel("optimiser step")
        axes.set_ylabel(unit)
        axes.legend(loc="best")
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    picture = buffer.getvalue()
    return picture[picture.index("<svg") :]
