"""Whatever befalls a writer, every finished line stays readable and no later one is lost."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import jsonl
from benchmarks.history import run_file, schema
from benchmarks.history.fingerprint import ROOT
from benchmarks.history.records import Gate
from benchmarks.jsonl import DiskFullError
from tests.benchmarks.synthetic import FINGERPRINT, GREEN, key, passed

_WRITER = """
import json, sys
from pathlib import Path
from benchmarks import jsonl
name, path = sys.argv[1:]
for i in range(150):
    jsonl.append(Path(path), json.dumps({"writer": name, "line": i, "long": "x" * 20_000}))
"""


def start(script: str, *arguments: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", script, *arguments], cwd=ROOT, stdout=subprocess.PIPE)


def test_two_writers_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    for process in [start(_WRITER, name, str(path)) for name in ("a", "b")]:
        assert process.wait(60) == 0
        assert process.stdout is not None
        process.stdout.close()
    found = [json.loads(line) for _, line in jsonl.lines(path)]
    for name in ("a", "b"):
        assert [line["line"] for line in found if line["writer"] == name] == list(range(150))


def test_a_killed_writer_leaves_every_finished_line(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    script = _WRITER.replace("range(150)", "range(10**9)").replace("20_000}))", "20_000})); print(i, flush=True)")
    with start(script, "a", str(path)) as process:
        assert process.stdout is not None
        said = [int(process.stdout.readline()) for _ in range(20)]
        process.send_signal(signal.SIGKILL)
    found = list(jsonl.lines(path))
    assert [json.loads(line)["line"] for _, line in found[:20]] == said


def test_an_incomplete_line_swallows_nothing_that_comes_after_it(tmp_path: Path) -> None:
    record = passed(key())
    path = run_file.create(tmp_path, FINGERPRINT)
    run_file.append(path, record)
    with path.open("a") as file:
        file.write(path.read_text().splitlines()[1][:100])  # killed in the middle of a line
    run_file.append(path, record)
    found, (damaged,) = run_file.split(run_file.read(path))
    assert found == [record, record]
    assert damaged.line == 3


def test_a_full_disk_is_said_and_leaves_the_file_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.jsonl"
    jsonl.append(path, '{"a": 1}')
    whole, room = os.write, [4]

    def almost_full(file: int, data: bytes) -> int:
        if room[0] == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = whole(file, data[: room[0]])
        room[0] -= written
        return written

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", almost_full)
        with pytest.raises(DiskFullError, match=r"make room and go on: .*a\.jsonl"):
            jsonl.append(path, '{"b": 2}')
    assert path.read_text() == '{"a": 1}\n'
    jsonl.append(path, '{"b": 2}')
    assert path.read_text() == '{"a": 1}\n{"b": 2}\n'


def test_dataclasses_are_appended_as_safely(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, gate = tmp_path / "new" / "a.jsonl", GREEN
    schema.append_line(path, gate)
    whole = os.write
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda file, data: whole(file, data[:7]))  # as a disk that is nearly full may
        schema.append_line(path, gate)
    assert schema.read_lines(path, Gate) == ([gate, gate], [])


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full, a device that is always full")
def test_a_full_device_is_said() -> None:
    with pytest.raises(DiskFullError, match="no room for one more line"):
        jsonl.append(Path("/dev/full"), "{}")


def test_another_error_stays_what_it_is(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError):
        jsonl.append(tmp_path, "{}")
