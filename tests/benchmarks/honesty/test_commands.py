"""A run measures what its command says: the plan, the cases, and a record's command measures its case again."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest

from benchmarks import __main__ as bench
from benchmarks import runner, worker
from benchmarks.__main__ import main
from benchmarks.cases.key import Key
from benchmarks.history import run_file
from benchmarks.runner import Measurement
from benchmarks.timing.latency import SamplingPlan
from benchmarks.workloads import suite
from harness.repository import ROOT
from tests.benchmarks.honesty.conftest import Run
from tests.benchmarks.synthetic import key, passed


@pytest.mark.parametrize(("arguments", "plan"), [((), runner.FULL), (("--quick",), runner.QUICK)])
def test_only_a_quick_run_measures_as_quick(
    arguments: tuple[str, ...], plan: SamplingPlan, run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[tuple[list[Key], SamplingPlan]] = []
    run([passed(key())])  # what else it needs is replaced

    def measure(keys: list[Key], device: str, plan: SamplingPlan, *_: object, **__: object) -> list[Measurement]:
        asked.append((keys, plan))
        return [Measurement(passed(key()))]

    monkeypatch.setattr(worker, "run", measure)
    assert main(["run", "--gpu", "cpu", "--out", str(ROOT / "results"), "--list"]) == 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_file, "create", lambda *_: Path("nowhere"))
        patch.setattr(run_file, "append", lambda *_: None)
        # a folder without runs: beside those of other conditions anchors are measured too
        assert main(["run", "--gpu", "cpu", "--out", str(tmp_path), *arguments]) == 0
    ((keys, used),) = asked
    assert used is plan
    lengths = {one.num_keys for one in keys if one.mode == "prefill-forward"}
    assert (8192 in lengths) == (plan is runner.FULL)
    assert runner.FULL.precision is not None
    assert runner.QUICK.precision is not None
    assert runner.FULL.precision < runner.QUICK.precision
    assert runner.FULL.min_time_s > runner.QUICK.min_time_s


@pytest.mark.parametrize("arguments", [(), ("--quick", "--backend", "torch", "--seed", "9")])
def test_the_command_of_a_record_measures_its_case_again_and_no_other(
    arguments: tuple[str, ...], run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: dict[str, tuple[Key, str]] = {}
    run([passed(key())])  # what else it needs is replaced

    def measure(
        keys: list[Key], device: str, plan: SamplingPlan, identity: Any, command: Any, **_: Any
    ) -> list[Measurement]:
        said.update((one.name, (one, command(one))) for one in keys)
        return [Measurement(passed(key()))]

    monkeypatch.setattr(worker, "run", measure)
    monkeypatch.setattr(run_file, "create", lambda *_: Path("nowhere"))
    monkeypatch.setattr(run_file, "append", lambda *_: None)
    assert main(["run", "--gpu", "cpu", *arguments]) == 0
    first = dict(said)
    assert len(first) > 20
    wanted = bench.parser().parse_args(["run", *arguments])
    for one, command in list(first.values())[::6]:
        words = shlex.split(command)
        asked = bench.parser().parse_args(words[3:])
        assert (asked.gpu, asked.backend, asked.quick) == ("cpu", wanted.backend, wanted.quick)
        assert asked.seed == wanted.seed if wanted.seed else asked.seed > 0
        said.clear()
        assert main(words[3:]) == 0
        assert list(said.values()) == [(one, command)]


def test_a_case_is_planned_with_its_own_shape(run: Run) -> None:
    """A ratio is of one case: a baseline of another shape would stand in another row."""

    for name in ("cpu", "24gb", "80gb"):
        for quick in (True, False):
            keys = suite.planned(suite.table(name), quick=quick, backend="auto", on_gpu=name != "cpu")
            ours = {one.case: one for one in keys if one.implementation == "nsa"}
            for one in keys:
                same = ours[one.case]
                assert all(getattr(one, size) == getattr(same, size) for size in Key.SIZES)
                assert (one.inputs, one.cache, one.launch, one.dtype) == (
                    same.inputs, same.cache, same.launch, same.dtype,
                )  # fmt: skip
                assert one.cache == "warm" or name != "cpu"
