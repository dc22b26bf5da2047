"""Files that a kill cannot spoil."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest

from nsa.io import append_line, atomic_write, read_json_lines, to_json
from nsa.train import run_folder
from nsa.train.run_folder import InUseError, Table


def test_a_torn_line_is_closed_and_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    append_line(path, '{"a": 1}')
    with path.open("a") as file:
        file.write('{"a": 2')
    append_line(path, '{"a": 3}')
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


def test_a_table_forgets_what_will_be_written_again(tmp_path: Path) -> None:
    path = tmp_path / "training.csv"
    table = Table(path, ("step", "loss"), after_step=0)
    for step in range(1, 6):
        table.add({"step": step, "loss": step / 10, "more": "not a column"})
    with path.open("a") as file:
        file.write("6")
    again = Table(path, ("step", "loss", "lr"), after_step=3)
    again.add({"step": 4, "loss": None, "lr": 1.0})
    assert path.read_text() == "step,loss,lr\n1,0.1,\n2,0.2,\n3,0.3,\n4,,1.0\n"


def test_a_folder_has_one_writer(tmp_path: Path) -> None:
    with (
        run_folder.folder_lock(tmp_path),
        pytest.raises(InUseError, match=r"train\.out_dir must not be in use"),
        run_folder.folder_lock(tmp_path),
    ):
        pass
    with run_folder.folder_lock(tmp_path):
        pass
