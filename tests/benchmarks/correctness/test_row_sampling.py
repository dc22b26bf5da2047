"""Rows are drawn by tiles, anew for each seed, and what may escape is what really escapes."""

from __future__ import annotations

import pytest

from benchmarks.correctness import all_rows, row_sampling
from benchmarks.correctness.row_sampling import TILE, by_tiles, escape_probability
from harness.repository import ROOT
from nsa import NSAConfig


@pytest.mark.parametrize("num_rows", [1, 63, 64, 65, 500])
@pytest.mark.parametrize("per_tile", [1, 9, 64])
def test_every_tile_has_its_rows(num_rows: int, per_tile: int) -> None:
    rows = by_tiles(num_rows, per_tile, 3)
    assert rows == sorted(set(rows))
    for begin in range(0, num_rows, TILE):
        size = min(TILE, num_rows - begin)
        assert sum(begin <= row < begin + size for row in rows) == min(per_tile, size)
    assert by_tiles(num_rows, 64, 3) == list(range(num_rows))


def test_another_seed_draws_other_rows() -> None:
    assert by_tiles(500, 4, 3) == by_tiles(500, 4, 3) != by_tiles(500, 4, 4)
    assert len({row_sampling.new_seed() for _ in range(20)}) == 20
    assert row_sampling.TIMED_SEED not in {row_sampling.new_seed() for _ in range(20)}


@pytest.mark.parametrize(("pairs", "rows"), [(1.0, 64), (100.0, 64), (101.0, 63), (200.0, 32), (1e9, 1)])
def test_as_many_rows_as_the_time_allows(pairs: float, rows: int) -> None:
    assert row_sampling.rows_per_tile(pairs, 100.0) == rows


@pytest.mark.parametrize(("wrong", "per_tile"), [(1, 1), (1, 16), (4, 9), (16, 2), (64, 1), (1, 64)])
def test_a_fault_escapes_as_often_as_is_said(wrong: int, per_tile: int) -> None:
    draws = 3000
    fault = set(range(128 + 64 - wrong, 128 + 64))  # the end of the third tile
    escaped = sum(fault.isdisjoint(by_tiles(300, per_tile, seed)) for seed in range(draws))
    assert escaped / draws == pytest.approx(escape_probability(wrong, per_tile), abs=0.03)


def test_a_wrong_tile_never_escapes_and_a_wrong_row_less_often_in_ten_runs() -> None:
    assert escape_probability(TILE, 1) == 0.0
    assert escape_probability(1, TILE) == 0.0
    assert escape_probability(1, 16) == pytest.approx(0.75)
    assert escape_probability(1, 16, runs=10) == pytest.approx(0.75**10)


@pytest.mark.parametrize(("wrong", "per_tile", "named"), [(0, 1, "wrong_rows"), (65, 1, "wrong_rows"), (1, 0, "per_t")])
def test_a_fault_must_lie_in_a_tile(wrong: int, per_tile: int, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        escape_probability(wrong, per_tile)


def test_the_documents_state_what_the_functions_compute() -> None:
    """The table of docs/measuring.md, line by line."""
    shapes = (("cuda", 64, (16384, 32768, 65536, 131072)), ("cpu", 8, (512, 1024, 2048, 8192)))
    works = (
        ("NSA, forward", NSAConfig(), False),
        ("dense, forward", None, False),
        ("either, forward + backward", None, True),
    )
    lines = []
    for device, heads, lengths in shapes:
        for tokens in lengths:
            for what, config, backward in works:
                rows = all_rows.rows_per_tile(tokens, tokens, heads, config, device, backward=backward)
                escapes = [escape_probability(wrong, rows, runs) for wrong in (1, 4, TILE) for runs in (1, 10)]
                cells = " | ".join(f"{p:.2g}" for p in escapes)
                where = "GPU" if device == "cuda" else "CPU"
                lines.append(f"| {where}, {heads} heads | {tokens} | {what} | {rows} | {cells} |")
    text = (ROOT / "docs" / "measuring.md").read_text()
    stated = [line for line in text.splitlines() if line.startswith(("| GPU,", "| CPU,"))]
    assert stated == lines
