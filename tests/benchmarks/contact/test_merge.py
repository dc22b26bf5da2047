"""Merging a bundle into records that are there: a conflict is named, the better calibration is kept."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from benchmarks.__main__ import main
from benchmarks.ab import calibration
from benchmarks.contact import received
from benchmarks.contact.bundle import BundleError
from benchmarks.history import run_file
from tests.benchmarks.contact.bundles import LAW, LAW_NAME, WHERE


def test_a_conflict_is_named_and_nothing_is_merged(packed: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / "laws").mkdir(parents=True)
    (elsewhere / LAW_NAME).write_text(json.dumps({**LAW, "failed": 1}))
    with received.opened(packed) as found:
        with pytest.raises(BundleError, match=r"laws/.* is there with another content.*Nothing was merged"):
            received.merge_into(found, elsewhere)
        assert run_file.read_all(elsewhere) == ([], [])
        (elsewhere / LAW_NAME).unlink()
        received.merge_into(found, elsewhere)
    ours = calibration.load(elsewhere, "cpu")
    assert ours is not None
    newer = dataclasses.replace(WHERE, utc="2027-01-01T00:00:00.000Z")
    calibration.save(elsewhere, dataclasses.replace(ours, fingerprint=newer))
    with received.opened(packed) as found:
        received.merge_into(found, elsewhere)
    kept = calibration.load(elsewhere, "cpu")
    assert kept is not None
    assert kept.fingerprint == newer


def test_a_calibration_of_another_device_is_left_out_and_the_records_come_along(
    packed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    elsewhere = tmp_path / "elsewhere"
    with received.opened(packed) as found:
        ours = calibration.load(found.folder, "cpu")
    assert ours is not None
    other = dataclasses.replace(WHERE, device="Another CPU", utc="2025-01-01T00:00:00.000Z")
    calibration.save(elsewhere, dataclasses.replace(ours, fingerprint=other))
    assert main(["bundle", "merge", str(packed), "--out", str(elsewhere)]) == 0
    out = capsys.readouterr().out
    assert "note: calibration/cpu.json is there for 'Another CPU', and the bundle's is for 'A CPU'" in out
    assert json.loads(out.splitlines()[-1])["new_lines"] == 2
    kept = calibration.load(elsewhere, "cpu")
    assert kept is not None
    assert kept.fingerprint == other


def test_a_calibration_of_more_pairs_is_kept(packed: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    with received.opened(packed) as found:
        received.merge_into(found, elsewhere)
    ours = calibration.load(elsewhere, "cpu")
    assert ours is not None
    older = dataclasses.replace(ours.fingerprint, utc="2025-01-01T00:00:00.000Z")
    for pairs, kept_pairs in ((ours.pairs + 30, ours.pairs + 30), (ours.pairs - 30, ours.pairs)):
        calibration.save(elsewhere, dataclasses.replace(ours, fingerprint=older, pairs=pairs))
        with received.opened(packed) as found:
            received.merge_into(found, elsewhere)
        kept = calibration.load(elsewhere, "cpu")
        assert kept is not None
        assert kept.pairs == kept_pairs
