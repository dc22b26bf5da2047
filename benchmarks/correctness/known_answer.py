"""Whether the oracle still gives what it must, and the comparison still refuses what is wrong.

`nsa.reference` belongs to what is measured, and shares a process with it. So after the last sample it is asked about a
row whose answer is written down here, and the comparison about answers of which one alone is right.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.cases.inputs import Problem, with_compressed
from benchmarks.correctness import all_rows, oracle, verify
from benchmarks.correctness.oracle import QueryRow
from benchmarks.correctness.verify import Answer, IncorrectError, NonFiniteError
from nsa import NSAConfig

CONFIG = NSAConfig(l=4, d=2, l_sel=8, n_sel=3, w=6)
TOKENS, HEADS, NUM_KV_HEADS, HEAD_DIM = 32, 4, 2, 8
LAST = QueryRow(0, TOKENS - 1)
BLOCKS = ((0, 1, 3), (0, 2, 3))
"""Selected by the last query, for each head of the keys."""
NSA_ROW = (1.71382748203716, 1.59981776964769, 0.277974317629883, -0.128630040290895)
"""o of the last query with these blocks: the first value of each head."""
DENSE_ROW = (1.77654282183636, 1.11724188850874, -0.0546821316169629, 0.0696630577789012)
"""The same of causal dense attention."""
BLOCK_SCORES = (1.19135040782812, 0.825590302036942, 1.51396906392698, 0.469090226207953)
"""Eq. 8 to 10 of the last query for the first head of the keys."""
_TOLERANCE = 1e-12


def problem(dtype: torch.dtype) -> Problem:
    """Inputs that no random generator has a part in."""

    def waves(heads: int, channels: int, step: float) -> Tensor:
        count = torch.arange(TOKENS * heads * channels, dtype=torch.float64)
        return (2 * torch.sin(step * count * (count + 1))).view(1, TOKENS, heads, channels).to(dtype)

    q, k, v = waves(HEADS, HEAD_DIM, 0.37), waves(NUM_KV_HEADS, HEAD_DIM, 0.53), waves(NUM_KV_HEADS, HEAD_DIM, 0.71)
    return with_compressed(Problem(q, k, v, waves(HEADS, 3, 0.19).abs() / 2), CONFIG)


def oracle_row() -> dict[str, Tensor]:
    """What the oracle says of the last query: o, dense and sparse, and scores."""
    last = oracle.prefix(problem(torch.float64), LAST, CONFIG)
    return {
        "nsa.reference": oracle.nsa_row(last, torch.tensor(BLOCKS)[None, None], CONFIG)[0, 0, :, 0],
        "nsa.reference, dense": oracle.dense_row(last)[0, 0, :, 0],
        "benchmarks.correctness.oracle.block_scores": oracle.block_scores(last, CONFIG)[0],
    }


def require_known_answers() -> None:
    """Raises IncorrectError where the oracle gives another answer, or the comparison lets a wrong one pass."""
    known = zip(oracle_row().items(), (NSA_ROW, DENSE_ROW, BLOCK_SCORES), strict=True)
    for (name, found), expected in known:
        wanted = torch.tensor(expected, dtype=torch.float64)
        if found.shape != wanted.shape or not (found - wanted).abs().amax().item() <= _TOLERANCE:
            raise IncorrectError(
                f"{name} gives {found.tolist()}, not the known answer {list(expected)}: the oracle was changed"
            )
    _require_refusals()


def _require_refusals() -> None:
    """The row's own answer must pass, and no other one."""
    small = problem(torch.float32)
    right = torch.zeros(1, TOKENS, HEADS, HEAD_DIM)
    last = oracle.prefix(problem(torch.float64), LAST, CONFIG)
    right[0, -1] = oracle.dense_row(last)[0, 0].float()

    def by_rows(o: Tensor) -> None:
        verify.compare_dense(small, Answer(o), "known answer", [LAST])

    def by_second(o: Tensor) -> None:
        found = all_rows.compare_dense(small, Answer(o), torch.tensor([LAST.query]))
        verify.with_comparison(verify.compare_dense(small, Answer(right), "known answer", [LAST]), 1, 1, found.checks)

    for compare in (by_rows, by_second):
        compare(right)
        for fault in (1.01, torch.nan):
            wrong = right.clone()
            wrong[0, -1, 1] *= fault
            if not _refuses(compare, wrong):
                raise IncorrectError(
                    f"the comparison lets a head pass whose values were multiplied by {fault}: it was changed"
                )


def _refuses(compare: Callable[[Tensor], None], o: Tensor) -> bool:
    try:
        compare(o)
    except (IncorrectError, NonFiniteError):
        return True
    return False
