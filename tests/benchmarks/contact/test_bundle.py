"""The bundle: what it is made of, that it travels, and what is not packed."""

from __future__ import annotations

import dataclasses
import json
import tarfile
from pathlib import Path

import pytest

from benchmarks.__main__ import main
from benchmarks.ab import calibration
from benchmarks.contact import bundle, received
from benchmarks.contact.bundle import BundleError
from tests.benchmarks.contact.bundles import LAW_NAME, WHERE
from tests.benchmarks.full_results import run_of, write_incidents
from tests.benchmarks.stored import everything


def test_arrives_as_it_was_sent(packed: Path, tmp_path: Path) -> None:
    with received.opened(packed) as found:
        assert found.manifest.complete
        assert sorted(Path(entry.name).parts[0] for entry in found.manifest.files) == [
            "calibration",
            "laws",
            "logs",
            "regression",
            "runs",
        ]
        assert found.records == 2
        elsewhere = tmp_path / "elsewhere"
        assert received.merge_into(found, elsewhere).new_lines == 2
        before = {path: path.read_bytes() for path in elsewhere.rglob("*.js*")}
        assert received.merge_into(found, elsewhere).new_lines == 0
        assert {path: path.read_bytes() for path in elsewhere.rglob("*.js*")} == before
    assert not found.folder.exists()
    (record,) = everything(elsewhere)
    assert record.fingerprint == WHERE
    assert calibration.load(elsewhere, "cpu") is not None


def test_equal_contents_are_one_bundle(folder: Path, packed: Path, tmp_path: Path) -> None:
    bundle.write(folder, WHERE, tmp_path / "two.tar.gz", complete=True)
    assert (tmp_path / "two.tar.gz").read_bytes() == packed.read_bytes()


def test_holds_neither_owner_nor_time(packed: Path) -> None:
    with tarfile.open(packed) as tar:
        assert {(m.uid, m.gid, m.uname, m.gname, m.mtime) for m in tar} == {(0, 0, "", "", 0)}


def test_a_line_that_a_crash_has_torn_is_left_out_and_named(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run,) = folder.glob("runs/*/*")
    whole = run.read_bytes()
    run.write_bytes(whole + whole.splitlines()[-1][:40])
    incident = folder / "regression" / "cpu" / "20260104T000000Z-0123456789.jsonl"
    incident.write_text('{"incident": "tie-')
    bundle.write(folder, WHERE, tmp_path / "two.tar.gz", complete=True)
    said = capsys.readouterr().out
    assert f"note: {run}:3 is damaged and was left out" in said
    assert f"note: {incident}:1 is damaged and was left out" in said
    with received.opened(tmp_path / "two.tar.gz") as found:
        assert found.records == 2


def test_a_link_in_the_folder_is_not_packed(folder: Path, tmp_path: Path) -> None:
    (folder / "logs" / "other.log").symlink_to("/etc/hostname")
    with pytest.raises(BundleError, match="is no plain file"):
        bundle.write(folder, WHERE, tmp_path / "two.tar.gz", complete=True)


def test_incidents_travel_too(folder: Path, tmp_path: Path) -> None:
    where = run_of(6)
    for path in (
        *folder.glob("runs/*/*"),
        *folder.glob("calibration/*"),
        *folder.glob("regression/*/*"),
        folder / LAW_NAME,
    ):
        path.unlink()
    write_incidents(folder, 6)
    bundle.write(folder, where, tmp_path / "two.tar.gz", complete=False)
    with received.opened(tmp_path / "two.tar.gz") as found:
        assert found.records == 8
    (lines,) = folder.glob("regression/*/*.jsonl")
    lines.write_text(lines.read_text().replace('"h200"', '"a100"', 1))
    bundle.write(folder, where, tmp_path / "one of another.tar.gz", complete=False)
    with received.opened(tmp_path / "one of another.tar.gz") as found:
        assert found.records == 7
    bundle.write(folder, dataclasses.replace(where, machine="a100"), tmp_path / "three.tar.gz", complete=False)
    with pytest.raises(BundleError, match="is of the machine 'h200'"), received.opened(tmp_path / "three.tar.gz"):
        pass


@pytest.mark.parametrize(
    ("complete", "smoke", "state"),
    [
        (True, False, "complete"),
        (False, False, "NOT complete: a step was red or did not run"),
        (True, True, "smoke, complete as such: the least of every step is green, and no baseline comes of it"),
        (False, True, "smoke, NOT complete: a step was red or did not run"),
    ],
)
def test_a_receiver_is_told_what_it_is(
    complete: bool, smoke: bool, state: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle.write(folder, WHERE, tmp_path / "two.tar.gz", complete=complete, smoke=smoke)
    assert main(["bundle", "verify", str(tmp_path / "two.tar.gz")]) == 0
    first, *_, last = capsys.readouterr().out.splitlines()
    assert first.endswith(f": {state}")
    assert (json.loads(last)["complete"], json.loads(last)["smoke"]) == (complete, smoke)
