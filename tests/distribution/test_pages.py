"""The links of the documents on the pages: within the pages, to the sources' site, or plain text; a wrong one stays."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from harness.repository import ROOT

pytest.importorskip("mkdocs", reason="needs mkdocs (nox -s docs)")
from distribution import pages

BASE = "https://github.com/owner/name/blob/abc"


@pytest.mark.parametrize(
    ("page", "link", "wanted"),
    [
        ("index.md", "[a](docs/training.md)", "[a](training.md)"),
        ("index.md", "![a](docs/speedup.svg)", "![a](speedup.svg)"),
        ("index.md", "[`a`](nsa/layer.py)", f"[`a`]({BASE}/nsa/layer.py)"),
        ("index.md", "[a](CONTRIBUTING.md#recipes)", "[a](CONTRIBUTING.md#recipes)"),
        ("training.md", "[a](../CONTRIBUTING.md)", "[a](CONTRIBUTING.md)"),
        ("training.md", "[a](../README.md#tests)", "[a](index.md#tests)"),
        ("training.md", "![a](../results/train/needle.svg)", "![a](results/train/needle.svg)"),
        ("reference/layer.md", "[a](../semantics.md)", "[a](../semantics.md)"),
        ("training.md", "[a](https://arxiv.org/abs/1)", "[a](https://arxiv.org/abs/1)"),
        ("training.md", "[a](../nsa/gone.py)", "[a](../nsa/gone.py)"),
        ("training.md", "[a](../../outside.md)", "[a](../../outside.md)"),
    ],
)
def test_links(page: str, link: str, wanted: str) -> None:
    assert pages.linked(f"See {link}.", page, BASE) == f"See {wanted}."


@pytest.mark.filterwarnings("default")  # of mkdocs and its plugins
@pytest.mark.parametrize(
    "fault", [None, "[a](../gone.md)", "[a](../training.md#gone)", "::: nsa.gone", "[a][nsa.gone]"]
)
def test_a_link_or_reference_that_leads_nowhere_fails_the_build(
    fault: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mkdocs.commands.build import build
    from mkdocs.config import load_config
    from mkdocs.exceptions import Abort

    monkeypatch.chdir(ROOT)
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    page = tmp_path / "docs" / "reference" / "packages.md"
    page.write_text(f"{page.read_text()}\n{fault or ''}\n")
    config = load_config("mkdocs.yml", docs_dir=str(tmp_path / "docs"), site_dir=str(tmp_path / "site"))
    if fault is None:
        build(config)
        assert "NativeSparseAttention" in (tmp_path / "site" / "reference" / "layer.html").read_text()
    else:
        with pytest.raises(Abort):
            build(config)


def test_a_source_is_named_without_a_site() -> None:
    assert pages.linked("[the layer](nsa/layer.py)", "index.md", None) == "the layer"


def test_pictures_outside_the_documents_are_found() -> None:
    found = list(pages.pictures())
    assert "results/train/needle.svg" in found
    assert all((ROOT / name).is_file() for name in found)
