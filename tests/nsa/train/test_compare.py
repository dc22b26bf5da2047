"""Two runs side by side: ratios to the first one, and no ratio of what is not comparable."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nsa.train import compare, report
from nsa.train.compare import NotComparableError
from tests.nsa.train.runs import settings, train

pytest.importorskip("matplotlib")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """A dense run, an NSA run, and one with another batch."""
    folder = tmp_path_factory.mktemp("runs")

    def run(name: str, **overrides: object) -> Path:
        out = folder / name
        train(settings(folder, **{"train__out_dir": str(out), "train__val_every": 8, "train__steps": 16, **overrides}))
        return out

    return run("dense", model__attention="dense"), run("nsa"), run("large", train__batch_size=4)


def test_ratios_are_to_the_first(runs: tuple[Path, Path, Path], tmp_path: Path) -> None:
    dense, sparse = compare.compare(runs[:2])
    assert (dense.val_loss_ratio, dense.tokens_per_s_ratio) == (1.0, 1.0)
    assert sparse.val_loss is not None
    assert dense.val_loss is not None
    assert sparse.val_loss_ratio == sparse.val_loss / dense.val_loss
    assert sparse.tokens_per_s_ratio is not None
    said = compare.write(runs[:2], tmp_path / "a" / "curve")
    assert said.splitlines()[1].split()[0] == "dense"
    record = json.loads((tmp_path / "a" / "curve.json").read_text())
    assert [run["name"] for run in record["runs"]] == ["dense", "nsa"]
    assert "<svg" in (tmp_path / "a" / "curve.svg").read_text()


def test_other_settings_are_not_comparable(runs: tuple[Path, Path, Path]) -> None:
    with pytest.raises(NotComparableError, match=r"large is not comparable with .*train\.batch_size 2 -> 4"):
        compare.compare([runs[1], runs[2]])


def test_other_hardware_is_not_comparable(runs: tuple[Path, Path, Path]) -> None:
    path = runs[1] / "env.json"
    before = path.read_text()
    path.write_text(json.dumps({**json.loads(before), "device": "another"}))
    with pytest.raises(NotComparableError, match=r"device .* -> another"):
        compare.compare(runs[:2])
    path.write_text(before)


def test_a_folder_with_the_old_name_of_the_key_value_heads_is_read(runs: tuple[Path, Path, Path]) -> None:
    path = runs[0] / "env.json"
    before = path.read_text()
    path.write_text(before.replace("model.num_kv_heads", "model.n_kv_groups"))
    assert len(compare.compare(runs[:2])) == len(compare.compare(runs[1::-1])) == 2
    assert "model.n_kv_groups" in report.write_page(runs[0]).read_text()
    path.write_text(before)
