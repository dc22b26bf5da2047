"""A command that cannot write says which folder and what to do, with exit code 2 or 1 and without a traceback."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

import benchmarks.__main__
import containers.__main__
import nsa.train.__main__
import regression.__main__

COMMANDS: list[tuple[Callable[[list[str]], int], str, str]] = [
    (benchmarks.__main__.main, "report --out", "name another folder"),
    (benchmarks.__main__.main, "merge results --out", "name another folder"),
    (regression.__main__.main, "run tie-break --device cpu --out", "name another folder with --out"),
    (containers.__main__.main, "pipeline --quick --engine none --logs", "Name another folder with --logs"),
    (
        nsa.train.__main__.main,
        "run --profile train_showcase --steps 2 --dataset synthetic --out-dir",
        "name another folder with --out-dir",
    ),
]


@pytest.mark.parametrize(("command", "words", "advice"), COMMANDS, ids=[words for _, words, _ in COMMANDS])
def test_the_folder_and_what_to_do_are_said(
    command: Callable[[list[str]], int],
    words: str,
    advice: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = tmp_path / "read-only"
    make = os.mkdir

    def mkdir(path: str | Path, *rest: int) -> None:
        if Path(path).is_relative_to(folder):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        make(path, *rest)

    monkeypatch.setattr(os, "mkdir", mkdir)
    assert command([*words.split(), str(folder / "here")]) in (1, 2)
    said = capsys.readouterr().err.splitlines()[-1]
    assert "Errno" not in said
    assert str(folder) in said
    assert "Read-only file system" in said
    assert advice in said
