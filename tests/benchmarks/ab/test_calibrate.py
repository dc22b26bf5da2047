"""The command that measures pairs of identical code: what it injects, and how it goes on where it stopped."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks.__main__ import main
from benchmarks.ab import calibration, calibration_samples, injection, trial
from benchmarks.ab.child import THREADS
from benchmarks.ab.injection import StagedSlowdown
from benchmarks.ab.result import Rules
from benchmarks.ab.sequential import PairFailure
from benchmarks.ab.stages import StageClock
from benchmarks.ab.starter import PairStarter
from benchmarks.cases.key import Key
from benchmarks.cases.outcome import CaseOutcome
from benchmarks.commands import calibrate as command
from harness import fingerprint, jsonl, repository
from harness.machines import Gpu, recognise
from tests.benchmarks import comparisons
from tests.benchmarks.full_results import write_calibration
from tests.benchmarks.synthetic import FINGERPRINT
from tests.fake_nvml import process
from tests.fake_nvml.boards import ALONE, BOARDS, Course, OnGpu

RULES = Rules()


def quiet(r: random.Random) -> float:
    return abs(r.gauss(0.0, 0.004))


def test_the_injected_work_is_real_and_as_large_as_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the thread's own time: on a busy machine the clock on the wall counts the work of others too."""
    monkeypatch.setattr(injection, "time", SimpleNamespace(perf_counter=time.thread_time))
    x = torch.rand(256, 256)

    def call() -> tuple[torch.Tensor, ...]:
        for _ in range(40):
            x @ x
        return (x,)

    staged = StagedSlowdown(20.0, (0.05, 0.5), "cpu")
    for _ in range(9):
        assert staged(call) == (x,)
    samples_ms = staged.take_samples_ms()
    assert (len(samples_ms), staged.take_samples_ms()) == (9, [])
    first, second = (sorted(sample[i] - sample[0] for sample in samples_ms)[4] for i in (1, 2))
    assert 0.3 < first < 4.0  # 5 % of 20 ms is 1 ms; units are counted out at the speed of a warm cache
    assert 4 * first < second < 25 * first


@pytest.mark.gpu
def test_the_work_injected_on_a_gpu_is_as_long_as_it_says() -> None:
    staged = StagedSlowdown(2.0, (0.01, 0.1), "cuda")
    for _ in range(20):
        torch.cuda._sleep(2_000_000)
        staged(lambda: torch.cuda._sleep(2_000_000))
        torch.cuda.synchronize()
    samples_ms = staged.take_samples_ms()
    for i, wanted_ms in ((1, 0.02), (2, 0.2)):
        fastest_ms = min(sample[i] - sample[0] for sample in samples_ms)  # others may use the GPU too
        assert fastest_ms == pytest.approx(wanted_ms, rel=0.2)


@pytest.mark.parametrize("slowdowns", [(0.1, 0.03), (0.0, 0.1), (0.1, 0.1)])
def test_slowdowns_must_ascend_from_above_zero(slowdowns: Sequence[float]) -> None:
    with pytest.raises(ValueError, match="slowdowns must be above 0 and ascend"):
        StagedSlowdown(10.0, slowdowns, "cpu")


class Machine:
    """Stands in for the processes: measures at once, and is killed when it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, killed_after: int | None = None, there: int = 0) -> None:
        """`there`: pairs that earlier ones have measured."""
        self._there = there
        self.pairs, self._killed_after, self._random = 0, killed_after, random.Random(killed_after or 0)
        monkeypatch.setattr(trial, "run", self._play)
        monkeypatch.setattr(command, "_SHAPES", command._SHAPES[:4])

    def _play(
        self,
        starter: PairStarter,
        keys: Sequence[Key],
        rules: Rules,
        first: int,
        slowdowns: Sequence[float],
        *,
        check: bool,
        clock: StageClock,
    ) -> list[trial.PairedSamples]:
        assert (starter.device, first, slowdowns, check) == (
            "cpu",
            (self._there + self.pairs) % 2,
            calibration_samples.SLOWDOWNS,
            False,
        )
        if self.pairs == self._killed_after:
            raise KeyboardInterrupt
        self.pairs += 1
        clock.add({"start": 0.25, "samples": 0.5})
        (pair,) = comparisons.calibration_pairs(
            1, len(keys), quiet, seed=self._random.randrange(2**30), samples=rules.min_samples
        )
        return [one.samples for one in pair.cases]


def stored(results: Path) -> list[int]:
    """How many cases each stored pair has."""
    return [len(pair.cases) for pair in calibration_samples.read(results, "cpu")[0]]


ARGUMENTS = ["calibrate", "--gpu", "cpu", "--pairs", "14"]


def test_an_interrupted_calibration_goes_on_where_it_stopped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = [*ARGUMENTS, "--out", str(tmp_path)]
    first = Machine(monkeypatch, killed_after=4)
    assert main(arguments) == 130
    assert first.pairs == 4
    with calibration_samples.path(tmp_path, "cpu").open("a") as file:
        file.write('{"identity": "torn in mid')
    second = Machine(monkeypatch, there=4)
    assert main(arguments) == 0
    assert second.pairs == 14 - 4
    said, warned = capsys.readouterr()
    assert "1 line is damaged and left out, the first: cpu.pairs.jsonl:5: JSONDecodeError: " in warned
    assert "4 cases, 14 pairs of processes, of which 4 are there" in said
    summary = json.loads(said.splitlines()[-1])[calibration.LONG]
    assert (summary["comparisons"], summary["false_alarms"]) == (8, 0.0)
    assert "A pair of 4 cases: 0.0 s (samples 0.5, start 0.2; medians of 14 pairs)" in said
    assert "1 ms and more, 3% found in 90%: 29 tests without a miss are needed, 8 are there: 37 more pairs of" in said
    assert "these 4 cases, 1 min: python -m benchmarks calibrate --gpu cpu --pairs 51\n" in said
    third = Machine(monkeypatch)
    assert main(arguments) == 0
    assert third.pairs == 0


def test_beside_a_process_that_goes_on_a_calibration_stops_and_keeps_its_pairs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    until_the_second_pair = (ALONE,) * 9
    board = BOARDS["a100-40gb-sxm"].telling(processes=Course((*until_the_second_pair, (OnGpu(),))))
    process.install(monkeypatch, board, os.getppid())
    here = Machine(monkeypatch)
    assert main(["calibrate", "--gpu", "a100-40gb-sxm", "--pairs", "14", "--out", str(tmp_path)]) == 2
    assert f"(pid {os.getppid()}, 8000 MiB, SMs 97 % busy) computed on the GPU too" in capsys.readouterr().err
    assert here.pairs == 2
    assert len(calibration_samples.path(tmp_path, "a100-40gb-sxm").read_text().splitlines()) == 2


def test_minutes_end_a_calibration_that_goes_on_later(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = [*ARGUMENTS, "--out", str(tmp_path)]
    first = Machine(monkeypatch)
    assert main([*arguments, "--minutes", "0"]) == 1
    assert first.pairs == 1
    assert "1 of at least 12 pairs: the same command goes on with them" in capsys.readouterr().err
    assert not calibration.path(tmp_path, "cpu").exists()
    assert main(["calibrate", "--gpu", "cpu", "--pairs", "11", "--out", str(tmp_path)]) == 2
    assert "--pairs must be at least 12; got 11" in capsys.readouterr().err


def test_pairs_of_some_cases_are_added_to_those_of_all(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = ["--out", str(tmp_path)]
    few = Machine(monkeypatch)
    two = ",".join(key.name for key in command.keys(recognise(None))[:2])
    assert main([*ARGUMENTS, "--cases", two, *folder]) == 2
    assert "a calibration of all 4 cases, of which one has 0 pairs in this state" in capsys.readouterr().err
    assert main([*ARGUMENTS, "--quick", "--cases", two, *folder]) == 2
    assert few.pairs == 0
    assert main([*ARGUMENTS, *folder]) == 0
    whole = calibration.load(tmp_path, "cpu")
    more = Machine(monkeypatch, there=14)
    assert main(["calibrate", "--gpu", "cpu", "--pairs", "21", "--cases", two, *folder]) == 0
    assert more.pairs == 7
    assert "2 cases, 21 pairs of processes, of which 14 are there" in capsys.readouterr().out
    assert stored(tmp_path) == [4] * 14 + [2] * 7
    found = calibration.load(tmp_path, "cpu")
    assert found is not None
    assert whole is not None
    assert [case.case for case in found.cases] == [case.case for case in whole.cases]
    assert (found.pairs, [case.pairs for case in found.cases]) == (14, [21, 21, 14, 14])
    assert [case.rates[0].comparisons for case in found.cases] == [4, 4, 2, 2]
    assert f"--cases {two}" in found.command
    rest = Machine(monkeypatch, there=21)
    assert main(["calibrate", "--gpu", "cpu", "--pairs", "16", *folder]) == 0
    assert rest.pairs == 2
    assert stored(tmp_path) == [4] * 14 + [2] * 7 + [2] * 2, "no case gets more than it is to have"
    again = calibration.load(tmp_path, "cpu")
    assert again is not None
    assert [case.pairs for case in again.cases] == [21, 21, 16, 16]


def test_stored_pairs_are_judged_without_the_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The committed ones, of a GPU: what comes out is what is committed."""
    assert main(["calibrate", "--stored", "--gpu", "h200", "--out", str(tmp_path)]) == 2
    assert "--gpu must name a machine whose calibration is in" in capsys.readouterr().err
    for name in ("h200.json", "h200.pairs.jsonl"):
        (tmp_path / "calibration" / name).write_bytes((repository.ROOT / "results/calibration" / name).read_bytes())
    committed = calibration.load(tmp_path, "h200")
    assert committed is not None
    assert main(["calibrate", "--stored", "--gpu", "h200", "--out", str(tmp_path)]) == 0
    assert calibration.load(tmp_path, "h200") == committed
    said = capsys.readouterr()
    assert " more pairs of these " not in said.out, "every bound that is wanted is met"
    assert main(["calibrate", "--stored", "--gpu", "h200", "--pairs", "23", "--out", str(tmp_path)]) == 2
    assert "--stored judges all pairs on record: leave out --cases" in capsys.readouterr().err
    other = dataclasses.replace(committed, fingerprint=dataclasses.replace(committed.fingerprint, driver="1"))
    calibration.save(tmp_path, other)
    assert main(["calibrate", "--stored", "--gpu", "h200", "--out", str(tmp_path)]) == 2
    assert "are not of the machine state that was calibrated" in capsys.readouterr().err
    assert calibration.load(tmp_path, "h200") == other


def test_what_stored_pairs_leave_open_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of the committed ones, without the 23 that were measured last."""
    (tmp_path / "calibration").mkdir()
    for name, lines in (("h200.json", None), ("h200.pairs.jsonl", 140)):
        text = (repository.ROOT / "results/calibration" / name).read_text()
        (tmp_path / "calibration" / name).write_text("".join(text.splitlines(keepends=True)[:lines]))
    assert main(["calibrate", "--stored", "--gpu", "h200", "--out", str(tmp_path)]) == 0
    open_bound, all_cases = (line for line in capsys.readouterr().out.splitlines() if " more pairs of these " in line)
    assert open_bound.startswith("1 ms and more, 3% found in 99%: 299 tests without a miss are needed, 292 are there: ")
    assert "min or more: python -m benchmarks calibrate --gpu h200 --pairs 137 --cases prefill" in open_bound
    assert all_cases.startswith("all cases, no alarm in 99%: 473 tests with no miss beside the 1 are needed, 424 are ")
    assert all_cases.endswith(" min or more: python -m benchmarks calibrate --gpu h200 --pairs 59")


def test_a_session_on_an_h200_goes_on_with_the_committed_pairs() -> None:
    """They are of the cases that it would measure now, and its processes have as many threads."""
    results = repository.ROOT / "results"
    pairs, _ = calibration_samples.read(results, "h200")
    found = calibration.load(results, "h200")
    assert found is not None
    names = [key.name for key in command.keys(recognise(Gpu("NVIDIA H200", (9, 0))))]
    here = dataclasses.replace(found.fingerprint, threads=THREADS)
    assert calibration_samples.identity(here, names, Rules.of_device("cuda")) == pairs[-1].identity


def test_on_a_gpu_cases_of_each_kind_are_calibrated() -> None:
    keys = command.keys(recognise(Gpu("NVIDIA H200", (9, 0))))
    names = [key.name for key in keys]
    assert {key.mode for key in keys} == {"prefill-forward", "prefill-forward-backward", "decode", "train-step"}
    assert {key.launch for key in keys} == {"eager", "graph"}
    assert len(set(names)) == len(names) == 32


def test_pairs_of_other_conditions_are_left_alone(tmp_path: Path) -> None:
    identities = {
        calibration_samples.identity(fingerprint, cases, rules)
        for fingerprint, cases, rules in (
            (FINGERPRINT, ["a"], RULES),
            (dataclasses.replace(FINGERPRINT, torch="2.14.0"), ["a"], RULES),
            (dataclasses.replace(FINGERPRINT, driver="999"), ["a"], RULES),
            (FINGERPRINT, ["b"], RULES),
            (FINGERPRINT, ["a"], dataclasses.replace(RULES, min_samples=8)),
        )
    }
    assert len(identities) == 5
    same = dataclasses.replace(FINGERPRINT, load=3.0, nsa_sha256="2" * 16, benchmarks_sha256="3" * 16)
    assert calibration_samples.identity(same, ["a"], RULES.up_to(6)) in identities, "both sides are the same code"
    (pair,) = comparisons.calibration_pairs(1, 2, quiet)
    jsonl.append(calibration_samples.path(tmp_path, "cpu"), pair)
    assert calibration_samples.read(tmp_path, "cpu", "identity") == ([pair], [])
    assert calibration_samples.read(tmp_path, "cpu", "another") == ([], [])
    jsonl.append(calibration_samples.path(tmp_path, "cpu"), dataclasses.replace(pair, identity="another"))
    (newest,), _ = calibration_samples.read(tmp_path, "cpu")
    assert newest.identity == "another"


def test_a_case_that_fails_ends_the_calibration_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = PairFailure(CaseOutcome.PASSED, CaseOutcome.CRASHED, "HEAD CRASHED: no memory")
    monkeypatch.setattr(trial, "run", lambda starter, keys, *_, **__: [failed] * len(keys))
    assert main([*ARGUMENTS, "--out", str(tmp_path)]) == 1
    assert "prefill-forward/8x2x64/b1/s384/float32/nsa: HEAD CRASHED: no memory" in capsys.readouterr().err


def test_samples_that_do_not_fit_together_are_refused() -> None:
    (pair,) = comparisons.calibration_pairs(1, 1, quiet)
    one = pair.cases[0]
    for changes in ({"base_ms": one.base_ms[:1]}, {"head_ms": ((1.0, 2.0),) * 8}, {"base_ms": (0.0,) * 8}):
        with pytest.raises(ValueError, match="samples of case 0 must be above 0, one of each slowdown"):
            dataclasses.replace(one, **changes)


def test_a_quick_calibration_replaces_none_of_more_pairs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_calibration(tmp_path)
    ours = calibration.load(tmp_path, "cpu")
    assert ours is not None
    here = dataclasses.replace(ours.fingerprint, device=fingerprint.device_name(recognise(None)))
    calibration.save(tmp_path, dataclasses.replace(ours, fingerprint=here))
    assert main(["calibrate", "--quick", "--gpu", "cpu", "--out", str(tmp_path)]) == 2
    assert "cpu.json is of 60 pairs; leave out --quick" in capsys.readouterr().err


def test_the_quick_part_has_every_mode() -> None:
    keys = command.keys(recognise(None))
    few = command.quick_part(keys)
    assert {key.mode for key in few} == {key.mode for key in keys}
    assert 2 <= len(few) < len(keys) / 3
