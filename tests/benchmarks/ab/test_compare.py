"""`compare` from commits to exit code: real processes where they matter, none where only the verdict does."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from benchmarks.__main__ import main
from benchmarks.ab import calibration, checkout, device_code, result, trial
from benchmarks.ab.calibration import Calibration, CalibrationRate, CaseCalibration, ClassRules
from benchmarks.ab.checkout import Sources
from benchmarks.ab.device_code import DeviceCode
from benchmarks.ab.moderated import NoisePrior
from benchmarks.ab.result import CompareVerdict, Rules, Side
from benchmarks.ab.sequential import PairFailure
from benchmarks.ab.stages import StageClock
from benchmarks.ab.starter import PairStarter
from benchmarks.cases.key import Key
from benchmarks.cases.outcome import CaseOutcome
from benchmarks.commands import compare as command
from harness import fingerprint, machines, repository
from harness.machines import Machine
from tests.benchmarks.comparisons import comparison_result
from tests.benchmarks.repository import Repository
from tests.benchmarks.synthetic import FINGERPRINT
from tests.fake_nvml import process
from tests.fake_nvml.boards import ALONE, BOARDS, Course, OnGpu

CASE = "prefill-forward/8x2x64/b1/s512/float32/nsa"
OTHER = "decode/8x2x64/b4/s16384/float32/nsa"
TWICE = """
def nsa_attention(*arguments, **options):
    _once(*arguments, **options)
    return _once(*arguments, **options)
"""


@pytest.fixture
def real(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Repository:
    """A repository whose only commit is the nsa/ of this working tree."""
    made = Repository(tmp_path / "repository")
    shutil.copytree(repository.ROOT / "nsa", made.folder / "nsa", dirs_exist_ok=True)
    made.git("add", "--all")
    made.git("commit", "--quiet", "--message", "as it is")
    monkeypatch.setattr(checkout, "REPOSITORY", made.folder)
    return made


def change_attention(repository: Repository, text: str) -> None:
    """In the working tree: nsa_attention becomes what the text makes of `_once`."""
    path = repository.folder / "nsa" / "attention.py"
    path.write_text(f"{path.read_text()}\n\n_once = nsa_attention\n{text}")


def run(tmp_path: Path, *arguments: str, cases: str = CASE) -> int:
    return main(["compare", *arguments, "--gpu", "cpu", "--cases", cases, "--out", str(tmp_path / "results")])


def summary(capsys: pytest.CaptureFixture[str]) -> dict[str, object]:
    found: dict[str, object] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return found


def test_twice_the_work_is_slower(real: Repository, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Whole and unreplaced: git, folders, processes, the oracle, samples, confirmation, the file, the exit code.

    With few pairs, as a calibration may allow.
    """
    a_calibration(tmp_path / "results", 0.03)
    change_attention(real, TWICE)
    assert run(tmp_path, "HEAD", "--pairs", "6") == 1
    assert summary(capsys)["bad"] == [CASE]
    ((found,), damaged) = result.read(tmp_path / "results")
    assert damaged == []
    assert (found.verdict, found.key.name, found.reason) == (CompareVerdict.SLOWER, CASE, None)
    assert found.change is not None
    assert 0.4 < found.change < 3.0
    assert (found.base.ref, found.head.ref, found.head.dirty) == ("HEAD", "working tree", True)
    assert found.base.nsa_sha256 != found.head.nsa_sha256
    assert len(found.changes) == 6, "one case alone is not called after three pairs"
    assert found.rules.noise.sd >= 0.03


def test_a_wrong_head_fails_with_its_outcome(
    real: Repository, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = """
def nsa_attention(*arguments, **options):
    found = _once(*arguments, **options)
    return (found[0] * 1.01, found[1]) if isinstance(found, tuple) else found * 1.01
"""
    change_attention(real, text)
    assert run(tmp_path, "HEAD") == 1
    ((found,), _) = result.read(tmp_path / "results")
    assert (found.verdict, found.head_outcome, found.base_outcome) == (
        CompareVerdict.FAILED,
        CaseOutcome.INCORRECT,
        CaseOutcome.PASSED,
    )
    assert found.reason is not None
    assert found.reason.startswith("HEAD INCORRECT: o: error 1.")
    assert found.changes == ()


def test_a_head_that_cannot_be_imported_fails_every_case(
    real: Repository, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (real.folder / "nsa" / "attention.py").write_text("def nsa_attention(:\n")
    assert run(tmp_path, "HEAD", cases=f"{CASE},{OTHER}") == 1
    assert summary(capsys)["verdicts"] == {"FAILED": 2}
    (first, _), _ = result.read(tmp_path / "results")
    assert first.reason == "HEAD CRASHED: the child ended with code 1: SyntaxError: invalid syntax"


Play = Callable[[Key, int], trial.PairedSamples | PairFailure]


def samples(base_ms: float, head_ms: float) -> trial.PairedSamples:
    return trial.PairedSamples((base_ms,) * 6, ((head_ms,),) * 6)


@pytest.fixture
def answered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Play], None]:
    """Replaces the processes: each case gets what a function says."""
    made = Repository(tmp_path / "repository")
    made.commit("one")
    made.commit("two")
    monkeypatch.setattr(checkout, "REPOSITORY", made.folder)

    def replace(play: Play) -> None:
        done = 0

        def run_trial(
            starter: PairStarter, keys: Sequence[Key], rules: Rules, first: int, *, check: bool, clock: StageClock
        ) -> list[trial.PairedSamples | PairFailure]:
            nonlocal done
            base, head = starter._sides
            texts = [(side.folder / "nsa" / "__init__.py").read_text() for side in (base, head)]
            assert texts == ["one", "two"]
            assert (base.benches / "benchmarks" / "ab" / "trial.py").is_file()
            assert (first, check) == (done % 2, done == 0)
            done += 1
            return [play(key, done) for key in keys]

        monkeypatch.setattr(trial, "run", run_trial)

    return replace


def test_identical_times_are_the_same_and_exit_with_0(
    answered: Callable[[Play], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answered(lambda key, i: samples(10.0, 10.0 + 0.01 * (-1) ** i))
    assert run(tmp_path, "HEAD~1", "HEAD", cases="prefill-forward") == 0
    said = capsys.readouterr().out
    found = json.loads(said.splitlines()[-1])
    assert list(found["verdicts"]) == ["SAME"]
    assert "[10 cases, pair 3 of at most 12; 10 of 10 cases begun] 0 s, 0 s in all" in said
    assert ", about 0 s to the analysis after pair 3" in said


def test_a_comparison_that_reaches_no_case_has_the_keys_of_any_other(
    answered: Callable[[Play], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answered(lambda key, i: samples(10.0, 10.0))
    assert run(tmp_path, "HEAD~1", "HEAD") == 0
    any_other = summary(capsys)
    assert main(["compare", "HEAD", "HEAD", "--gpu", "cpu", "--out", str(tmp_path / "results")]) == 0
    found = summary(capsys)
    assert list(found) == list(any_other)
    assert (found["verdicts"], found["bad"], found["undecided"], found["results"]) == ({}, [], [], None)


def a_calibration(results: Path, sd: float) -> None:
    """Of this machine, whose pairs differed by so much."""
    here = dataclasses.replace(FINGERPRINT, device=fingerprint.device_name(machines.machine("cpu", None)))
    classes = (ClassRules(calibration.LONG, Rules(noise=NoisePrior(sd, 20.0))),)
    cases = (CaseCalibration(CASE, 30.0, sd, (CalibrationRate(0.0, 0.0, 4, 0, 0, 4, 0),)),)
    calibration.save(results, Calibration(here, classes, cases, 12, 0.0, "calibrate"))


@pytest.mark.parametrize(("sd", "said"), [(0.001, True), (0.05, False)])
def test_a_machine_noisier_than_its_calibration_is_told(
    sd: float,
    said: bool,
    answered: Callable[[Play], None],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """What a case was judged by is in its result."""
    a_calibration(tmp_path / "results", sd)
    answered(lambda key, i: samples(10.0, 10.0 * 1.02 ** (-1) ** i))
    run(tmp_path, "HEAD~1", "HEAD", cases="prefill-forward")
    assert ("times as much as at the calibration: 10 of 10 cases are judged by that" in capsys.readouterr().out) is said
    found, _ = result.read(tmp_path / "results")
    assert {one.rules.noise.sd > sd for one in found} == {said}


def test_noise_is_undecided_and_exits_with_0_at_the_limit(
    answered: Callable[[Play], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answered(lambda key, i: samples(10.0, 10.0 * 1.2 ** (-1) ** i))
    assert run(tmp_path, "HEAD~1", "HEAD", "--pairs", "11") == 0
    assert summary(capsys)["undecided"] == [CASE]
    ((found,), _) = result.read(tmp_path / "results")
    assert (len(found.changes), found.rules.interim_analyses) == (6, (3, 6))
    assert found.detectable is not None
    assert found.detectable > 0.5


def test_a_confirmed_slowdown_exits_with_1_also_through_a_pipe(
    answered: Callable[[Play], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answered(lambda key, i: samples(10.0, 11.0 if key.name == CASE else 10.0))
    assert run(tmp_path, "HEAD~1", "HEAD", cases="prefill-forward") == 1
    said = capsys.readouterr().out
    assert json.loads(said.splitlines()[-1])["bad"] == [CASE]
    first = said.split("\n\n")[1].splitlines()[0]
    assert first.startswith(f"SLOWER     {CASE}")
    assert "+10.0% [+10.0%, +10.0%]  10 -> 11 ms  could see 1.0%" in first


def test_faster_exits_with_0(answered: Callable[[Play], None], tmp_path: Path) -> None:
    answered(lambda key, i: samples(10.0, 9.0))
    assert run(tmp_path, "HEAD~1", "HEAD") == 0


def test_pairs_beside_a_process_that_goes_on_say_so(
    answered: Callable[[Play], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    answered(lambda key, i: samples(10.0, 10.0 + 0.01 * (-1) ** i))
    before_the_first_pair = (ALONE,) * 5
    board = BOARDS["a100-80gb-pcie"].telling(processes=Course((*before_the_first_pair, (OnGpu(),))))
    process.install(monkeypatch, board, os.getppid())
    arguments = ["HEAD~1", "HEAD", "--gpu", "a100", "--cases", CASE, "--out", str(tmp_path / "results")]
    assert main(["compare", *arguments]) == 0
    said = capsys.readouterr().out
    (file,) = (tmp_path / "results" / "verdicts").iterdir()
    (found,) = (json.loads(line) for line in file.read_text().splitlines())
    other = f"(pid {os.getppid()}, 8000 MiB, SMs 97 % busy) computed on the GPU too"
    assert found["fingerprint"]["machine"] == "a100-80gb-pcie"
    assert "before pair 1 " in found["reason"]
    assert other in found["reason"]
    assert f"{other}\n" in said
    process.install(monkeypatch, board.telling(processes=(OnGpu(),)), os.getppid())
    assert main(["compare", *arguments]) == 2
    assert f"{other}, for as long as was waited" in capsys.readouterr().err


def test_cases_whose_kernels_are_the_same_are_not_measured(
    answered: Callable[[Play], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    measured, compiled_named = set(), list[bool]()

    def play(key: Key, i: int) -> trial.PairedSamples:
        measured.add(key.mode)
        return samples(10.0, 10.0 + 0.01 * (-1) ** i)

    def decode_is_the_same(machine: Machine, keys: list[Key], *_: Sources, named: bool) -> tuple[list[Key], list[Key]]:
        compiled_named.append(named)
        decode = [key for key in keys if key.mode == "decode" and not named]
        return [key for key in keys if key not in decode], decode

    monkeypatch.setattr(command, "_by_device_code", decode_is_the_same)
    answered(play)
    arguments = ["compare", "HEAD~1", "HEAD", "--gpu", "cpu", "--out", str(tmp_path / "results")]
    assert main(arguments) == 0
    said = capsys.readouterr().out
    found = json.loads(said.splitlines()[-1])
    assert "prefill-forward" in measured
    assert "decode" not in measured
    same = found["same_device_code"]
    assert same
    assert f"{len(same)} more cases, not measured: both versions launch the same instructions" in said
    stored = {one.key.name: one for one in result.read(tmp_path / "results")[0]}
    assert {(stored[name].key.mode, stored[name].verdict) for name in same} == {("decode", CompareVerdict.SAME)}
    assert {stored[name].command for name in same} == {"python -m benchmarks compare 'HEAD~1' HEAD --gpu cpu"}
    assert len(stored) == sum(found["verdicts"].values())
    measured.clear()
    answered(play)
    assert main([*arguments, "--cases", "decode"]) == 0
    assert measured == {"decode"}, "what is named is measured"
    assert compiled_named == [False, True], "kernels are compiled ahead, named or not"


def test_two_pairs_that_could_see_hardly_anything_say_so_in_few_digits() -> None:
    wild = dataclasses.replace(
        comparison_result(CompareVerdict.UNDECIDED), change=0.0, interval=(-0.1, 0.1), base_ms=1.0, head_ms=1.0
    )
    assert "could see more than 100%" in command.table([dataclasses.replace(wild, detectable=710481.5)])
    assert "could see 99.0%" in command.table([dataclasses.replace(wild, detectable=0.99)])


MODES = ("decode", "prefill-forward", "train-step", "part-window")


def test_which_cases_have_the_same_kernels_is_asked_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sides = [Sources(Side(ref, ref, False, ref), Path(ref), Path()) for ref in ("base", "head")]
    keys = [dataclasses.replace(Key.from_name(CASE), mode=mode) for mode in MODES]

    def of_cases(asked: Sequence[Sources], keys: Sequence[Key], gpu: str, deadline_s: float) -> list[list[DeviceCode]]:
        assert (gpu, deadline_s) == ("here", 9.0)
        unknown = DeviceCode(None, "unknown")
        own = {"decode": DeviceCode("same"), "train-step": unknown, "part-window": unknown}
        return [[own.get(key.mode, DeviceCode(side.side.ref)) for key in keys] for side in asked]

    monkeypatch.setattr(device_code, "of_cases", of_cases)
    monkeypatch.setattr(device_code, "visible_gpu", lambda: "here")
    here = machines.machine("cpu", None)
    on_gpu = dataclasses.replace(here, device="cuda")
    measured, same = command._by_device_code(on_gpu, keys, *sides, 9.0)
    assert [[key.mode for key in part] for part in (measured, same)] == [list(MODES[1:]), ["decode"]]
    said = capsys.readouterr().out
    assert "1 of 4 cases launch the same instructions on both sides: SAME, not measured (0 s)" in said
    assert "  not known of 2, each side of a case counted: unknown" in said
    assert "unknown" not in said.partition("unknown")[2], "a train step is not expected to be known"
    assert command._by_device_code(on_gpu, keys, *sides, 9.0, named=True) == (keys, []), "compiled ahead, and measured"
    assert "1 of 4 cases launch the same instructions on both sides: measured all the same" in capsys.readouterr().out
    monkeypatch.setenv("NSA_FORCE_ARCH", "sm80")
    assert command._by_device_code(on_gpu, keys, *sides, 9.0) == (keys, []), "another GPU's kernels run"
    assert command._by_device_code(here, keys, *sides, 9.0) == (keys, [])


def test_what_reproduces_a_result_is_in_it(answered: Callable[[Play], None], tmp_path: Path) -> None:
    answered(lambda key, i: samples(10.0, 10.0))
    run(tmp_path, "HEAD~1", "HEAD")
    ((found,), _) = result.read(tmp_path / "results")
    assert found.command == (f"python -m benchmarks compare 'HEAD~1' HEAD --gpu cpu --cases {CASE} --pairs 12")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere"], "'nowhere' must name a commit of "),
        (["--", "-x"], "'-x' must name a commit of "),
        (["HEAD", "--rounds", "2"], "pairs must be at least 3, fewer can show nothing; got 2"),
        (["HEAD", "--cases", "memory"], "--cases: 'memory' names no case of NSA that is timed"),
        (["HEAD", "--cases", "decode/*/sdpa-flash"], "names no case of NSA that is timed"),
        (["HEAD", "--cases", "prefil"], "--cases: no case here is named 'prefil'"),
    ],
)
def test_wrong_arguments_exit_with_2(
    arguments: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", "--gpu", "cpu", "--out", str(tmp_path), *arguments]) == 2
    assert said in capsys.readouterr().err


def test_an_interrupted_comparison_keeps_what_it_decided(
    answered: Callable[[Play], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def play(key: Key, i: int) -> trial.PairedSamples:
        if key.name == CASE and i == 4:
            raise KeyboardInterrupt
        return samples(10.0, 10.0 * 1.2 ** (-1) ** i if key.name == CASE else 10.0)

    answered(play)
    assert run(tmp_path, "HEAD~1", "HEAD", cases=f"{OTHER},{CASE}") == 130
    found, _ = result.read(tmp_path / "results")
    by_case = {one.key.name: one for one in found}
    assert by_case[OTHER].verdict is CompareVerdict.SAME
    assert (by_case[CASE].verdict, by_case[CASE].reason) == (
        CompareVerdict.UNDECIDED,
        "interrupted after 3 pairs of processes",
    )


def test_an_interrupted_comparison_leaves_no_folder(
    answered: Callable[[Play], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))

    def interrupt(key: Key, i: int) -> trial.PairedSamples:
        assert len(list(temporary.iterdir())) == 1
        raise KeyboardInterrupt

    answered(interrupt)
    assert run(tmp_path, "HEAD~1", "HEAD") == 130
    assert list(temporary.iterdir()) == []
