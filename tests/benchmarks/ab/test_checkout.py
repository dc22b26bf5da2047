"""Two versions side by side, and what is said where git cannot give them."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.ab import checkout
from benchmarks.commands import accept
from harness import repository


def test_says_that_git_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match="git must be installed to look up commits"), checkout.sources(["HEAD"]):
        pass
    assert "<" not in accept._who()  # the login stands in for git's names


def test_says_that_the_folder_is_no_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkout, "REPOSITORY", tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    with pytest.raises(ValueError, match=f"'HEAD' must name a commit of {tmp_path}"), checkout.sources(["HEAD"]):
        pass


@pytest.mark.parametrize(("told", "commit", "dirty"), [({}, None, None), ({"NSA_COMMIT": "a" * 40}, "a" * 40, None)])
def test_a_copy_without_git_is_a_working_tree_all_the_same(
    told: dict[str, str], commit: str | None, dirty: bool | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in an image: what its environment says is its commit."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("NSA_COMMIT", raising=False)
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    with checkout.sources([checkout.WORKING_TREE]) as (one,):
        assert (one.side.commit, one.side.dirty) == (commit, dirty)
        assert (one.folder / "nsa" / "__init__.py").is_file()


def test_the_choices_that_cases_replay_come_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The benches of a comparison look for them beside themselves."""
    choices = Path("results", "atlas", "choices", "a.json")
    for folder in ("benchmarks", "harness", "nsa", choices.parent):
        (tmp_path / "root" / folder).mkdir(parents=True)
    (tmp_path / "root" / choices).write_text("{}")
    monkeypatch.setattr(repository, "ROOT", tmp_path / "root")
    monkeypatch.setattr(checkout, "REPOSITORY", tmp_path / "root")
    with checkout.sources([checkout.WORKING_TREE]) as (one,):
        assert (one.benches / choices).read_text() == "{}"
