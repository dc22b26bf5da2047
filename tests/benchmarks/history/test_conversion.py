"""Records of versions 1 and 2 are read, converted without changing a figure, and merged with today's."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from benchmarks.__main__ import main
from benchmarks.history import conversion, merge, run_file, samples
from benchmarks.history.records import Record
from tests.benchmarks.synthetic import FINGERPRINT, key, passed

SAMPLES_MS = [3.0, 1.0, 2.0]
CLOCKS = {
    "sm_mhz": [1980, 1200, 1980],
    "power_w": [640.0, 600.0, 650.0],
    "temperature_c": [60, 61, 62],
    "throttled_samples": [1],
    "throttle_reasons": ["power_cap"],
}
ADDED_BY_2 = {
    "launch", "cudnn", "flash_attn", "image", "gpu_clocks", "ceilings", "interval_ms", "end_to_end_ms", "queued_ahead",
    "compile_s", "unmet", "other_load", "clocks", "flops", "bytes_moved",
}  # fmt: skip


def record(length: int = 64) -> Record:
    found = dataclasses.replace(passed(key(length=length), 2.0), command=f"run --cases {key(length=length).name}")
    return dataclasses.replace(found, tokens_per_s=1e3 / 3)


def old_line(version: int, length: int = 64) -> str:
    """The record as version 1 or 2 wrote it."""
    whole: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(record(length))))
    del whole["samples"]
    whole["gate"] = whole.pop("correctness")
    whole["key"]["kv_heads"] = whole["key"].pop("num_kv_heads")
    whole["fingerprint"]["ceilings"] = whole["fingerprint"].pop("measured_peak")
    whole |= {"samples_ms": SAMPLES_MS, "clocks": CLOCKS, "schema_version": version}
    if version == 1:
        whole = {name: value for name, value in whole.items() if name not in ADDED_BY_2}
        for part in ("key", "fingerprint"):
            whole[part] = {name: value for name, value in whole[part].items() if name not in ADDED_BY_2}
    return json.dumps(whole)


def old_file(results: Path, *lines: str) -> Path:
    path = results / "runs" / "cpu" / "20260102T030405Z-0123456789.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


@pytest.mark.parametrize("version", [1, 2])
def test_a_file_of_an_earlier_version_is_read_and_converted(
    version: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = old_file(tmp_path, old_line(version), old_line(version, 128))
    before, damaged = run_file.read_all(tmp_path)
    assert damaged == []
    assert before[0].samples is not None
    assert (before[0].samples.count, before[0].samples.min_ms, before[0].samples.max_ms) == (3, 1.0, 3.0)
    if version == 2:
        assert before[0].clocks is not None
        assert (before[0].clocks.sm_mhz_min, before[0].clocks.throttled) == (1200, {"power_cap": 1})
    assert main(["convert", "--out", str(tmp_path)]) == 0
    assert json.loads(capsys.readouterr().out)["records"] == 2
    rounded = [dataclasses.replace(one, tokens_per_s=333.3333) for one in before]
    assert run_file.read_all(tmp_path) == (rounded, [])
    kept = list(samples.read_raw(path))
    assert [raw.name for raw in kept] == [one.key.name for one in before]
    assert list(kept[0].samples_ms) == SAMPLES_MS
    assert (kept[0].clocks is None) == (version == 1)
    once = path.read_bytes()
    assert main(["convert", "--out", str(tmp_path)]) == 0
    assert json.loads(capsys.readouterr().out)["files"] == 0
    assert path.read_bytes() == once


def test_damaged_lines_are_named_and_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = old_file(tmp_path, old_line(2), old_line(2)[:90], old_line(2, 128))
    assert main(["convert", "--out", str(tmp_path)]) == 1
    assert f"{path}:4: " in capsys.readouterr().err
    found, (damaged,) = run_file.read_all(tmp_path)
    assert [one.key.num_keys for one in found] == [64, 128]
    assert old_line(2)[:90] in path.read_text()
    assert damaged.path == path


@pytest.mark.parametrize("lines", [(), ("torn",), (old_line(2)[:90],)])
def test_a_file_without_a_record_is_left_alone(lines: tuple[str, ...], tmp_path: Path) -> None:
    path = old_file(tmp_path, *lines)
    before = path.read_bytes()
    assert main(["convert", "--out", str(tmp_path)]) == 0
    assert path.read_bytes() == before


def test_lines_of_the_current_format_behind_old_ones_stay(tmp_path: Path) -> None:
    path = old_file(tmp_path, old_line(2))
    run_file.append(path, record(128))
    assert main(["convert", "--out", str(tmp_path)]) == 0
    found, damaged = run_file.read_all(tmp_path)
    assert damaged == []
    assert [one.key.num_keys for one in found] == [64, 128]


def test_a_link_is_not_converted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    elsewhere = old_file(tmp_path / "elsewhere", old_line(2))
    results = tmp_path / "results"
    (results / "runs").mkdir(parents=True)
    (results / "runs" / "cpu").symlink_to(elsewhere.parent)
    before = elsewhere.read_bytes()
    assert main(["convert", "--out", str(results)]) == 1
    assert "is no plain file" in capsys.readouterr().err
    assert elsewhere.read_bytes() == before
    assert list(elsewhere.parent.iterdir()) == [elsewhere]


def test_a_folder_that_is_not_there_or_cannot_be_written_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["convert", "--out", str(tmp_path / "typo")]) == 2
    assert "typo" in capsys.readouterr().err
    path = old_file(tmp_path, old_line(2))

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(os, "replace", full)
    before = path.read_bytes()
    assert main(["convert", "--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith(f"python -m benchmarks: no room for {path}: No space left on device.")
    assert path.read_bytes() == before


def test_samples_of_an_old_run_are_said_to_stand_in_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = old_file(tmp_path, old_line(2))
    assert main(["samples", str(path)]) == 2
    assert "convert" in capsys.readouterr().err


EDITS = [
    ("peak_mem_mib", "12", "record.peak_mem_mib must be float; got '12'"),
    ("samples_ms", [1.0, -1.0], "samples_ms must be finite and at least 0"),
    ("samples_ms", "1.0", "record.samples_ms must be"),
    ("samples_ms", [1.0], "clocks.sm_mhz must be beside each of the 1 samples; got 3"),
    ("command", None, "record.command must be str; got None"),
    ("colour", "red", "record has no field 'colour'"),
    ("schema_version", 99, "schema_version must be 1 or 2"),
    ("fingerprint", [], "record.fingerprint must be a JSON object"),
]


@pytest.mark.parametrize(("field", "value", "why"), EDITS, ids=[f"{field}={value!r:.12}" for field, value, _ in EDITS])
def test_an_edited_line_is_named(tmp_path: Path, field: str, value: Any, why: str) -> None:
    old_file(tmp_path, json.dumps(json.loads(old_line(2)) | {field: value}))
    found, (damaged,) = run_file.read_all(tmp_path)
    assert found == []
    assert why in damaged.why


@pytest.mark.parametrize("ours_is_old", [True, False])
@pytest.mark.parametrize("theirs_is_old", [True, False])
def test_old_and_new_files_merge(ours_is_old: bool, theirs_is_old: bool, tmp_path: Path) -> None:
    """One run, of which each side has a record that the other lacks."""
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    for results, old, lengths in ((ours, ours_is_old, (64, 128)), (theirs, theirs_is_old, (64, 256))):
        path = old_file(results, *(old_line(2, length) for length in lengths))
        if not old:
            conversion.convert(path)
    for new_lines in (1, 0):
        merged = merge.MergeResult()
        merge.merge(theirs, ours, merged)
        assert (merged.refused, merged.new_lines) == ([], new_lines)
    found, damaged = run_file.read_all(ours)
    assert damaged == []
    assert [one.key.num_keys for one in found] == [64, 128, 256]
    assert {one.fingerprint for one in found} == {FINGERPRINT}
