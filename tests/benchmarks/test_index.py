"""The index is as the files are: whatever happens to it, to the files, and beside it."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from benchmarks import fingerprint, index, records, store
from benchmarks.records import Record
from tests.benchmarks.stored import damaged, everything, run, write
from tests.benchmarks.synthetic import key, passed

OPEN_AND_COUNT = """
import sys, pathlib
from benchmarks import store
print("begin", flush=True)
with store.opened(pathlib.Path(sys.argv[1])) as opened:
    print(len(opened))
"""


def latencies(results: Path) -> list[float]:
    """As the index has them, which need not be as the file has them now."""
    with store.opened(results) as opened:
        return sorted(point.latency_ms for series in opened.history("cpu") for point in series.points)


@contextmanager
def counted_validations(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    validated: list[str] = []
    from_json = Record.from_json

    def counting(line: str) -> Record:
        validated.append(line)
        return from_json(line)

    with monkeypatch.context() as patch:
        patch.setattr(Record, "from_json", counting)
        yield validated


def index_file(results: Path) -> Path:
    (path,) = (results / index.FOLDER).glob("*.sqlite")
    return path


def test_each_line_is_validated_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path, *run(1, passed(key()), passed(key(length=128))))
    with counted_validations(monkeypatch) as validated:
        with store.opened(tmp_path):
            assert len(validated) == 2
        with store.opened(tmp_path):
            assert len(validated) == 2, "nothing changed"
        records.append(path, *run(1, passed(key(length=256))))
        with store.opened(tmp_path) as opened:
            assert len(validated) == 3, "only the line that was appended"
            assert len(opened) == 3


def test_a_file_that_is_edited_is_read_again(tmp_path: Path) -> None:
    path = write(tmp_path, *run(1, passed(key(), 10.0), passed(key(length=128))))
    everything(tmp_path)
    path.write_text(path.read_text().replace("10.0", "12.0", 1).replace("10.0", "12.0"))
    os.utime(path, ns=(1, 1))
    assert latencies(tmp_path) == [12.0, 12.0]


def test_a_file_that_is_edited_and_appended_to_is_read_again(tmp_path: Path) -> None:
    path = write(tmp_path, *run(1, passed(key(), 10.0)))
    everything(tmp_path)
    path.write_text(path.read_text().replace("10.0", "12.0"))
    records.append(path, *run(1, passed(key(length=128))))
    assert latencies(tmp_path) == [10.0, 12.0]


def test_a_file_that_is_gone_is_forgotten(tmp_path: Path) -> None:
    write(tmp_path, *run(1, passed(key())))
    path = write(tmp_path, *run(2, passed(key())))
    assert len(everything(tmp_path)) == 2
    path.unlink()
    assert len(everything(tmp_path)) == 1


def test_what_cannot_be_read_is_damaged_by_name_and_costs_nothing_else(tmp_path: Path) -> None:
    path = write(tmp_path, *run(1, passed(key(), 10.0)))
    folder, nowhere = path.with_name("x.jsonl"), path.with_name("y.jsonl")
    folder.mkdir()
    nowhere.symlink_to("gone")
    for _ in range(2):
        assert latencies(tmp_path) == [10.0]
        assert [(one.path, one.why.partition(":")[0]) for one in damaged(tmp_path)] == [
            (folder, "IsADirectoryError"), (nowhere, "FileNotFoundError"),
        ]  # fmt: skip
        assert [one.path for one in records.read_runs(tmp_path)[1]] == [folder, nowhere]
    for other in (folder, nowhere):
        other.unlink() if other.is_symlink() else other.rmdir()
        other.write_bytes(path.read_bytes())
    assert latencies(tmp_path) == [10.0, 10.0, 10.0]
    assert damaged(tmp_path) == []


def test_a_line_in_the_making_is_read_when_it_is_whole(tmp_path: Path) -> None:
    path = write(tmp_path, passed(key()))
    whole = path.read_bytes()
    path.write_bytes(whole + whole[:100])
    assert len(everything(tmp_path)) == 1
    assert [line.line for line in damaged(tmp_path)] == [2]
    path.write_bytes(whole + whole)
    assert len(everything(tmp_path)) == 2
    assert damaged(tmp_path) == []


def test_a_whole_last_line_without_its_end_counts_once(tmp_path: Path) -> None:
    path = write(tmp_path, passed(key()))
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    assert len(everything(tmp_path)) == 1
    records.append(path, passed(key(length=128)))
    assert len(everything(tmp_path)) == 2


@pytest.mark.parametrize("harm", ["garbage", "cut", "holes", "empty", "other tables"])
def test_a_damaged_index_is_made_again(harm: str, tmp_path: Path) -> None:
    wanted = run(1, *(passed(key(length=64 * n)) for n in range(1, 40)))
    write(tmp_path, *wanted)
    everything(tmp_path)
    path = index_file(tmp_path)
    content = path.read_bytes()
    if harm == "other tables":
        path.unlink()
        with sqlite3.connect(path) as connection:
            connection.execute("CREATE TABLE records(x INT)")
        connection.close()
    else:
        harmed = {"garbage": b"no database" * 1000, "cut": content[:5000], "empty": b""}
        path.write_bytes(harmed.get(harm, content[:4096] + b"\xff" * 8192 + content[12288:]))
    assert everything(tmp_path) == wanted
    assert everything(tmp_path) == wanted


def test_a_damaged_index_that_another_process_reads_is_left_to_it(tmp_path: Path) -> None:
    wanted = run(1, passed(key()))
    write(tmp_path, *wanted)
    with store.opened(tmp_path):
        path = index_file(tmp_path)
        path.write_bytes(b"no database" * 1000)
        assert everything(tmp_path) == wanted
        assert path.read_bytes().startswith(b"no database")
    assert everything(tmp_path) == wanted
    assert not path.read_bytes().startswith(b"no database")


def test_an_index_of_other_sources_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, passed(key()))
    with monkeypatch.context() as patch:
        patch.setattr(index, "_version", lambda: "old")
        everything(tmp_path)
    assert index_file(tmp_path).name == "old.sqlite"
    everything(tmp_path)
    assert index_file(tmp_path).name != "old.sqlite"


def test_works_where_no_index_can_be_written(tmp_path: Path) -> None:
    wanted = run(1, passed(key()))
    write(tmp_path, *wanted)
    (tmp_path / index.FOLDER).write_text("a file stands where the folder would")
    assert everything(tmp_path) == wanted


def started(results: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", OPEN_AND_COUNT, str(results)],
        cwd=fingerprint.ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_many_processes_at_once_agree(tmp_path: Path) -> None:
    for day in range(1, 6):
        write(tmp_path, *run(day, *(passed(key(length=64 * n)) for n in range(1, 40))))
    processes = [started(tmp_path) for _ in range(3)]
    assert [process.communicate(timeout=120) for process in processes] == [("begin\n195\n", "")] * 3
    assert len(everything(tmp_path)) == 195


def test_a_process_killed_while_it_reads_leaves_a_good_index(tmp_path: Path) -> None:
    runs = [run(day, *(passed(key(length=64 * n)) for n in range(1, 40))) for day in range(1, 11)]
    for one in runs:
        write(tmp_path, *one)
    for delay_s in (0.02, 0.08):
        process = started(tmp_path)
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(delay_s)
        process.kill()
        process.communicate()
    assert everything(tmp_path) == [record for one in runs for record in one]


def test_what_is_known_costs_nearly_nothing(tmp_path: Path) -> None:
    """CPU time of this process, so that a busy machine changes nothing."""
    line = json.loads(passed(key()).to_json())
    (tmp_path / "runs" / "cpu").mkdir(parents=True)
    for number in range(20):
        line["fingerprint"]["utc"] = f"2026-01-01T00:{number:02d}:00Z"
        (tmp_path / "runs" / "cpu" / f"{number}.jsonl").write_text((json.dumps(line) + "\n") * 100)
    first_s, again_s = (cpu_s_of_a_report(tmp_path) for _ in range(2))
    assert again_s < first_s / 4


def cpu_s_of_a_report(results: Path) -> float:
    """Of what the pages ask for: the newest run has 100 records, the history all of them."""
    begin = time.process_time()
    with store.opened(results) as opened:
        assert len(opened.current()) == 100
        assert sum(len(series.points) for series in opened.history("cpu")) == 2000
    return time.process_time() - begin
