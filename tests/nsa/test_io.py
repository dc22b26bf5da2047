"""Whatever befalls a writer, a replaced file is the old or the new one, and every finished line stays readable."""

from __future__ import annotations

import errno
import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from nsa.io import DiskFullError, append_line, atomic_write, cannot_write, read_json_lines, read_lines, to_json
from tests.nsa.train.runs import ROOT

_WRITER = """
import json, sys
from pathlib import Path
from nsa.io import append_line
name, path = sys.argv[1:]
for i in range(150):
    append_line(Path(path), json.dumps({"writer": name, "line": i, "long": "x" * 20_000}))
"""


def start(script: str, *arguments: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", script, *arguments], cwd=ROOT, stdout=subprocess.PIPE)


def test_two_writers_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    for process in [start(_WRITER, name, str(path)) for name in ("a", "b")]:
        assert process.wait(60) == 0
        assert process.stdout is not None
        process.stdout.close()
    found = [json.loads(line) for _, line in read_lines(path)]
    for name in ("a", "b"):
        assert [line["line"] for line in found if line["writer"] == name] == list(range(150))


def test_a_killed_writer_leaves_every_finished_line(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    script = _WRITER.replace("range(150)", "range(10**9)").replace("20_000}))", "20_000})); print(i, flush=True)")
    with start(script, "a", str(path)) as process:
        assert process.stdout is not None
        said = [int(process.stdout.readline()) for _ in range(20)]
        process.send_signal(signal.SIGKILL)
    found = list(read_lines(path))
    assert [json.loads(line)["line"] for _, line in found[:20]] == said


def test_a_full_disk_is_said_and_leaves_the_file_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.jsonl"
    append_line(path, '{"a": 1}')
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
            append_line(path, '{"b": 2}')
    assert path.read_text() == '{"a": 1}\n'
    append_line(path, '{"b": 2}')
    assert path.read_text() == '{"a": 1}\n{"b": 2}\n'


@pytest.mark.skipif(not Path("/dev/full").is_char_device(), reason="needs /dev/full, a device that is always full")
def test_a_full_device_is_said() -> None:
    with pytest.raises(DiskFullError, match="no room for one more line"):
        append_line(Path("/dev/full"), "{}")


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (errno.EROFS, "cannot write /x: Read-only file system. Make it writable, or name another folder with --out"),
        (errno.EACCES, "cannot write /x: Permission denied. Make it writable, or name another folder with --out"),
        (errno.ENOSPC, "no room for /x: No space left on device. Make room, or name a folder on another disk with"),
        (errno.ECONNRESET, None),
    ],
)
def test_a_folder_that_cannot_be_written_is_named_with_what_to_do(number: int, said: str | None) -> None:
    found = cannot_write(OSError(number, os.strerror(number), "/x"), "--out")
    assert found == said if said is None else (found or "").startswith(said)
    assert cannot_write(DiskFullError(errno.ENOSPC, "no room; make room"), "--out") == "no room; make room"


def test_another_error_stays_what_it_is(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError):
        append_line(tmp_path, "{}")


def test_a_torn_line_is_closed_and_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    append_line(path, '{"a": 1}')
    with path.open("a") as file:
        file.write('{"a": 2')
    append_line(path, '{"a": 3}', sync=False)
    assert [record["a"] for record in read_json_lines(path)] == [1, 3]
    assert list(read_json_lines(tmp_path / "none")) == []


def test_json_has_no_bare_nan() -> None:
    assert json.loads(to_json({"a": math.nan, "b": [math.inf], "c": (None, True)})) == {
        "a": "nan", "b": ["inf"], "c": [None, True],
    }  # fmt: skip


def test_dying_in_a_replace_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "metrics.json"
    atomic_write(path, "old")
    assert path.stat().st_mode & 0o777 == 0o644

    def dies(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", dies)
    with pytest.raises(KeyboardInterrupt):
        atomic_write(path, "new")
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.json"]
