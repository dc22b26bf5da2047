"""What the tests of training share: a tiny profile, and a run of it in this process or in a child."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from nsa.io import read_json_lines
from nsa.train import profile, run
from nsa.train.data import packing
from nsa.train.data.packing import Batch, Row
from nsa.train.loop import Outcome
from nsa.train.run import Options
from nsa.train.settings import Settings

ROOT = Path(__file__).resolve().parents[3]
PROFILE = """
model: {dim: 32, n_layers: 2, n_heads: 4, num_kv_heads: 2, d_k: 8, d_v: 8, vocab_size: 256}
nsa: {l: 8, d: 4, l_sel: 16, n_sel: 4, w: 16}
runtime: {device: cpu}
train: {steps: 8, seq_len: 48, batch_size: 2, lr: 1.0e-3, log_every: 2, save_every: 3}
telemetry: {tensorboard: false}
"""
"""Two layers and every branch; a step takes some 20 ms."""


def settings(folder: Path, **overrides: Any) -> Settings:
    """The tiny run; the names of overrides have __ for the dot: train__steps=3."""
    path = folder / "tiny.yaml"
    path.write_text(PROFILE)
    dotted = {name.replace("__", "."): value for name, value in overrides.items()}
    return profile.load(str(path), overrides={"train.out_dir": str(folder / "run"), **dotted})


def train(chosen: Settings, **options: Any) -> Outcome:
    """In this process."""
    torch.set_num_threads(1)
    return run.run(chosen, profile.read_environment({}), Options(**options), {})


def needs_datasets() -> None:
    """Skips a test of text where the package is not installed, as it need not be for random tokens."""
    pytest.importorskip("datasets", reason="needs the package datasets (pip install -e '.[train]')")


def packed(*lengths: int, seed: int = 0) -> Batch:
    """Random documents of these lengths."""
    tokens = torch.randint(256, (sum(lengths),), generator=torch.Generator().manual_seed(seed))
    return packing.pack([Row(tokens, lengths)], packing=True, position={})


def losses(folder: Path) -> dict[int, float]:
    """By step, from the first rank's heartbeat; of a step that was taken twice the last."""
    records = read_json_lines(folder / "heartbeat_rank0.jsonl")
    return {record["step"]: record["loss"] for record in records if "loss" in record}


def records(folder: Path) -> list[dict[str, Any]]:
    return list(read_json_lines(folder / "heartbeat_rank0.jsonl"))


def record(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def command(folder: Path, *arguments: str, ranks: int = 1, module: str = "nsa.train") -> list[str]:
    """The command line of the tiny run, under torchrun for several ranks."""
    path = folder / "tiny.yaml"
    path.write_text(PROFILE)
    several = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"] if ranks > 1 else []
    own = ["-m", module, "run", "--profile", str(path), "--out-dir", str(folder / "run"), *arguments]
    return [sys.executable, *several, *own]


def start(folder: Path, *arguments: str, ranks: int = 1, module: str = "nsa.train") -> subprocess.Popen[str]:
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    variables = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command(folder, *arguments, ranks=ranks, module=module),
        cwd=ROOT,
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
