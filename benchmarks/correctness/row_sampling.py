"""Which rows of an output are compared, and how likely a fault is to lie in none of them.

Rows are drawn by tiles: of every `TILE` consecutive rows as many as the time allows, all of them where that is enough.
A fault that fills a tile, or a head of one, is then met in every run; a single row with the probability that
`escape_probability` tells, anew in each run, because each run draws with a seed of its own.
"""

from __future__ import annotations

import math
import random
import secrets

TILE = 64
"""Consecutive rows from which some are drawn; most kernels compute so many or fewer with one program."""
_SEEDS = 2**31
TIMED_SEED = 0
"""Of the inputs that are timed: the same in every run, so that figures of several runs compare."""


def new_seed() -> int:
    """A seed that no run had before, as good as surely; never that of the inputs that are timed."""
    return TIMED_SEED + 1 + secrets.randbelow(_SEEDS)


def rows_per_tile(pairs: float, most_pairs: float) -> int:
    """How many rows of a tile to compare where all rows need `pairs` (query, key) pairs and `most_pairs` are allowed;
    one at least, `TILE` for all."""
    return TILE if pairs <= most_pairs else max(1, int(TILE * most_pairs / pairs))


def by_tiles(num_rows: int, per_tile: int, seed: int) -> list[int]:
    """`per_tile` rows of each tile of `num_rows`, ascending; all rows of a last tile that has fewer."""
    generator = random.Random(seed)
    rows: list[int] = []
    for begin in range(0, num_rows, TILE):
        tile = range(begin, min(begin + TILE, num_rows))
        rows += sorted(generator.sample(tile, min(per_tile, len(tile))))
    return rows


def escape_probability(wrong_rows: int, per_tile: int, runs: int = 1) -> float:
    """That so many wrong rows of one tile are among the compared ones of none of these runs.

    Raises ValueError unless both are between 1 and `TILE`.
    """
    for name, value in (("wrong_rows", wrong_rows), ("per_tile", per_tile)):
        if not 1 <= value <= TILE:
            raise ValueError(f"{name} must be from 1 to {TILE}; got {value}")
    return float((math.comb(TILE - wrong_rows, per_tile) / math.comb(TILE, per_tile)) ** runs)
