"""The page of estimates: tables alone, apart from everything that was measured, marked as estimated throughout."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.estimates import kernel_table, stored
from benchmarks.estimates.kernel_table import KernelTable
from benchmarks.estimates.stored import EstimatedPart, Estimates, LeftOut
from benchmarks.report.table import CODE, NAME, Cell, ReportTable, digits, number, percent
from harness import machines

BACKWARD = "backward"
"""What the parts of a backward pass begin with."""
SHOWN_HEADS = (16, 128, 128)
"""Of whose kernels the page shows what they take."""


@dataclass(frozen=True)
class BoardSection:
    """One board on the page."""

    title: str
    passes: ReportTable
    parts: ReportTable


@dataclass(frozen=True)
class EstimatesSection:
    """The page's content."""

    boards: Sequence[BoardSection]
    fits: ReportTable
    errors: ReportTable
    kernels: ReportTable
    forward_error: str
    """The largest of a whole forward pass that was left out."""
    backward_error: str
    calibrated_on: str
    triton: str


def read(results: Path) -> tuple[EstimatesSection | None, list[str]]:
    """What there is to show, None where nothing was estimated; and what is wrong with a file that cannot be read."""
    try:
        found = stored.read(results)
        kernels = kernel_table.read(results) if found else None
    except (ValueError, OSError) as error:
        return None, [str(error)]
    return (None if found is None or kernels is None else show(found, kernels)), []


def show(found: Estimates, kernels: KernelTable) -> EstimatesSection:
    """The tables."""
    of_forward = [one for one in found.left_out if one.part is None]
    of_backward = [one for one in found.left_out if (one.part or "").startswith(BACKWARD)]
    forward_error, backward_error = (_worst(some) for some in (of_forward, of_backward))
    boards = []
    for board, parts in itertools.groupby(found.parts, key=lambda one: one.board):
        listed = list(parts)
        title = next((b.title for f in machines.families().values() for b in f.boards if b.id == board), board)
        boards.append(BoardSection(title, _passes(listed, forward_error, backward_error), _parts(listed)))
    return EstimatesSection(
        boards, _fits(found), _errors(found.left_out), _kernels(kernels), _plain(forward_error), _plain(backward_error),
        found.calibrated_on, found.triton,
    )  # fmt: skip


def _worst(left_out: Sequence[LeftOut]) -> float:
    return max((abs(one.error) for one in left_out), default=0.0)


def _plain(share: float) -> str:
    return percent(share, 0).lstrip("+")


def _passes(parts: Sequence[EstimatedPart], forward_error: float, backward_error: float) -> ReportTable:
    """A row per case: the sums of its parts, and how far records that were left out were missed."""
    head = ("heads", "tokens", "forward, estimated ms", "backward, estimated ms", "longest part, and what bounds it")
    rows = []
    for (heads, tokens), case in itertools.groupby(parts, key=lambda one: (one.heads, one.tokens)):
        of_case = list(case)
        backward_ms = sum(one.estimated_ms for one in of_case if one.part.startswith(BACKWARD))
        forward_ms = sum(one.estimated_ms for one in of_case) - backward_ms
        longest = max((x for x in of_case if not x.part.startswith(BACKWARD)), key=lambda one: one.estimated_ms)
        rows.append(
            [
                Cell(heads, CODE),
                number(f"{tokens:,}"),
                number(_range(forward_ms, forward_error)),
                number(_range(backward_ms, backward_error)),
                Cell(f"{longest.part}: {longest.resource}"),
            ]
        )
    return ReportTable(head, rows)


def _range(estimated_ms: float, error: float) -> str:
    return f"{_two_digits(estimated_ms / (1 + error))} to {_two_digits(estimated_ms * (1 + error))}"


def _two_digits(x: float) -> str:
    """As many as an estimate has: 127.3 -> "130"."""
    return f"{float(f'{x:.2g}'):.9g}"


def _parts(parts: Sequence[EstimatedPart]) -> ReportTable:
    head = ("heads", "tokens", "part", "lower bound, ms", "by", "estimated, ms")
    rows = [
        [
            Cell(one.heads, CODE),
            number(f"{one.tokens:,}"),
            Cell(one.part),
            number(_two_digits(one.least_ms)),
            Cell(one.resource),
            number(_two_digits(one.estimated_ms)),
        ]
        for one in parts
    ]
    return ReportTable(head, rows)


def _fits(found: Estimates) -> ReportTable:
    head = ("part", "times its bound", "and ms", "fitted to records")
    rows = [
        [Cell(one.part), number(f"{one.factor:.2f}"), number(digits(one.fixed_ms)), number(str(one.records))]
        for one in found.fits
    ]
    return ReportTable(head, rows)


def _errors(left_out: Sequence[LeftOut]) -> ReportTable:
    """The only measured figures of the page, each beside what the other records predict."""
    head = ("record of the H200", "part", "predicted from the others, ms", "measured, ms", "error")
    rows = [
        [
            Cell(one.case, NAME),
            Cell(one.part or "whole forward pass"),
            number(digits(one.predicted_ms)),
            number(digits(one.measured_ms)),
            number(percent(one.error, 0)),
        ]
        for one in left_out
    ]
    return ReportTable(head, rows)


def _kernels(table: KernelTable) -> ReportTable:
    """A row per kernel of 16 heads of 128, by architecture."""
    head = (
        "kernel", "architecture", "tensor cores", "exp2", "fp32", "integer", "shuffles", "shared", "global", "barriers",
        "registers", "spilled, bytes", "shared memory, KiB", "programs per SM",
    )  # fmt: skip
    shown = [one for one in table.kernels if (one.group, one.dk, one.dv) == SHOWN_HEADS]
    rows = []
    for one in sorted(shown, key=lambda kernel: (kernel.name, kernel.by_block, kernel.architecture)):
        c = one.counts
        of_loop = (c.tensor, c.mufu, c.fp32, c.integer, c.shuffle, c.shared, c.global_, c.barrier)
        needs = (one.registers, one.spilled_bytes, -(-one.shared_bytes // 1024), one.programs_per_sm)
        name = one.name + (" with dq" if one.by_block and one.name.endswith("_backward") else "")
        rows.append([Cell(name, NAME), Cell(f"sm{one.architecture}"), *(number(str(x)) for x in (*of_loop, *needs))])
    return ReportTable(head, rows)
