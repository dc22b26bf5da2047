"""Rates come out as the noise says, thresholds from other groups than they judge; samples outlive their writer."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import random
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.__main__ import main
from benchmarks.ab import calibration, calibration_samples, injection, result, trial
from benchmarks.ab.calibration import Calibration, CalibrationRate
from benchmarks.ab.injection import StagedSlowdown
from benchmarks.ab.result import CompareVerdict, Rules
from benchmarks.ab.sequential import PairFailure
from benchmarks.cases.key import Key
from benchmarks.cases.outcome import CaseOutcome
from benchmarks.commands import calibrate as command
from benchmarks.commands import compare
from harness import fingerprint, jsonl, repository, schema
from harness.machines import recognise
from tests.benchmarks import comparisons
from tests.benchmarks.synthetic import FINGERPRINT

RULES = Rules()
CASES = 20
SIZE = RULES.min_pairs


def quiet(r: random.Random) -> float:
    return abs(r.gauss(0.0, 0.025)) + 0.3 * r.random() * (r.random() < 0.05)


def noisy(r: random.Random) -> float:
    return abs(r.gauss(0.0, 0.5))


def rates_of(noise: comparisons.Noise, groups: int = 10) -> tuple[Rules, dict[float, CalibrationRate]]:
    pairs = comparisons.calibration_pairs(groups * SIZE, CASES, noise)
    rules, rates = calibration.calibrate(calibration.split(pairs, SIZE), RULES)
    return rules, {rate.slowdown: rate for rate in rates}


def test_a_quiet_machine_finds_three_percent_without_false_alarms() -> None:
    rules, rates = rates_of(quiet)
    assert [rate.comparisons for rate in rates.values()] == [200] * 4
    assert rates[0.0].alarms <= 0.01
    assert rates[0.03].power >= 0.9
    assert rates[0.1].power >= 0.95
    assert rates[0.01].power < rates[0.03].power
    assert rates[0.03].injected == pytest.approx(0.03, rel=0.1)
    assert (rules.equal_within, rules.interim_analyses) == (0.03, RULES.interim_analyses)
    assert rates[0.0].same >= 180


def test_a_noisy_machine_says_so_instead_of_crying_wolf() -> None:
    rules, rates = rates_of(noisy)
    assert rates[0.0].alarms <= 0.01
    assert rates[0.03].power < 0.3
    assert rules.equal_within == 0.1
    assert rates[0.0].undecided >= 20


def test_no_pair_is_in_two_groups_and_each_is_as_large_as_a_test() -> None:
    pairs = comparisons.calibration_pairs(25, 2, quiet)
    groups = calibration.split(pairs, 10)
    assert [len(group) for group in groups] == [10, 10]
    assert [*itertools.chain(*groups)] == pairs[:20]
    assert calibration.least_effort(RULES).interim_analyses[-1] == SIZE


def test_thresholds_that_judge_a_group_were_chosen_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = calibration.split(comparisons.calibration_pairs(4 * SIZE, 2, quiet), SIZE)
    chosen_on: list[list[int]] = []

    def choose(some: Sequence[calibration.Group], rules: Rules) -> Rules:
        chosen_on.append([groups.index(group) for group in some])
        return rules

    monkeypatch.setattr(calibration, "choose", choose)
    calibration.calibrate(groups, RULES)
    assert chosen_on == [[1, 3], [0, 2], [0, 1, 2, 3]]


def test_one_case_is_slowed_down_at_a_time() -> None:
    """The others stay what they are, so that a lone change must pass the control of false discoveries."""
    group = comparisons.calibration_pairs(SIZE, 3, lambda r: r.gauss(0.0, 0.001))
    answers = calibration.simulate(group, "case 1", calibration.LEVELS.index(0.1), RULES)
    assert [answer.verdict.value for answer in answers] == ["SAME", "SLOWER", "SAME"]


def test_false_alarms_blunt_the_thresholds() -> None:
    """Process pairs that differ by a constant, as two builds of one source can: the smallest change is raised."""
    pairs = comparisons.calibration_pairs(4 * SIZE, 2, lambda r: r.gauss(0.0, 0.0005))
    slower = [dataclasses.replace(pair, cases=tuple(_head_slower(one, 1.012) for one in pair.cases)) for pair in pairs]
    assert calibration.choose(calibration.split(pairs, SIZE), RULES).smallest_change == calibration.SMALLEST_CHANGES[0]
    assert calibration.choose(calibration.split(slower, SIZE), RULES).smallest_change == 0.015


def _head_slower(one: calibration_samples.CaseSamples, factor: float) -> calibration_samples.CaseSamples:
    return dataclasses.replace(one, head_ms=tuple(tuple(factor * x for x in sample) for sample in one.head_ms))


def test_the_injected_work_is_real_and_as_large_as_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the thread's own time: on a busy machine the clock on the wall counts the work of others too."""
    monkeypatch.setattr(injection, "time", SimpleNamespace(perf_counter=time.thread_time))
    x = torch.rand(256, 256)

    def call() -> tuple[torch.Tensor, ...]:
        for _ in range(40):
            x @ x
        return (x,)

    staged = StagedSlowdown(call, 20.0, (0.05, 0.5))
    for _ in range(9):
        assert staged() == (x,)
    first, second = (sorted(sample[i] - sample[0] for sample in staged.samples_ms)[4] for i in (1, 2))
    assert 0.3 < first < 4.0  # 5 % of 20 ms is 1 ms; units are counted out at the speed of a warm cache
    assert 4 * first < second < 25 * first


@pytest.mark.parametrize("slowdowns", [(0.1, 0.03), (0.0, 0.1), (0.1, 0.1)])
def test_slowdowns_must_ascend_from_above_zero(slowdowns: Sequence[float]) -> None:
    with pytest.raises(ValueError, match="slowdowns must be above 0 and ascend"):
        StagedSlowdown(lambda: (), 10.0, slowdowns)


class Machine:
    """Stands in for the processes: measures at once, and is killed when it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, killed_after: int | None = None) -> None:
        self.pairs, self._killed_after, self._random = 0, killed_after, random.Random(killed_after or 0)
        monkeypatch.setattr(trial, "run", self._play)
        monkeypatch.setattr(command, "_SHAPES", command._SHAPES[:4])

    def _play(
        self,
        base: object,
        head: object,
        device: str,
        keys: Sequence[Key],
        rules: Rules,
        first: int,
        slowdowns: Sequence[float],
        *,
        check: bool,
    ) -> list[trial.PairedSamples]:
        assert (device, first, slowdowns, check) == (
            "cpu",
            self.pairs % 2,
            calibration_samples.SLOWDOWNS,
            self.pairs == 0,
        )
        if self.pairs == self._killed_after:
            raise KeyboardInterrupt
        self.pairs += 1
        (pair,) = comparisons.calibration_pairs(
            1, len(keys), quiet, seed=self._random.randrange(2**30), samples=rules.min_samples
        )
        return [one.samples for one in pair.cases]


ARGUMENTS = ["calibrate", "--comparisons", "8"]


def test_an_interrupted_calibration_goes_on_where_it_stopped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = [*ARGUMENTS, "--out", str(tmp_path)]
    wanted = 2 * SIZE
    first = Machine(monkeypatch, killed_after=5)
    assert main(arguments) == 130
    assert first.pairs == 5
    with calibration_samples.path(tmp_path, "cpu").open("a") as file:
        file.write('{"identity": "torn in mid')
    second = Machine(monkeypatch)
    assert main(arguments) == 0
    assert second.pairs == wanted - 5
    said = capsys.readouterr().out
    assert f"4 cases, {wanted} pairs of processes, of which 5 are there" in said
    summary = json.loads(said.splitlines()[-1])
    assert (summary["comparisons"], summary["false_alarms"]) == (8, 0.0)
    third = Machine(monkeypatch)
    assert main(arguments) == 0
    assert third.pairs == 0


def test_pairs_of_other_sources_are_left_alone(tmp_path: Path) -> None:
    identities = {
        calibration_samples.identity(fingerprint, cases, rules)
        for fingerprint, cases, rules in (
            (FINGERPRINT, ["a"], RULES),
            (dataclasses.replace(FINGERPRINT, nsa_sha256="2" * 16), ["a"], RULES),
            (dataclasses.replace(FINGERPRINT, torch="2.14.0"), ["a"], RULES),
            (FINGERPRINT, ["b"], RULES),
            (FINGERPRINT, ["a"], dataclasses.replace(RULES, min_samples=8)),
        )
    }
    assert len(identities) == 5
    assert (
        calibration_samples.identity(dataclasses.replace(FINGERPRINT, load=3.0), ["a"], RULES.up_to(14)) in identities
    )
    (pair,) = comparisons.calibration_pairs(1, 2, quiet)
    jsonl.append(calibration_samples.path(tmp_path, "cpu"), pair)
    assert calibration_samples.read(tmp_path, "cpu", "identity") == [pair]
    assert calibration_samples.read(tmp_path, "cpu", "another") == []


def test_a_case_that_fails_ends_the_calibration_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = PairFailure(CaseOutcome.PASSED, CaseOutcome.INCORRECT, "HEAD INCORRECT: o")
    monkeypatch.setattr(trial, "run", lambda base, head, device, keys, *_, **__: [failed] * len(keys))
    assert main([*ARGUMENTS, "--out", str(tmp_path)]) == 1
    assert "prefill-forward/8x2x64/b1/s384/float32/nsa: HEAD INCORRECT: o" in capsys.readouterr().err


def test_compare_takes_its_thresholds_from_the_machines_calibration(tmp_path: Path) -> None:
    cpu = recognise(None)
    assert compare.rules_for(tmp_path, cpu, 22) == RULES
    here = dataclasses.replace(FINGERPRINT, device=fingerprint.device_name(cpu))
    found = Calibration(here, Rules(0.02, 0.1), (CalibrationRate(0.0, 0.0, 200, 1, 1, 190, 8),), ("a",), 100, 0.01, "x")
    path = calibration.save(tmp_path, found)
    assert calibration.load(tmp_path, "cpu") == found
    wanted = dataclasses.replace(RULES.up_to(14), smallest_change=0.02, equal_within=0.1)
    assert compare.rules_for(tmp_path, cpu, 14) == wanted
    calibration.save(tmp_path, dataclasses.replace(found, fingerprint=FINGERPRINT))
    assert compare.rules_for(tmp_path, cpu, 14) == RULES.up_to(14), "of another processor"
    path.write_text('{"rules": 1}')
    with pytest.raises(ValueError, match=r"cpu\.json is no calibration: .*; run calibrate again or remove it"):
        compare.rules_for(tmp_path, cpu, 14)


def test_files_with_earlier_names_are_read(tmp_path: Path) -> None:
    """The committed calibration has them; so do pairs and comparison results of before."""
    committed = calibration.load(repository.ROOT / "results", "cpu")
    assert committed is not None
    assert committed.rules == dataclasses.replace(RULES, smallest_change=0.005)
    (pair,) = comparisons.calibration_pairs(1, 2, quiet)
    _with_earlier_names(calibration_samples.path(tmp_path, "cpu"), pair, {"cases": "taken"})
    assert calibration_samples.read(tmp_path, "cpu", "identity") == [pair]
    found = comparisons.comparison_result(CompareVerdict.SAME)
    _with_earlier_names(
        result.path(tmp_path, found.utc, found.base, found.head),
        found,
        {
            "interim_analyses": "looks",
            "min_samples": "turns",
            "max_samples": "most_turns",
            "target_standard_error": "turn_precision",
        },
    )
    assert result.read(tmp_path) == ([found], [])
    with pytest.raises(ValueError, match=r"rules must not have 'looks' beside 'interim_analyses'"):
        schema.build(Rules, {"looks": [6], "interim_analyses": [6]}, "rules")


def _with_earlier_names(path: Path, value: Any, names: Mapping[str, str]) -> None:
    jsonl.append(path, value)
    text = path.read_text()
    for name, earlier in names.items():
        assert f'"{name}":' in text
        text = text.replace(f'"{name}":', f'"{earlier}":')
    path.write_text(text)


def test_a_calibration_that_cannot_be_written_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = Calibration(FINGERPRINT, RULES, (CalibrationRate(0.0, 0.0, 200, 0, 0, 200, 0),), ("a",), 100, 0.01, "x")
    path = calibration.save(tmp_path, old)

    def full(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="no space left"):
        calibration.save(tmp_path, dataclasses.replace(old, pairs=200))
    assert calibration.load(tmp_path, "cpu") == old
    assert [file.name for file in path.parent.iterdir()] == ["cpu.json"]


def test_rates() -> None:
    rate = CalibrationRate(0.03, 0.031, 200, slower=180, faster=2, same=0, undecided=18)
    assert (rate.power, rate.alarms) == (0.9, 0.91)
