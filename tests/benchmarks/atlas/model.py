"""A tiny model and its text, and a record as a run leaves it: what the tests of the atlas share."""

from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path
from typing import Any

from benchmarks.atlas import record
from benchmarks.atlas.record import LAGS, UNIONS, Atlas, HeadCurves, LengthCurves, Sample, Trained
from harness.fingerprint import Fingerprint
from tests.benchmarks.synthetic import FINGERPRINT

PROFILE = """
model: {dim: 16, n_layers: 2, n_heads: 4, num_kv_heads: 2, d_k: 8, d_v: 8, vocab_size: 256}
nsa: {l: 8, d: 4, l_sel: 8, n_sel: 4, w: 16}
runtime: {device: cpu, gradient_checkpointing: true}
train: {steps: 4, seq_len: 128, batch_size: 1, lr: 1.0e-3, log_every: 2}
"""
"""A step takes some 20 ms; any run of so many steps as STEPS is long, which asks for gradient checkpointing."""


def profile(folder: Path) -> Path:
    path = folder / "tiny.yaml"
    path.write_text(PROFILE)
    return path


def sources(folder: Path, files: int = 150) -> Path:
    """Python files of some 1 kB, one of 50 held out."""
    numbers = random.Random(0)
    for number in range(files):
        lines = [f"x_{i} = {numbers.randrange(10**6)}  # of file {number}" for i in range(30)]
        path = folder / f"package_{number % 3}" / f"module_{number}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(lines) + "\n")
    return folder


def atlas(utc: str = "2026-11-20T10:00:00.000Z", seed: int = 0, **changes: Any) -> Atlas:
    """A record with two lengths of two layers with two kv heads. Its figures are nobody's."""
    here: Fingerprint = dataclasses.replace(FINGERPRINT, utc=utc, machine="h200")
    lengths = tuple(curves(length) for length in (8192, 32768))
    rows = tuple(tuple(range(16)) for _ in range(3))
    found = Atlas(
        record.SCHEMA,
        here,
        here.commit,
        {"n_layers": 2, "n_heads": 4, "num_kv_heads": 2, "parameters": 125_000_000},
        Trained(10**8, 15.5, 1.25, (8192, 32768), "Python sources", seed),
        lengths,
        (Sample(8192, 0, 0, 4096, False, rows),),
    )
    return dataclasses.replace(found, **changes)


def curves(seq_len: int) -> LengthCurves:
    heads = tuple(head(layer, kv_head, 0.1 * layer + 0.05 * kv_head) for layer in range(2) for kv_head in range(2))
    return LengthCurves(seq_len, 16, 3, 64, heads, (0.5,))


def head(layer: int, kv_head: int, more: float = 0.0, **changes: Any) -> HeadCurves:
    values: dict[str, Any] = {
        "jaccard": {str(lag): 0.4 + more for lag in LAGS},
        "jaccard_free": {str(lag): 0.3 + more for lag in LAGS},
        "union": {str(count): 16.0 + count for count in UNIONS},
        "distance": ((1.0, 0.0), (2.0, 0.25), (4.0, 0.75)),
        "sink_share": 0.1,
        "popularity": 3.0,
        "mass": 0.6,
        "gates": (0.2, 0.5, 0.8),
        "step_jaccard": 0.4,
    }
    return HeadCurves(layer, kv_head, **{**values, **changes})


def as_json(value: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(value)))
    return found
