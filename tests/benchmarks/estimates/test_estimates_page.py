"""The page of estimates: what it says, and that no estimate is among what was measured. Needs no Triton."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.estimates import kernel_table, stored
from benchmarks.estimates.kernel_table import Kernel, KernelTable
from benchmarks.estimates.sass import Counts
from benchmarks.estimates.stored import EstimatedPart, Estimates, LeftOut, PartFit
from benchmarks.history.store import Store
from benchmarks.report.pages import ReportSettings, build

COUNTS = Counts(4096.0, 4096.0, 1, 2, 3, 4, 5, 6, 512, 7, 8)
KERNELS = KernelTable("3.7.1", (Kernel(86, 16, 128, 128, "selected._forward", False, COUNTS, 1, 200, 0, 20480, 4),))
ESTIMATES = Estimates(
    "3.7.1",
    "0123456789",
    (PartFit("window", 2.5, 0.1, 3),),
    (
        LeftOut("prefill-forward/64x4x128/b1/s8192/bfloat16/cold", None, 2.0, 2.5),
        LeftOut("prefill-forward-backward/64x4x128/b1/s8192/bfloat16/cold", "backward, dq by query", 4.0, 3.0),
    ),
    (
        EstimatedPart("3090", "64x4x128", 8192, "window", "tensor cores", 4.0, 10.0),
        EstimatedPart("3090", "64x4x128", 8192, "backward, dq by block", "L2", 20.0, 40.0),
        EstimatedPart("l40s", "64x4x128", 8192, "window", "issue", 1.0, 2.5),
    ),
)


@pytest.fixture
def page(tmp_path: Path) -> str:
    stored.write(tmp_path, ESTIMATES)
    kernel_table.write(tmp_path, KERNELS)
    index = build(tmp_path, ReportSettings(script=False)).index
    assert 'href="estimates.html"' in index.read_text()
    assert "RTX 3090" not in index.read_text()
    return (index.parent / "estimates.html").read_text()


def test_it_says_that_nothing_was_measured_and_how_far_it_may_be_off(page: str) -> None:
    assert "Estimated, not measured." in page
    assert "NVIDIA GeForce RTX 3090: estimated" in page
    assert "NVIDIA L40S: estimated" in page
    assert "8 to 12" in page  # 10 ms by the 25 % that the forward pass was missed by
    assert "32 to 50" in page  # 40 ms by 25 % of the backward pass
    assert "0123456789" in page


def test_no_chart_and_no_record_has_an_estimate(page: str, tmp_path: Path) -> None:
    assert "<img" not in page
    assert "<script" not in page
    assert list(Store(tmp_path).records()) == []
    assert sorted(path.suffix for path in (tmp_path / "report").iterdir() if path.suffix == ".svg") == []


def test_files_come_back_as_they_were_written(tmp_path: Path) -> None:
    stored.write(tmp_path, ESTIMATES)
    kernel_table.write(tmp_path, KERNELS)
    assert stored.read(tmp_path) == ESTIMATES
    assert kernel_table.read(tmp_path) == KERNELS


def test_without_estimates_the_page_says_how_they_are_made(tmp_path: Path) -> None:
    assert stored.read(tmp_path) is None
    text = (build(tmp_path, ReportSettings(script=False)).index.parent / "estimates.html").read_text()
    assert "estimate --compile" in text


@pytest.mark.parametrize("content", ["{", '{"triton": "3.7.1"}', '{"triton": 1, "fits": []}'])
def test_a_damaged_file_is_named_on_the_first_page(tmp_path: Path, content: str) -> None:
    stored.path(tmp_path).parent.mkdir(parents=True)
    stored.path(tmp_path).write_text(content)
    with pytest.raises(ValueError, match=r"estimates\.json"):
        stored.read(tmp_path)
    assert "estimates.json" in build(tmp_path, ReportSettings(script=False)).index.read_text()
