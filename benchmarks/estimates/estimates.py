"""Estimated times of boards that nobody has measured: bounds of their kernels times Hopper's factors."""

from __future__ import annotations

from pathlib import Path

from benchmarks.estimates import bounds, calibration, parts
from benchmarks.estimates.kernel_table import KernelTable
from benchmarks.estimates.parts import Launches
from benchmarks.estimates.stored import EstimatedPart, Estimates
from benchmarks.estimates.work import PrefillShape

BOARDS = ("a100-80gb-sxm", "3090", "4090", "l40s")
SHAPES = tuple(
    PrefillShape(*heads, tokens)
    for heads, lengths in (
        ((64, 4, 128, 128), (8192, 16384, 32768, 65536, 131072)),
        ((64, 4, 192, 128), (16384, 65536)),
        ((32, 8, 128, 128), (8192, 32768)),
        ((12, 2, 64, 64), (2048, 8192)),
    )
    for tokens in lengths
)


def make(results: Path, table: KernelTable) -> Estimates:
    """Fit the records below `results`, and estimate every board and shape. Raises ValueError without such records."""
    samples = calibration.samples(results, table)
    fits = {one.part: one for one in calibration.fit(samples)}
    found = []
    for board in BOARDS:
        on = Launches(table, bounds.target(board))
        for shape in SHAPES:
            for one in (*parts.forward(shape, on), parts.backward(shape, on)):
                estimated_ms = calibration.predicted_ms(one.part, one.least_ms, fits)
                found.append(
                    EstimatedPart(board, shape.name, shape.tokens, one.part, one.resource, one.least_ms, estimated_ms)
                )
    left_out = calibration.leave_one_out(samples)
    return Estimates(table.triton, calibration.PORTABLE, tuple(fits.values()), tuple(left_out), tuple(found))
