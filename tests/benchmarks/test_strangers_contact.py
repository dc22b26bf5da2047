"""The machines that people have, from first contact to merge: each board under its own name, all the way."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest

from benchmarks import runner
from benchmarks.ab import result
from benchmarks.cases.outcome import CaseOutcome
from benchmarks.contact import received
from benchmarks.history import accepted, reservations, run_file
from benchmarks.runner import Measurement
from tests.benchmarks.stranger import Stranger, last_line
from tests.benchmarks.synthetic import FINGERPRINT, key
from tests.fake_nvml.boards import ALONE, BOARDS, OnGpu

STRANGERS = (
    "a100-80gb-sxm", "a100-80gb-pcie", "a100-80gb-pcie-capped-200w", "a100-40gb-sxm", "a100-40gb-pcie",
    "a100-80gb-sxm-mig-3g-40gb", "3090", "gpu-geforce-rtx-5090",
)  # fmt: skip
CASE = "prefill-forward/8x2x64/b1/s512/float32/nsa"


@pytest.fixture(scope="module")
def measured() -> Measurement:
    """One case of this CPU, as every case of every board has it; what a busy host does to it is left out."""
    (found,) = runner.run([key()], "cpu", runner.QUICK, FINGERPRINT, lambda _: "c")
    assert found.record.outcome is CaseOutcome.PASSED
    return Measurement(dataclasses.replace(found.record, other_load=0.0, unmet=None))


@pytest.fixture
def stranger(
    request: pytest.FixtureRequest, measured: Measurement, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Stranger:
    name: str = getattr(request, "param", "3090")
    made = Stranger(name, measured, tmp_path, monkeypatch)
    made.is_now(BOARDS[name].telling(processes=ALONE))
    return made


@pytest.mark.parametrize("stranger", STRANGERS, indirect=True, ids=STRANGERS)
def test_from_first_contact_to_merge(stranger: Stranger, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = stranger.name
    assert stranger.types("first-contact") == 0
    said = capsys.readouterr().out
    assert ("not listed" in said) is name.startswith("gpu-")
    assert f"accept -- --first --gpu {name} " in said
    told = last_line(said)
    assert told["complete"]
    assert told["steps"] == dict.fromkeys(("laws", "incidents", "bench", "calibrate"), 0)

    assert stranger.types("accept", "--first", "--gpu", name, "--reason", "first contact") == 0
    said = capsys.readouterr()
    levels = accepted.read(stranger.results)[0]
    assert {one.machine for one in levels} == {name}
    assert len(levels) == len(last_line(said.out)["accepted"]) > 5

    assert stranger.types("compare", "old", "new", "--gpu", name, "--cases", CASE) == 1
    said = capsys.readouterr()
    assert "thresholds: the defaults" not in said.out  # the calibration of this very board
    assert last_line(said.out)["verdicts"] == {"SLOWER": 1}
    (verdict,) = result.read(stranger.results)[0]
    assert verdict.fingerprint.machine == name

    elsewhere = tmp_path / "elsewhere"
    merges = []
    for _ in range(2):
        assert stranger.types("bundle", "merge", told["bundle"], out=elsewhere) == 0
        merges.append(last_line(capsys.readouterr().out))
    assert [one["new_lines"] > 0 for one in merges] == [True, False]
    assert [one["sha256"] for one in merges] == [told["sha256"]] * 2
    assert stranger.types("merge", str(stranger.results), out=elsewhere) == 0
    assert [one.fingerprint.machine for one in result.read(elsewhere)[0]] == [name]
    records, damaged = run_file.read_all(elsewhere)
    assert damaged == []
    assert {record.fingerprint.machine for record in records} == {name}
    assert records == run_file.read_all(stranger.results)[0]
    marks = {mark for one in records for mark in reservations.with_device(one, one.fingerprint)}
    assert ("the GPU draws a screen" in marks) is (name == "3090")


def test_a_foreign_process_is_refused_at_first_contact_and_the_same_command_goes_on_later(
    stranger: Stranger, capsys: pytest.CaptureFixture[str]
) -> None:
    board = BOARDS["3090"]
    stranger.is_now(board.telling(processes=(OnGpu(),)), os.getppid())
    assert stranger.types("first-contact") == 2
    told = last_line(said := capsys.readouterr().out)
    assert "REFUSED  other work: 1 other process computes on the GPU" in said
    assert "responsible: the machine" in said
    assert (told["complete"], told["steps"]) == (False, {})
    with received.opened(Path(told["bundle"])) as found:
        assert [entry.name for entry in found.manifest.files] == ["preflight.json"]
    stranger.is_now(board.telling(processes=ALONE))
    assert stranger.types("first-contact") == 0
    assert last_line(capsys.readouterr().out)["complete"]


def test_the_bench_of_a_hot_card_waits_and_says_so_in_every_record_that_it_touches(
    stranger: Stranger, capsys: pytest.CaptureFixture[str]
) -> None:
    stranger.is_now(BOARDS["3090"], os.getppid())  # hot, and another process computes for a while
    assert stranger.types("run", "--quick", "--cases", "part-*", "--anchors", "none") == 0
    said = capsys.readouterr().out
    assert "waited" in said
    assert "to cool from" in said
    first, *rest = (one.gpu_conditions for one in run_file.read_all(stranger.results)[0])
    assert first
    assert rest
    assert not any(rest), "what was waited for before the first case says nothing of the others"
