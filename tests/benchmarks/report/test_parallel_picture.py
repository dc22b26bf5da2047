"""The picture of docs/parallel.md is the one that its module draws."""

from __future__ import annotations

from xml.etree import ElementTree

from benchmarks.report import parallel_picture
from harness.repository import ROOT


def test_the_picture_is_up_to_date() -> None:
    drawn = parallel_picture.svg()
    assert (ROOT / parallel_picture.PICTURE).read_text() == drawn, "run python -m benchmarks.report.parallel_picture"
    ElementTree.fromstring(drawn)


def test_what_the_document_says_of_it_is_counted() -> None:
    assert "+75.1% work" in parallel_picture.svg()
    assert "75 % more than the mean" in (ROOT / "docs" / "parallel.md").read_text()
