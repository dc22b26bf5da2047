"""The links of the documents on the pages: within the pages, to the sources' site, or plain text; a wrong one stays."""

from __future__ import annotations

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


def test_a_source_is_named_without_a_site() -> None:
    assert pages.linked("[the layer](nsa/layer.py)", "index.md", None) == "the layer"


def test_pictures_outside_the_documents_are_found() -> None:
    found = list(pages.pictures())
    assert "results/train/needle.svg" in found
    assert all((ROOT / name).is_file() for name in found)
