"""The command line: what it runs, what it refuses and with which exit code, and its last line."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import runner, worker
from benchmarks.__main__ import main
from benchmarks.cases.outcome import CaseOutcome
from benchmarks.commands.options import chosen
from benchmarks.history import run_file, samples
from benchmarks.history.samples import SampleSummary
from benchmarks.runner import Measurement
from benchmarks.workloads import attention
from harness import machines
from harness.machines import Gpu
from tests.benchmarks.synthetic import failed, key, passed


def run(*arguments: str) -> int:
    return main(["run", *arguments])


def test_measures_writes_records_and_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cases = "prefill-forward/*/s512/float32/nsa,prefill-forward/*/s512/float32/sdpa-flash"
    assert run("--quick", "--gpu", "cpu", "--cases", cases, "--out", str(tmp_path)) == 0
    *_, page_line, last = capsys.readouterr().out.splitlines()
    summary = json.loads(last)
    assert summary["outcomes"] == {"PASSED": 2}
    assert page_line == f"The page: {summary['page']}"
    assert Path(summary["page"]).is_file()
    found, damaged = run_file.read_all(tmp_path)
    assert [record.key.implementation for record in found] == ["sdpa-flash", "nsa"]
    assert damaged == []
    assert found[1].command.endswith("--cases prefill-forward/8x2x64/b1/s512/float32/nsa")
    raw = {one.name: SampleSummary.of(one.samples_ms).count for one in samples.read_raw(Path(summary["records"]))}
    assert raw == {record.key.name: record.samples and record.samples.count for record in found}


def test_a_wrong_result_fails_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*arguments: object, **options: object) -> None:
        raise RuntimeError("boom")

    monkeypatch.setattr(attention, "nsa_attention", broken)
    monkeypatch.setattr(worker, "run", runner.run)  # in this process, where it is broken
    assert run("--quick", "--gpu", "cpu", "--cases", "prefill-forward/*/s512/float32/nsa", "--out", str(tmp_path)) == 1
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert summary["faults"] == ["prefill-forward/8x2x64/b1/s512/float32/nsa"]


@pytest.mark.parametrize("refused", [CaseOutcome.UNSUPPORTED, CaseOutcome.NOT_PRESENT, CaseOutcome.OUT_OF_MEMORY])
def test_a_run_without_any_figure_of_nsa_is_not_green(
    refused: CaseOutcome, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [failed(key(), refused, "no kernel"), passed(key(implementation="sdpa-flash"))]
    monkeypatch.setattr(worker, "run", lambda *_, **__: map(Measurement, found))
    assert run("--quick", "--gpu", "cpu", "--out", str(tmp_path)) == 2
    said = capsys.readouterr()
    assert said.err == "python -m benchmarks: NSA was measured on no case; the page says why\n"
    assert json.loads(said.out.splitlines()[-1])["outcomes"] == {refused.value: 1, "PASSED": 1}
    found.append(passed(key("decode")))
    assert run("--quick", "--gpu", "cpu", "--out", str(tmp_path)) == 0
    del found[::2]
    assert run("--quick", "--gpu", "cpu", "--out", str(tmp_path)) == 0  # baselines alone were asked for


@pytest.mark.parametrize("wanted", ["a100", "3090", "4090", "h100", "h200", "b200"])
def test_refuses_another_machine(
    wanted: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machines, "visible_gpu", lambda: Gpu("NVIDIA L4", (8, 9)))
    assert run("--require", wanted) == 2
    said = capsys.readouterr().err
    assert said.startswith("python -m benchmarks: this session needs an NVIDIA ")
    assert said.endswith("; found: NVIDIA L4\n")


def test_a_case_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--gpu", "cpu", "--cases", "decode,prefil") == 2
    assert "--cases: no case here is named 'prefil'; modes: prefill-forward, " in capsys.readouterr().err


def test_the_command_of_a_gpu_that_is_not_listed_is_valid(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machines, "visible_gpu", lambda: Gpu("NVIDIA L4", (8, 9)))
    assert run("--gpu", "gpu", "--list") == 0
    assert capsys.readouterr().out


def test_a_case_that_is_not_quick_is_told_from_a_wrong_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--gpu", "cpu", "--quick", "--cases", "memory") == 2
    said = capsys.readouterr().err
    assert said == ("python -m benchmarks: --cases: 'memory' is not in the quick suite; leave out --quick to run it\n")
    assert run("--gpu", "cpu", "--quick", "--cases", "prefil") == 2
    assert "memory" not in capsys.readouterr().err


@pytest.mark.parametrize("command", [["run", "--gpu", "cpu"], ["report"]], ids=lambda command: command[0])
@pytest.mark.parametrize("blocked", ["results", "results/report"])
def test_refuses_an_out_that_cannot_be_written_before_measuring(
    command: list[str],
    blocked: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(worker, "run", lambda *_, **__: pytest.fail("measured"))
    file = tmp_path / blocked
    file.parent.mkdir(exist_ok=True)
    file.touch()
    assert main([*command, "--out", str(tmp_path / "results")]) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith(f"python -m benchmarks: --out: cannot write in {file}")


def test_pages_on_a_full_disk_are_one_message_and_the_old_ones_stay(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["report", "--out", str(tmp_path)]) == 0
    before = {path.name: path.read_bytes() for path in (tmp_path / "report").iterdir()}
    capsys.readouterr()

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # as a failed write raises it: it does not say where

    monkeypatch.setattr(os, "replace", full)
    assert main(["report", "--out", str(tmp_path)]) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith(
        f"python -m benchmarks: no room for {tmp_path / 'report'}: No space left on device. Make room"
    )
    assert {path.name: path.read_bytes() for path in (tmp_path / "report").iterdir()} == before


@pytest.mark.parametrize("done", [0, 1])
def test_an_interrupted_run_keeps_what_it_finished(
    done: int, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> Iterator[Measurement]:
        yield from [Measurement(passed(key()))] * done
        raise KeyboardInterrupt

    monkeypatch.setattr(worker, "run", interrupted)
    assert run("--quick", "--gpu", "cpu", "--out", str(tmp_path)) == 130
    (said,) = capsys.readouterr().err.splitlines()
    (path,) = (tmp_path / "runs" / "cpu").iterdir()
    assert f"interrupted; {done} of " in said
    assert said.endswith(str(path))
    assert [found.latency_ms for found in run_file.read_all(tmp_path)[0]] == [passed(key()).latency_ms] * done
    assert (tmp_path / "report" / "index.html").is_file() == bool(done)


def test_an_unknown_machine_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        run("--gpu", "v100")
    assert caught.value.code == 2
    assert "--gpu" in capsys.readouterr().err


def test_lists_without_measuring(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--gpu", "cpu", "--cases", "memory", "--list") == 0
    names = capsys.readouterr().out.splitlines()
    assert "memory/8x2x64/b1/s32768/float32/nsa" in names
    assert all(name.startswith("memory/") for name in names)


def test_memory_runs_only_when_named() -> None:
    keys = [key("memory"), key("decode")]
    assert chosen(keys, None) == [key("decode")]
    assert chosen(keys, ["memory"]) == [key("memory")]
    assert chosen(keys, ["decode/*", "memory"]) == keys
