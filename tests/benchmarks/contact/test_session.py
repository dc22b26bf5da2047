"""First contact: its order, its resumption, what ends it; and once for real, on this CPU."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.__main__ import main
from benchmarks.contact import preflight, received, session, steps
from benchmarks.contact.bundle import BundleError
from benchmarks.contact.cause import Cause
from benchmarks.contact.steps import ContactStep
from benchmarks.history.store import Store
from harness import machines, repository
from harness.interrupt import INTERRUPTED
from harness.machines import Gpu
from tests.benchmarks.contact.test_preflight import facts
from tests.benchmarks.synthetic import FINGERPRINT

PLAN = [ContactStep(name, (name,), f"{name}.done") for name in ("incidents", "bench", "calibrate")]


class Scripted:
    """Runs no process: notes the steps, and ends each as it is told."""

    def __init__(self, folder: Path, **codes: int) -> None:
        self.folder, self.codes = folder, codes
        self.ran: list[str] = []

    def __call__(self, words: Sequence[str], log: Path) -> int:
        (name,) = words
        self.ran.append(name)
        log.write_text("CUDA error: no kernel image is available\n" if self.codes.get(name) == 1 else "fine\n")
        if not self.codes.get(name):
            (self.folder / f"{name}.done").touch()
        return self.codes.get(name, 0)


def test_goes_on_where_it_was_interrupted(tmp_path: Path) -> None:
    first = Scripted(tmp_path, bench=INTERRUPTED)
    found = session.run(tmp_path, PLAN, FINGERPRINT, first)
    assert first.ran == ["incidents", "bench"]
    assert found[-1].code == INTERRUPTED
    assert found[-1].diagnosis is None
    second = Scripted(tmp_path)
    found = session.run(tmp_path, PLAN, FINGERPRINT, second)
    assert second.ran == ["bench", "calibrate"]
    assert session.complete(PLAN, found)
    assert Scripted(tmp_path).ran == []


def test_the_first_red_step_ends_it_and_is_repeated(tmp_path: Path) -> None:
    red = Scripted(tmp_path, incidents=1)
    found = session.run(tmp_path, PLAN, FINGERPRINT, red)
    assert red.ran == ["incidents"]
    assert found[0].diagnosis is not None
    assert found[0].diagnosis.cause is Cause.DRIVER
    assert not session.complete(PLAN, found)
    again = Scripted(tmp_path)
    assert session.complete(PLAN, session.run(tmp_path, PLAN, FINGERPRINT, again))
    assert again.ran == ["incidents", "bench", "calibrate"]


def test_a_step_whose_records_are_gone_is_not_done(tmp_path: Path) -> None:
    session.run(tmp_path, PLAN, FINGERPRINT, Scripted(tmp_path))
    (tmp_path / "bench.done").unlink()
    again = Scripted(tmp_path)
    session.run(tmp_path, PLAN, FINGERPRINT, again)
    assert again.ran == ["bench"]


def test_a_green_step_without_records_is_red(tmp_path: Path) -> None:
    found = session.run(tmp_path, PLAN, FINGERPRINT, lambda words, log: log.write_text(""))
    assert [(one.name, one.code) for one in found] == [("incidents", 1)]
    assert found[0].diagnosis is not None
    assert "left no incidents.done" in found[0].diagnosis.message


def test_a_torn_line_of_steps_is_a_step_that_was_not_run(tmp_path: Path) -> None:
    session.run(tmp_path, PLAN[:1], FINGERPRINT, Scripted(tmp_path))
    file = tmp_path / session.STEPS
    file.write_bytes(file.read_bytes()[:-20])
    again = Scripted(tmp_path)
    session.run(tmp_path, PLAN[:1], FINGERPRINT, again)
    assert again.ran == ["incidents"]


@pytest.mark.parametrize("field", ["device", "driver", "torch", "triton", "nsa_sha256", "benchmarks_sha256"])
def test_what_decides_the_records_names_the_folder(field: str, tmp_path: Path) -> None:
    changed = dataclasses.replace(FINGERPRINT, **{field: "other"})
    folders = {
        session.folder_of(tmp_path, one, smoke=smoke) for one in (FINGERPRINT, changed) for smoke in (False, True)
    }
    assert len(folders) == 4
    later = dataclasses.replace(FINGERPRINT, utc="2027-01-02T03:04:05Z", load=3.0)
    assert session.folder_of(tmp_path, later, smoke=False) in folders


@pytest.mark.parametrize(
    "name", ["NVIDIA A100-SXM4-80GB", "NVIDIA A100-PCIE-40GB", "NVIDIA GeForce RTX 3090", "NVIDIA GeForce RTX 5090"]
)
def test_the_steps_of_a_gpu(name: str, tmp_path: Path) -> None:
    capability = {"A100": (8, 0), "3090": (8, 6), "5090": (12, 0)}[name.split("-")[0].split()[-1]]
    machine = machines.recognise(Gpu(name, capability))
    plan = steps.plan(machine, tmp_path, smoke=False)
    assert [step.name for step in plan] == ["laws", "incidents", "bench", "calibrate"]
    assert plan[1].words[-4:-2] == ("--device", "cuda")
    for step in plan[2:]:
        assert step.words[step.words.index("--gpu") + 1] == machine.id
        assert "--quick" in step.words
    assert [step.name for step in steps.plan(machine, tmp_path, smoke=True)] == ["laws", "incidents", "bench"]


def test_a_busy_machine_sends_its_preflight_and_measures_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "read", lambda *_, **__: facts(other_processes=1))
    monkeypatch.setattr(session, "run", None)
    assert main(["first-contact", "--gpu", "cpu", "--out", str(tmp_path)]) == 2
    out = capsys.readouterr().out
    assert "responsible: the machine\nseen: other work: 1 other process computes on the GPU" in out
    with received.opened(Path(json.loads(out.splitlines()[-1])["bundle"])) as bundle:
        assert not bundle.manifest.complete
        assert [entry.name for entry in bundle.manifest.files] == [session.PREFLIGHT]
        assert received.merge_into(bundle, tmp_path / "elsewhere").new_lines == 0


def test_a_bundle_that_a_receiver_refuses_replaces_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(preflight, "read", lambda *_, **__: facts(other_processes=1))
    words = ["first-contact", "--gpu", "cpu", "--out", str(tmp_path)]
    assert main(words) == 2
    (packed,) = (tmp_path / session.FOLDER).glob("*.tar.gz")
    before = packed.read_bytes()

    def refuse(path: Path) -> None:
        assert path != packed
        raise BundleError(f"{path}: refused")

    monkeypatch.setattr(received, "opened", refuse)
    main(words)
    assert "refused" in capsys.readouterr().err
    assert packed.read_bytes() == before
    assert [path.name for path in packed.parent.iterdir() if path.is_file()] == [packed.name]


def test_the_least_of_it_on_this_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Real processes: it measures, packs, is verified and merged elsewhere; merged again, it changes nothing."""
    command = [sys.executable, "-m", "benchmarks", "first-contact", "--smoke", "--gpu", "cpu", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=repository.ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["steps"] == {"laws": 0, "incidents": 0, "bench": 0}
    assert told["complete"]
    assert told["smoke"]
    assert "\nsmoke, complete as such: the least of every step is green, and no baseline comes of it\n" in done.stdout
    assert "NOT complete" not in done.stdout
    assert "accept -- --first" not in done.stdout
    elsewhere = tmp_path / "elsewhere"
    for new, known in ((3, 0), (0, 3)):
        assert main(["bundle", "merge", told["bundle"], "--out", str(elsewhere)]) == 0
        merged = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert (merged["new_lines"], merged["known_lines"], merged["sha256"]) == (new, known, told["sha256"])
    assert [record.key.implementation for record in Store(elsewhere).records("cpu")] == ["nsa"]
    assert str(tmp_path) not in "".join(path.read_text() for path in elsewhere.glob("r*/cpu/*.jsonl"))
