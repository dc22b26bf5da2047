"""An H200 in the place of an RTX 3090, on a GPU that is a fake: what is recorded, what is said, and that no time is."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import runner, worker
from benchmarks.__main__ import main
from benchmarks.cases.outcome import CaseOutcome
from benchmarks.commands import run as run_command
from benchmarks.history import merge, run_file
from benchmarks.history.records import Record
from benchmarks.history.run_file import DamagedLine
from benchmarks.history.store import Store
from benchmarks.peak_memory import MemoryNeed, OutOfMemory
from benchmarks.report.further_pages import ledger, proof
from benchmarks.report.links import Repository
from benchmarks.report.table import BAD, GOOD, Cell
from benchmarks.timing import memory
from benchmarks.timing.memory import PeakMemory
from harness import forced
from nsa.io import append_line
from regression import session
from tests.benchmarks.synthetic import FINGERPRINT, key, passed
from tests.benchmarks.test_peak_memory import CAPPED
from tests.fake_nvml import process
from tests.fake_nvml.boards import BOARDS

CASE = "prefill-forward/8x2x64/b1/s512/float32/nsa"
NEXT = "part-gated-sum/8x2x64/b1/s1024/float32/nsa"
MACHINE = "h200-forced-sm86-24gb"
AS_3090 = ("--force-arch", "sm86", "--memory-gb", "24")
WHERE = dataclasses.replace(FINGERPRINT, machine=MACHINE, device="NVIDIA H200")


@pytest.fixture
def h200(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU under the name of an H200; its allocator is not asked."""
    for name in ("NSA_FORCE_ARCH", "NSA_MEMORY_GB"):
        monkeypatch.setenv(name, "")  # what the command sets is taken back
    process.install(monkeypatch, BOARDS["h200"])
    monkeypatch.setattr(worker, "run", runner.run)

    def of_cuda(call: Any) -> PeakMemory:
        call()
        return PeakMemory(12.5, "cuda_allocator")

    monkeypatch.setattr(memory, "of_cuda", of_cuda)


def forced_run(results: Path, *options: str) -> int:
    return main(["run", "--quick", "--out", str(results), *AS_3090, *options])


@pytest.mark.usefixtures("h200")
def test_a_run_is_recorded_as_right_and_fitting_and_without_a_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert forced_run(tmp_path, "--cases", CASE) == 0
    (found,), damaged = run_file.read_all(tmp_path)
    assert damaged == []
    assert [folder.name for folder in (tmp_path / "runs").iterdir()] == [MACHINE]
    assert (found.fingerprint.machine, found.outcome, found.peak_mem_mib) == (MACHINE, CaseOutcome.PASSED, 12.5)
    assert found.fingerprint.measured_peak is None
    assert found.correctness is not None
    assert found.correctness.rows_compared is not None  # also on inputs that no call had seen
    assert (found.latency_ms, found.samples, found.tokens_per_s, found.compile_s) == (None,) * 4
    assert "run --gpu h200 --backend auto --force-arch sm86 --memory-gb 24 --quick" in found.command
    said = capsys.readouterr().out
    assert "forced to sm86, 24 GB: results and memory; nothing was timed" in said
    assert json.loads(said.splitlines()[-1])["machine"] == MACHINE


@pytest.mark.usefixtures("h200")
def test_no_page_has_it_but_that_of_what_ran_where(tmp_path: Path) -> None:
    assert forced_run(tmp_path, "--cases", CASE) == 0
    pages = {path.name: path.read_text() for path in (tmp_path / "report").glob("*.html")}
    assert [name for name, text in pages.items() if "h200" in text] == ["proof.html"]
    assert "bench 1 of 1 right at " in pages["proof.html"]
    assert Store(tmp_path).history(MACHINE) == []


@pytest.mark.usefixtures("h200")
def test_baselines_and_contenders_are_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert forced_run(tmp_path, "--list") == 0
    names = capsys.readouterr().out.splitlines()
    assert names
    assert all(name.endswith("/nsa") for name in names)
    for words in (("--contenders", "all"), ("--anchors", "HEAD~1")):
        assert forced_run(tmp_path, *words) == 2
        assert "--force-arch times nothing" in capsys.readouterr().err


@pytest.mark.usefixtures("h200")
@pytest.mark.parametrize(
    ("command", "variables"),
    [
        (["calibrate", "--quick"], {"NSA_FORCE_ARCH": "sm86"}),
        (["first-contact", "--smoke"], {"NSA_FORCE_ARCH": "sm80", "NSA_MEMORY_GB": "40"}),
    ],
    ids=["calibrate", "first-contact"],
)
def test_no_other_command_can_be_forced(
    command: list[str],
    variables: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1, 1))
    assert main([*command, "--out", str(tmp_path)]) == 2
    assert "this process is forced to --force-arch sm8" in capsys.readouterr().err


def test_a_cpu_is_not_forced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NSA_FORCE_ARCH", "")
    assert main(["run", "--gpu", "cpu", "--force-arch", "sm86", "--out", str(tmp_path)]) == 2
    assert list(tmp_path.iterdir()) == []


def test_a_time_is_refused_as_it_is_written_and_as_it_is_read(tmp_path: Path) -> None:
    timed = passed(key())
    with pytest.raises(ValueError, match=f"latency_ms must be None on {MACHINE}: it was forced"):
        dataclasses.replace(timed, fingerprint=WHERE)
    path = run_file.create(tmp_path / "theirs", WHERE, "c")
    run_file.append(tmp_path / "own.jsonl", timed)
    append_line(path, (tmp_path / "own.jsonl").read_text().splitlines()[1])  # a line that was edited by hand
    (damaged,) = run_file.read(path)
    assert isinstance(damaged, DamagedLine)
    assert "latency_ms must be None" in damaged.why
    merged = merge.MergeResult()
    merge.merge(tmp_path / "theirs", tmp_path / "ours", merged)
    assert (merged.new_lines, len(merged.refused)) == (0, 1)


def _record(length: int, outcome: CaseOutcome = CaseOutcome.PASSED, **figures: Any) -> Record:
    reason = None if outcome is CaseOutcome.PASSED else "why"
    return Record(key(length=length), outcome, reason, WHERE, "c", passed(key()).correctness, **figures)


def _proven(results: Path) -> dict[str, Cell]:
    found = proof.table(results, [], ledger.read(results)[0], [], Repository())
    return {row[0].text: row[found.head.index("on a newer GPU")] for row in found.rows}


def test_what_fits_what_does_not_and_what_is_wrong_are_told_apart(tmp_path: Path) -> None:
    path = run_file.create(tmp_path, WHERE)
    run_file.append(path, _record(64, peak_mem_mib=1.0))
    run_file.append(path, _record(128, CaseOutcome.OUT_OF_MEMORY, out_of_memory=OutOfMemory(1.0, 1.0, None)))
    cell = _proven(tmp_path)["NVIDIA GeForce RTX 3090"]
    assert (cell.text, cell.kind) == (
        "bench 1 of 2 right, 1 too large at 0123456, 2026-01-02, on h200 with 24 GB",
        GOOD,
    )
    run_file.append(path, _record(256, CaseOutcome.INCORRECT))
    found = _proven(tmp_path)
    cell = found["NVIDIA GeForce RTX 3090"]
    assert (cell.text, cell.kind) == (
        "bench 1 of 3 right, 1 too large, 1 with neither at 0123456, 2026-01-02, on h200 with 24 GB",
        BAD,
    )
    assert found["NVIDIA A100"].text == found["NVIDIA H200"].text == "–"


@pytest.mark.usefixtures("h200")
def test_running_out_under_the_cap_is_an_outcome_and_the_next_case_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    prepare, tried = runner.prepare, list[str]()

    def too_large_at_first(the_key: Any, device: str) -> Any:
        tried.append(the_key.name)
        if len(tried) == 1:
            raise torch.OutOfMemoryError(CAPPED.removeprefix("OutOfMemoryError: "))
        return prepare(the_key, device)

    def measure(keys: Any, device: str, plan: Any, where: Any, command: Any, **more: Any) -> Any:
        for one in runner.run(keys, device, plan, where, command, too_large_at_first, **more):
            yield worker._told(one, 1.0)

    monkeypatch.setattr(worker, "run", measure)
    assert forced_run(tmp_path, "--cases", f"{CASE},{NEXT}") == 0
    first, second = run_file.read_all(tmp_path)[0]
    assert (first.outcome, second.outcome) == (CaseOutcome.OUT_OF_MEMORY, CaseOutcome.PASSED)
    lacked = first.out_of_memory
    assert lacked is not None
    assert (lacked.asked_mib, lacked.free_mib) == (20480.0, pytest.approx((22.35 - 17.5) * 1024))
    capsys.readouterr()
    monkeypatch.setattr(run_command, "memory_mib", lambda device: (22.35 * 1024, 22.35 * 1024))
    tried.append("one")
    assert forced_run(tmp_path, "--cases", CASE) == 2  # nothing has a figure
    said = capsys.readouterr().out
    assert said.index(f"will not fit: {CASE}") < said.index("measurements ->")
    assert len(tried) == 3, "the case was tried although the same sources had run out"


@pytest.mark.usefixtures("h200")
def test_what_will_not_fit_under_the_cap_is_said_before_it_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The H200 has room for it."""
    free_and_total = (138 * 10**9, 141 * 10**9)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: free_and_total)
    monkeypatch.setattr(run_command, "memory_need", lambda the_key: MemoryNeed(1024.0, 29184.0, 1536.0))
    recognised = run_command.machines.recognise
    monkeypatch.setattr(
        run_command.machines, "recognise", lambda gpu: dataclasses.replace(recognised(gpu), device="cuda")
    )
    monkeypatch.setattr(worker, "run", lambda keys, *_, **__: iter(()))
    words = ["run", "--quick", "--out", str(tmp_path), "--force-arch", "sm86", "--cases", "part-gated-sum"]
    main([*words, "--memory-gb", "24"])
    said = capsys.readouterr().out
    assert ": not tried: it takes about 30.0 GiB, and the device has 22.4 GiB" in said
    assert said.index("will not fit: part-gated-sum/") < said.index("measurements ->")
    main([*words, "--memory-gb", "40"])
    assert "will not fit" not in capsys.readouterr().out


@pytest.mark.usefixtures("h200")
def test_incidents_are_recorded_under_that_name_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    asked = forced.enter("sm86", 24)
    found = session.find("auto", asked)
    assert found.fingerprint.machine == MACHINE
    with pytest.raises(ValueError, match="needs an NVIDIA GPU"):
        session.find("cpu", asked)
