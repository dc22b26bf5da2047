"""How many mutants the tests see: per commit and area, and the newest commit's that nothing saw."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.history import mutants
from benchmarks.history.mutants import Header, MutantOutcome, MutantResult
from benchmarks.report.table import BAD, CODE, GOOD, NAME, NBSP, Cell, ReportTable, number, version, when


@dataclass(frozen=True)
class Commit:
    """All runs over one tree, such as the shards of a night."""

    begin: Header
    """Of the newest of them."""
    lines: Sequence[MutantResult]
    """The newest of each mutant."""


def read(results: Path) -> tuple[list[Commit], list[str]]:
    """Newest first, and what is wrong with files that cannot be read."""
    trees: dict[str, tuple[Header, dict[str, MutantResult]]] = {}
    damaged = []
    for path in sorted((results / mutants.FOLDER).glob("*.jsonl")):
        try:
            begin, lines = mutants.read(path)
        except (ValueError, TypeError, RecursionError) as error:
            damaged.append(f"{path.relative_to(results)}: {type(error).__name__}: {error}")
            continue
        earlier = trees.get(begin.tree_sha256, (begin, {}))[1]
        trees[begin.tree_sha256] = begin, earlier | {line.id: line for line in lines}
    commits = [Commit(begin, list(lines.values())) for begin, lines in trees.values()]
    return sorted(commits, key=lambda commit: commit.begin.fingerprint.utc, reverse=True), damaged


def rows(commits: Sequence[Commit]) -> ReportTable:
    """One per commit and area."""
    head = ("commit", "when", "area", "seen", "of the drawn", "timeouts", "errors", "equivalent", "not tried")
    return ReportTable(head, [row for commit in commits for row in _rows(commit)])


def _rows(commit: Commit) -> list[list[Cell]]:
    where, rates = commit.begin.fingerprint, mutants.rates(commit.lines)
    found, left_out = {rate.area: rate for rate in rates}, mutants.not_tried(commit.begin, rates)
    shown = []
    for area in sorted({*found, *commit.begin.planned}):
        head = [_commit(commit), when(where.utc), Cell(area)]
        rate = found.get(area)
        missing = left_out.get(area, 0)
        if rate is None:
            shown.append([*head, *[number(None)] * 5, Cell(str(missing), BAD)])
            continue
        count = rate.outcomes
        share = f"{rate.share:.1%} ({rate.seen} of {rate.total})".replace(" ", NBSP)
        shown.append(
            [
                *head,
                Cell(share, GOOD if rate.enough else BAD),
                number(f"{rate.drawn_seen} of {rate.drawn}".replace(" ", NBSP)),
                number(str(count.get(MutantOutcome.TIMEOUT, 0))),
                Cell(str(rate.errors), BAD if rate.errors else "number"),
                number(str(count.get(MutantOutcome.EQUIVALENT, 0))),
                Cell(str(missing) if missing else "none", BAD if missing else "plain"),
            ]
        )
    return shown


def unseen(commits: Sequence[Commit]) -> ReportTable:
    """Of the newest commit: every mutant that passed all tests, or of which nothing is known."""
    wanted = (MutantOutcome.SURVIVED, MutantOutcome.ERROR)
    return ReportTable(
        ("commit", "area", "mutant", "outcome", "why"),
        [
            [_commit(commit), Cell(line.area), Cell(line.id, NAME), Cell(line.outcome.value, BAD),
             Cell(line.killed_by or "every test passed")]
            for commit in commits[:1]
            for line in sorted(commit.lines, key=lambda line: (line.area, line.id))
            if line.outcome in wanted
        ],
    )  # fmt: skip


def _commit(commit: Commit) -> Cell:
    where = commit.begin.fingerprint
    return Cell(version(where.commit, where.dirty), CODE)
