"""One candidate at a time: small calls in Triton's interpreter, and what an architecture can hold, without a GPU."""

from __future__ import annotations

import argparse
import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from benchmarks.cases import inputs
from benchmarks.timing import latency
from benchmarks.tuning import run
from harness import jsonl
from nsa.triton_backend import hopper, tuning
from nsa.triton_backend.tuning import LaunchConfig
from nsa.tuner.trials import Workload, difference
from tests.benchmarks.synthetic import key

SMALL = LaunchConfig(16, 16, 1, 1)


@pytest.fixture
def workload(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> Workload:
    once = latency.SamplingPlan(min_samples=1, min_time_s=0.0, wall_limit_s=0.0, warmup_calls=0, end_to_end=False)
    monkeypatch.setattr(run, "PLAN", once)
    return Workload(86, "narrow", 2, 16, 16, 1, 40, torch.float32, device.type)


@pytest.mark.parametrize("kernel", ["scores", "compressed_window_backward_q"])
def test_a_candidate_that_is_right_is_timed(workload: Workload, kernel: str) -> None:
    trial = workload.trial(kernel, SMALL, tuning.table(86), run.timer(workload.device))
    assert trial.outcome == "measured", trial.detail
    assert trial.latency_ms is not None
    assert trial.latency_ms > 0


def test_recorded_inputs_are_those_of_the_benches(device: torch.device) -> None:
    sizes = {"heads": 2, "num_kv_heads": 1, "head_dim_k": 16, "head_dim_v": 16, "config": None}
    for kind in ("random", "recorded"):
        tried = Workload(86, "narrow", 2, 16, 16, 1, 40, torch.float32, device.type)
        tried = dataclasses.replace(tried, given=run.drawn(tried, kind))
        drawn = inputs.draw(key("prefill-forward-backward", length=40, inputs=kind, **sizes), device.type)
        assert all(torch.equal(x, y) for x, y in zip(tried.inputs, (drawn.q, drawn.k, drawn.v), strict=True))
        assert all(x.requires_grad for x in tried.inputs)


def test_a_candidate_is_launched_and_a_wrong_one_is_found(workload: Workload, monkeypatch: pytest.MonkeyPatch) -> None:
    real = tuning.fit

    def faulty(kernel: str, *sizes: object) -> tuning.Shape:
        if tuning.table(86).narrow["compressed_window_forward"] == SMALL:
            monkeypatch.setattr("nsa.triton_backend.compressed_window.LOG2E", 1.0)  # the scores of another scale
        return real(kernel, *sizes)  # type: ignore[arg-type]

    monkeypatch.setattr(tuning, "fit", faulty)
    trial = workload.trial("compressed_window_forward", SMALL, tuning.table(86), run.timer(workload.device))
    assert trial.outcome == "wrong"
    assert trial.latency_ms is None


def test_a_candidate_that_the_device_refuses_is_kept_as_failed(
    workload: Workload, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> None:
        raise RuntimeError("out of resource: shared memory")

    monkeypatch.setattr(latency, "measure", refused)
    trial = workload.trial("scores", SMALL, tuning.table(86), run.timer(workload.device))
    assert (trial.outcome, trial.detail) == ("failed", "RuntimeError: out of resource: shared memory")


def test_a_trial_is_on_the_disk_before_the_next_one_begins(workload: Workload, tmp_path: Path) -> None:
    table = tuning.table(86)
    trials = run._tried("scores", [SMALL, SMALL], table, workload, "random", tmp_path)
    first = next(trials)
    found, damaged = jsonl.read(tmp_path / "tuning" / "sm86.jsonl", run.TrialRecord)
    assert not damaged
    (line,) = found
    assert line.trial == first
    assert line.inputs == "random"
    assert (line.group, line.head_dim_k, line.head_dim_v, line.kv_heads, line.tokens) == (2, 16, 16, 1, 40)
    assert line.fingerprint.torch == torch.__version__


def test_rounding_is_no_difference_and_more_is() -> None:
    wanted = torch.randn(100, generator=torch.Generator().manual_seed(0))
    assert difference([wanted * (1 + 1e-7)], [wanted]) is None
    assert "off by" in str(difference([wanted * 1.001], [wanted]))
    assert "off by nan" in str(difference([wanted * torch.nan], [wanted]))
    blocks = torch.arange(100)
    assert difference([blocks], [blocks]) is None
    assert "98.0000%" in str(difference([blocks.clamp(max=97)], [blocks]))


def test_what_does_not_fit_an_architecture_is_dropped() -> None:
    program = (
        "from nsa.tuner.trials import *\n"
        "table = tuning.table(90)\n"
        "for architecture in (90, 86):\n"
        "    workload = Workload(architecture, 'narrow', 16, 128, 128, 1, 0)\n"
        "    print(fits('scores', LaunchConfig(128, 128, 4, 4), table, workload))\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["True", "False"], done.stderr


@pytest.mark.skipif(not hopper.AVAILABLE, reason="kernels of hopper/ need a version of Triton that was tried")
def test_what_hopper_does_not_serve_or_take_is_dropped() -> None:
    """Other heads; one stage, with which scores, and dk and dv, would wait for ever; 32 rows, which are no warpgroup;
    64 keys for two of them; keys of 192 channels, unless the table has a launch for them."""
    program = (
        "from nsa.tuner.trials import *\n"
        "table, launch = tuning.table(90), LaunchConfig(64, 64, 4, 2)\n"
        "narrow = Workload(90, 'narrow', 16, 128, 128, 1, 0)\n"
        "print(fits('hopper.scores', launch, table, narrow))\n"
        "print(fits('hopper.scores', launch, table, Workload(90, 'slim', 6, 64, 64, 1, 0)))\n"
        "print(fits('hopper.scores', LaunchConfig(64, 64, 4, 1), table, narrow))\n"
        "print(fits('hopper.compressed_window_forward', LaunchConfig(32, 64, 4, 2), table, narrow))\n"
        "wide = Workload(90, 'wide', 16, 192, 128, 1, 0)\n"
        "without = {name: tuned for name, tuned in table.wide.items() if name != 'hopper.scores'}\n"
        "print(fits('hopper.scores', launch, dataclasses.replace(table, wide=without), wide))\n"
        "print(fits('hopper.scores', launch, table, wide))\n"
        "of_two = LaunchConfig(64, 128, 4, 2)\n"
        "print(fits('hopper.compressed_window_backward_kv', of_two, table, narrow))\n"
        "print(fits('hopper.compressed_window_backward_kv', LaunchConfig(64, 128, 4, 1), table, narrow))\n"
        "print(fits('hopper.compressed_window_backward_kv', launch, table, narrow))\n"
        "slim = Workload(90, 'slim', 6, 64, 64, 1, 0)\n"
        "print(fits('hopper.compressed_window_backward_kv', of_two, table, slim))\n"
        "print(fits('hopper.selected_backward_kv', launch, table, slim))\n"
        "print(fits('hopper.selected_backward_kv', LaunchConfig(64, 64, 4, 1), table, slim))\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    fit = ["True", *4 * ["False"], "True", "True", "False", "False", "True", "True", "False"]
    assert done.stdout.split() == fit, done.stderr


def test_a_kernel_that_no_candidate_serves_is_passed_over_unless_it_was_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: object, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run, "fits", lambda *_: False)
    monkeypatch.setattr(run, "_architecture", lambda _: 90)
    monkeypatch.setattr(run.gpu_watch, "begin", lambda _: None)  # tests beside this one may use a GPU that is here
    given = {"dry_run": False, "architecture": 90, "heads": "12,2,64,64", "tokens": 64}
    given |= {"inputs": "random", "out": tmp_path}
    assert run.run(argparse.Namespace(**given, kernels=None)) == 0
    assert "hopper.scores: 0 of " in capsys.readouterr().out
    with pytest.raises(ValueError, match=r"hopper.scores does not serve --heads 12,2,64,64"):
        run.run(argparse.Namespace(**given, kernels="hopper.scores"))


@pytest.mark.parametrize("given", ["64,4,128", "64,0,128,128", "10,4,64,64", "64;4;128;128"])
def test_heads_that_make_no_groups_are_refused(given: str) -> None:
    with pytest.raises(ValueError, match="--heads must be four positive numbers HQ,HKV,DK,DV"):
        run._heads(given)


def test_a_table_is_replaced_in_one_step(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    monkeypatch.setattr(tuning, "TABLES", tmp_path)
    path = run._write(86, "old")
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        run._write(86, "new")
    assert path.read_text() == "old"
    assert list(path.parent.iterdir()) == [path]
