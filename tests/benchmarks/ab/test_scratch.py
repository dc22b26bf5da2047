"""Folders of a comparison: gone after it, and after the next one where it was killed; never one that is in use."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from benchmarks.ab import scratch

OWNER = """
import sys
import tempfile
from benchmarks.ab import scratch

with scratch.folder() as made:
    (made / "side0").mkdir()
    print(made, flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary files lie, of this process and of those that it starts."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


def owner() -> tuple[subprocess.Popen[str], Path]:
    """A process that has a folder until its stdin ends."""
    started = subprocess.Popen([sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert started.stdout is not None
    return started, Path(started.stdout.readline().strip())


def end(process: subprocess.Popen[str], number: int = signal.SIGKILL) -> None:
    process.send_signal(number)
    process.communicate()


def test_a_folder_is_gone_afterwards(temporary: Path) -> None:
    def fail() -> None:
        with scratch.folder() as made:
            assert made.parent == temporary
            raise ValueError("boom")

    with pytest.raises(ValueError, match="boom"):
        fail()
    assert list(temporary.iterdir()) == []


def test_what_a_killed_process_left_is_removed_and_what_a_living_one_has_is_not(temporary: Path) -> None:
    killed, left_behind = owner()
    living, in_use = owner()
    try:
        end(killed)
        assert (left_behind / "side0").is_dir()
        with scratch.folder() as mine:
            assert set(temporary.iterdir()) == {in_use, mine}
            with scratch.folder():
                assert mine.is_dir(), "of this very process"
    finally:
        end(living)


def test_what_is_not_ours_stays(temporary: Path) -> None:
    """Another name, a file, a link to a folder elsewhere."""
    elsewhere = temporary / "elsewhere"
    elsewhere.mkdir()
    (temporary / f"{scratch.PREFIX}link").symlink_to(elsewhere)
    (temporary / f"{scratch.PREFIX}file").touch()
    before = set(temporary.iterdir())
    with scratch.folder():
        pass
    assert set(temporary.iterdir()) == before


def test_a_folder_of_another_user_stays(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = temporary / f"{scratch.PREFIX}theirs"
    theirs.mkdir()
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    with scratch.folder():
        assert theirs.is_dir()
    monkeypatch.setattr(os, "geteuid", lambda: user)
    with scratch.folder():
        assert not theirs.exists()
