"""Two years of nightly runs on five GPUs: what they take on the disk, and how long their pages take."""

from __future__ import annotations

import datetime
import json
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.commands import options
from benchmarks.report.pages import build

MACHINES = ("a100", "3090", "4090", "h100", "h200")
NIGHTS = 730
MOST_MB, MOST_S = 400, 20
"""Of a checkout, and for someone who waits for the pages on two cores."""


def a_quick_run() -> list[dict[str, Any]]:
    """The lines of the last quick run of an H200 that this repository keeps."""
    runs = sorted((options.RESULTS / "runs" / "h200").glob("20261122T202248*.jsonl"))
    if not runs:
        pytest.skip(f"no quick run of an H200 in {options.RESULTS}")
    return [json.loads(line) for line in runs[0].read_text().splitlines()]


def scaled(record: dict[str, Any], by: float) -> dict[str, Any]:
    """The same case, slower by so much."""
    if "tokens_per_s" in record:
        record = {**record, "tokens_per_s": record["tokens_per_s"] / by}
    times = {name: float(f"{record[name] * by:.7g}") for name in ("latency_ms", "end_to_end_ms") if name in record}
    if "interval_ms" in record:
        times["interval_ms"] = [float(f"{bound * by:.7g}") for bound in record["interval_ms"]]
    return {**record, **times}


def a_night(lines: list[dict[str, Any]], machine: str, night: int, noise: random.Random) -> Iterator[str]:
    """From night 500 on everything takes 6 % longer."""
    run, *records = lines
    utc = datetime.datetime(2024, 11, 1) + datetime.timedelta(days=night)
    changes = {"utc": f"{utc:%Y-%m-%dT%H:%M:%S.000Z}", "machine": machine, "commit": f"{noise.getrandbits(160):040x}"}
    yield json.dumps({**run, "fingerprint": {**run["fingerprint"], **changes}}, separators=(",", ":"))
    for record in records:
        slower = noise.lognormvariate(0, 0.006) * (1.06 if night >= 500 else 1)
        yield json.dumps(scaled(record, slower), separators=(",", ":"))


@pytest.mark.nightly
def test_two_years_of_five_gpus_are_small_and_quickly_shown(tmp_path: Path) -> None:
    lines = a_quick_run()
    size = 0
    for machine in MACHINES:
        folder = tmp_path / "runs" / machine
        folder.mkdir(parents=True)
        noise = random.Random(machine)
        for night in range(NIGHTS):
            text = "".join(f"{line}\n" for line in a_night(lines, machine, night, noise))
            size += (folder / f"{night:04d}.jsonl").write_text(text)
    begin = time.perf_counter()
    index = build(tmp_path).index
    took_s = time.perf_counter() - begin
    print(f"{size / 1e6:.0f} MB, {took_s:.1f} s")
    assert size < MOST_MB * 1e6
    assert took_s < MOST_S
    assert len(list(index.parent.glob("machine-*.html"))) == len(MACHINES)
    largest = max(path.stat().st_size for path in index.parent.glob("*.html"))
    assert largest < 5e6, "a page of 4 MB opens in a second"
