"""Two versions side by side, and what is said where git cannot give them."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.ab import checkout
from benchmarks.commands import accept


@pytest.mark.parametrize("ref", [checkout.WORKING_TREE, "HEAD"])
def test_says_that_git_is_not_installed(ref: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match="git must be installed to look up commits"), checkout.sources([ref]):
        pass
    assert "<" not in accept._who()  # the login stands in for git's names


def test_says_that_the_folder_is_no_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkout, "REPOSITORY", tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    with (
        pytest.raises(ValueError, match=f"'HEAD' must name a commit of {tmp_path}"),
        checkout.sources([checkout.WORKING_TREE]),
    ):
        pass
