"""What is read is what was written; what is no atlas is refused by name, and nothing is ever replaced."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from benchmarks.atlas import record, task_record
from benchmarks.atlas.task_record import TaskRecord, TaskResult, TaskScore
from tests.benchmarks.atlas import model
from tests.benchmarks.synthetic import FINGERPRINT


def test_a_record_comes_back_as_it_was(tmp_path: Path) -> None:
    written = model.atlas()
    path = record.write(tmp_path, written)
    assert path == tmp_path / "atlas" / f"h200-2026-11-20-{(FINGERPRINT.commit or 'nocommit')[:10]}.json"
    assert record.read(path) == written
    assert record.read_all(tmp_path) == ([written], [])


def test_no_file_is_replaced(tmp_path: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        paths = list(pool.map(lambda seed: record.write(tmp_path, model.atlas(seed=seed)), range(4)))
    assert len(set(paths)) == 4
    found, damaged = record.read_all(tmp_path)
    assert sorted(one.trained.seed for one in found) == [0, 1, 2, 3]
    assert not damaged
    assert not list((tmp_path / "atlas").glob(".*"))


def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = record.write(tmp_path, model.atlas())

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(record.os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        record.write(tmp_path, model.atlas(seed=1))
    assert list((tmp_path / "atlas").iterdir()) == [first]


def test_a_record_that_would_be_too_large_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "MAX_BYTES", 1000)
    with pytest.raises(ValueError, match="at most 1000 bytes"):
        record.write(tmp_path, model.atlas())
    assert not (tmp_path / "atlas").exists()


def _set(*path: Any, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(data: dict[str, Any]) -> None:
        place: Any = data
        for part in path[:-1]:
            place = place[part]
        place[path[-1]] = value

    return change


HEAD = ("lengths", 0, "heads", 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_set("schema", value=2), "schema must be 1"),
        (_set("more", value=1), "has no field 'more'"),
        (_set("lengths", value=[]), "there must be one"),
        (_set("trained", "tokens", value="many"), r"trained\.tokens must be int"),
        (_set("lengths", 0, "later_half_rows", value=False), "later_half_rows must be true"),
        (_set("lengths", 0, "seq_len", value=65536), "lengths must ascend"),
        (_set("lengths", 0, "layers_jaccard", value=[]), "must have 1 values"),
        (_set(*HEAD, "layer", value=1), "every kv head of every layer once"),
        (_set(*HEAD, "jaccard", value={"1": 0.5}), "jaccard must have 1, 2, 4, 16, 64"),
        (_set(*HEAD, "jaccard_free", "4", value="0.5"), "must hold finite numbers"),
        (_set(*HEAD, "jaccard", "4", value=1.2), "between 0 and 1"),
        (_set(*HEAD, "union", "2", value=40), "the union of 2 queries"),
        (_set(*HEAD, "union", "2", value=15), "the union of 2 queries"),
        (_set(*HEAD, "popularity", value=0.5), "popularity must be at least 1"),
        (_set(*HEAD, "gates", value=[0.5]), "gates must be three"),
        (_set(*HEAD, "distance", value=[[1, 0.5], [3, 0.5]]), "edges 1, 2, 4, 8"),
        (_set(*HEAD, "distance", value=[[1, 0.5], [2, 0.1]]), "add up to 1"),
        (_set(*HEAD, "distance", value=[[1]]), "pairs of an edge and a share"),
        (_set("fingerprint", "machine", value="../elsewhere"), "fingerprint.machine"),
    ],
)
def test_what_is_no_atlas_is_named_and_the_others_are_read(
    tmp_path: Path, change: Callable[[dict[str, Any]], None], message: str
) -> None:
    record.write(tmp_path, model.atlas())
    data = model.as_json(model.atlas())
    change(data)
    path = tmp_path / "atlas" / "foreign.json"
    path.write_text(json.dumps(data))
    with pytest.raises(ValueError, match=message):
        record.read(path)
    found, damaged = record.read_all(tmp_path)
    assert len(found) == len(damaged) == 1
    assert "foreign.json" in damaged[0]


@pytest.mark.parametrize("content", [b"", b"{", b"[" * 100_000, b"\xff\xfe", b"null", b'{"schema": NaN}'])
def test_bytes_that_are_no_record(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "some.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"some\.json"):
        record.read(path)


def test_a_file_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "large.json"
    with path.open("wb") as file:
        file.truncate(record.MAX_BYTES + 1)
    with pytest.raises(ValueError, match="at most 1048576 bytes"):
        record.read(path)


def test_a_band_is_of_layers_and_heads() -> None:
    found = record.band(model.curves(8192), lambda head: head.jaccard["1"])
    assert (found.p10, found.median, found.p90) == pytest.approx((0.415, 0.475, 0.535))


def test_curves_are_found_by_length() -> None:
    assert model.atlas().at(32768).seq_len == 32768
    with pytest.raises(ValueError, match="8192, 32768"):
        model.atlas().at(100)


def asked(nsa: int, dense: int) -> TaskResult:
    scores = (TaskScore(right, 400, 0.1) for right in (nsa, dense))
    return TaskResult("needle", 0, 32, 8192, 2000, 10**8, 0, *scores)


@pytest.mark.parametrize(
    ("nsa", "dense", "verdict"),
    [
        (60, 199, "no evidence: both below 50%"),
        (199, 199, "no evidence: both below 50%"),
        (398, 399, "no difference seen: the intervals overlap"),
        (150, 390, "NSA is right less often"),
        (390, 150, "NSA is right more often"),
    ],
)
def test_tasks_say_what_they_are_evidence_of(nsa: int, dense: int, verdict: str) -> None:
    assert asked(nsa, dense).verdict == verdict


def test_the_interval_holds_the_share_and_narrows() -> None:
    few, many = TaskScore(8, 10, 0.0), TaskScore(800, 1000, 0.0)
    for score in (few, many):
        low, high = score.interval
        assert 0 < low < score.share < high < 1
    assert few.interval[0] < many.interval[0]
    assert few.interval[1] > many.interval[1]
    assert TaskScore(10, 10, 0.0).interval[0] < 0.75  # all of a few right is no certainty


def test_records_of_tasks_come_back(tmp_path: Path) -> None:
    written = TaskRecord(1, FINGERPRINT, FINGERPRINT.commit, {"n_layers": 2}, 0.125, (asked(1, 2),))
    task_record.write(tmp_path, written)
    (tmp_path / "atlas" / "tasks" / "bad.json").write_text(json.dumps({**model.as_json(written), "results": []}))
    found, damaged = task_record.read_all(tmp_path)
    assert found == [written]
    assert len(damaged) == 1
    assert "bad.json" in damaged[0]
    assert record.read_all(tmp_path) == ([], [])  # an atlas is looked for beside them alone
