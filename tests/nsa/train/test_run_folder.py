"""The files of a run: tables that a resume cuts back, and a folder that one run alone writes to."""

from __future__ import annotations

from pathlib import Path

import pytest

from nsa.train import run_folder
from nsa.train.run_folder import InUseError, Table


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
