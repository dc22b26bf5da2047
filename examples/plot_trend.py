"""Read the bench's records with pandas, and plot how fast one case has been over time.

    python -m examples.plot_trend                                   # the case with the most runs
    python -m examples.plot_trend --case decode/64x4x128/b32/s65536/bfloat16/cold/graph --machine h200

Records lie in results/runs, a file for each run. A figure is there only where the outputs agreed with the oracle, so
that a missing one says why instead: `reason`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import pandas as pd

from benchmarks.history import reservations
from benchmarks.history.store import Store


def frame(results: Path) -> pd.DataFrame:
    """One row per record: which case, when, on which machine, and its figures in ms."""
    rows = pd.DataFrame(
        {
            "utc": pd.Timestamp(record.fingerprint.utc),
            "machine": record.fingerprint.machine,
            "commit": (record.fingerprint.commit or "")[:10],
            "case": record.key.case,
            "implementation": record.key.implementation,
            "outcome": record.outcome.value,
            "reason": record.reason,
            "latency_ms": record.latency_ms,
            "low_ms": record.interval_ms[0] if record.interval_ms else None,
            "high_ms": record.interval_ms[1] if record.interval_ms else None,
            "trustworthy": not reservations.of(record),
        }
        for record in Store(results).records()
    )
    figures = ["latency_ms", "low_ms", "high_ms"]
    return rows if rows.empty else rows.astype(dict.fromkeys(figures, float))  # what is unknown is NaN


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=Path("results"))
    parser.add_argument("--case", help="as `python -m benchmarks run --list` prints it, without the implementation")
    parser.add_argument("--machine")
    parser.add_argument("--png", type=Path, default=Path("trend.png"))
    asked = parser.parse_args()

    records = frame(asked.results)
    if records.empty:
        parser.error(f"--results: {asked.results} holds no records; `python -m benchmarks run --quick` makes some")
    print(f"{len(records)} records of {records.utc.nunique()} runs on {', '.join(records.machine.unique())}")
    print(records.outcome.value_counts().to_string())

    timed = records.dropna(subset="latency_ms")
    for column in ("machine", "case"):
        if wanted := getattr(asked, column):
            timed = timed[timed[column] == wanted]
    ours = timed[timed.implementation == "nsa"]
    if ours.empty:
        parser.error("--case and --machine: no record of NSA there has a latency")
    machine, case = ours.groupby(["machine", "case"]).size().idxmax()
    one = timed[(timed.machine == machine) & (timed.case == case)].sort_values("utc")
    table = one.pivot_table(index=["utc", "commit"], columns="implementation", values="latency_ms")
    print(f"\n{case} on {machine}, ms:\n{table.to_string(float_format='%.4g')}")

    figure, axes = plt.subplots(figsize=(9, 4.5), layout="constrained")
    for name, line in one.groupby("implementation"):
        sure = line[line.trustworthy]
        style = {"linewidth": 2.4, "zorder": 3} if name == "nsa" else {"linewidth": 1.2}
        (drawn,) = axes.plot(sure.utc, sure.latency_ms, marker="o", label=name, **style)
        axes.fill_between(sure.utc, sure.low_ms, sure.high_ms, color=drawn.get_color(), alpha=0.2)
        doubtful = line[~line.trustworthy]
        axes.plot(doubtful.utc, doubtful.latency_ms, "x", color=drawn.get_color())
    axes.set(title=f"{case}, {machine}", ylabel="median latency in ms", ylim=(0, None), xlabel="UTC")
    axes.grid(alpha=0.3)
    axes.tick_params(axis="x", rotation=30)
    axes.legend(title="x: not trustworthy")
    figure.savefig(asked.png, dpi=120)
    print(f"\nwritten: {asked.png}")


if __name__ == "__main__":
    main()
