"""The kernel of a cache's write compiles for the GPUs people run it on, and adds up a block as a prefill does."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from nsa.triton_backend.architecture import SHARED_MEMORY_KIB
from tests.nsa.triton_backend.processes import answer

ARCHITECTURES = (80, 86, 90, 100, 120)
HEADS = [(128, 128), (192, 128, "shared"), (20, 24)]
CI = {(80, (192, 128, "shared"))}


@pytest.mark.parametrize(
    ("architecture", "heads"),
    [
        pytest.param(a, heads, marks=() if (a, heads) in CI else pytest.mark.nightly)
        for a in ARCHITECTURES
        for heads in HEADS
    ],
)
def test_a_write_fits_and_adds_up_as_a_prefill_does(architecture: int, heads: tuple[object, ...]) -> None:
    """Neither how many tokens come nor how many there are compiles it anew; and neither kernel adds tokens across
    threads, where the order of summation would follow from the layout."""
    found = answer("compile_cache_write", architecture, *heads)
    aligned = heads != (20, 24)  # else Triton compiles anew where a sequence's stride turns out a multiple of 16
    assert len(found["needs"]) == (2 if aligned else 4)  # rows side by side, and in pages
    assert all(need["shared_bytes"] <= SHARED_MEMORY_KIB[architecture] * 1024 for need in found["needs"])
    assert not any(need["spilled_bytes"] for need in found["needs"])
    assert found["sums"] == 0
