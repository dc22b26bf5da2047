"""What a trained model selects, by the newest atlas, and how needle and variable tracking end beside the dense twin."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.atlas import record, task_record
from benchmarks.atlas.record import Atlas, HeadCurves, LengthCurves, band
from benchmarks.atlas.task_record import LESS_OFTEN, TaskRecord, TaskResult, TaskScore
from benchmarks.report.folder import Picture, ReportFolder
from benchmarks.report.further_pages import atlas_pictures
from benchmarks.report.style import in_k, in_short
from benchmarks.report.table import BAD, GOOD, NBSP, PLAIN, Cell, ReportTable, number, version, when

FIGURES: tuple[tuple[str, Callable[[HeadCurves], float]], ...] = (
    ("Jaccard at lag 1", lambda head: head.jaccard["1"]),
    ("Jaccard at lag 64", lambda head: head.jaccard["64"]),
    ("Jaccard at lag 1, without forced blocks", lambda head: head.jaccard_free["1"]),
    ("Jaccard of a decode step and the next", lambda head: head.step_jaccard),
    ("distinct blocks of 4 neighbours", lambda head: head.union["4"]),
    ("distinct blocks of 64 neighbours", lambda head: head.union["64"]),
    ("popularity of blocks, maximum over mean", lambda head: head.popularity),
    ("share of the scores that the choice holds", lambda head: head.mass),
    ("percentage of the scores at the first block", lambda head: 100 * head.sink_share),
)  # fmt: skip
"""Rows of the table: median over layers x kv heads, and from p10 to p90."""


@dataclass(frozen=True)
class AtlasSection:
    """The newest atlas."""

    device: str
    machine: str
    when: str
    commit: str
    model: str
    trained: str
    figures: ReportTable
    pictures: list[Picture]


def read(results: Path) -> tuple[list[Atlas], list[TaskRecord], list[str]]:
    """Atlases and records of tasks, oldest first, and what is wrong with files that are none."""
    atlases, no_atlases = record.read_all(results)
    asked, not_asked = task_record.read_all(results)
    return atlases, asked, [*no_atlases, *not_asked]


def show(folder: ReportFolder, atlases: Sequence[Atlas]) -> AtlasSection | None:
    """The newest one; None where there is none."""
    if not atlases:
        return None
    one = atlases[-1]
    here, model, trained = one.fingerprint, one.model, one.trained
    return AtlasSection(
        device=here.device,
        machine=here.machine,
        when=when(here.utc).text,
        commit=version(one.commit, here.dirty),
        model=(
            f"{in_short(float(model.get('parameters', 0)))} parameters, {model.get('n_layers')} layers,"
            f" {model.get('n_heads')} query heads on {model.get('num_kv_heads')} key/value heads"
        ),
        trained=(
            f"{trained.tokens:,} tokens in {trained.minutes:.1f} minutes at"
            f" {', then '.join(map(in_k, trained.seq_lens))} tokens a sequence, seed {trained.seed}; loss"
            f" {trained.loss:.3f} nats per token on held-out text at"
            f" {in_k(one.lengths[0].seq_len)} tokens. Text: {trained.text}."
        ),
        figures=_figures(one.lengths),
        pictures=atlas_pictures.draw(folder, one),
    )


def _figures(lengths: Sequence[LengthCurves]) -> ReportTable:
    """A row per figure, a column per length."""
    rows = [[Cell(name), *(number(_spread(length, figure)) for length in lengths)] for name, figure in FIGURES]
    return ReportTable(("figure", *(f"{in_k(length.seq_len)} tokens" for length in lengths)), rows)


def _spread(length: LengthCurves, figure: Callable[[HeadCurves], float]) -> str:
    """0.43 (0.31 to 0.58)."""
    found = band(length, figure)
    return f"{found.median:.3g} ({found.p10:.3g} to {found.p90:.3g})".replace(" ", NBSP)


def all_of(atlases: Sequence[Atlas]) -> ReportTable:
    """One row per atlas, newest first: other seeds and machines beside the newest."""
    head = ("when", "machine", "commit", "tokens trained", "minutes", "seed", "loss", "lengths", "Jaccard at lag 1")
    return ReportTable(
        head,
        [
            [
                when(one.fingerprint.utc),
                Cell(one.fingerprint.machine),
                Cell(version(one.commit, one.fingerprint.dirty)),
                number(f"{one.trained.tokens:,}"),
                number(f"{one.trained.minutes:.1f}"),
                number(str(one.trained.seed)),
                number(f"{one.trained.loss:.3f}"),
                Cell(", ".join(in_k(length.seq_len) for length in one.lengths)),
                number(", ".join(f"{_median(length):.2f}" for length in one.lengths)),
            ]
            for one in reversed(atlases)
        ],
    )


def _median(length: LengthCurves) -> float:
    return statistics.median(head.jaccard["1"] for head in length.heads)


def tasks(records: Sequence[TaskRecord]) -> ReportTable:
    """One row per task, length and seed, newest first."""
    head = (
        "task",
        "tokens",
        "NSA right",
        "dense right",
        "what it says",
        "texts",
        "trained",
        "seed",
        "when",
        "on",
    )
    return ReportTable(head, [_asked(one, result) for one in reversed(records) for result in one.results])


def less_often(records: Sequence[TaskRecord]) -> str | None:
    """In how many of the rows that are evidence NSA is right less often, in words; None where it is in none."""
    rows = [result for one in records for result in one.results if result.is_evidence]
    worse = sum(result.verdict == LESS_OFTEN for result in rows)
    return f"NSA is right less often than its dense twin in {worse} of {len(rows)} rows." if worse else None


def _asked(one: TaskRecord, result: TaskResult) -> list[Cell]:
    hops = f", {result.hops} hops" if result.hops else ""
    kind = PLAIN if not result.is_evidence else BAD if result.nsa.interval[1] < result.dense.interval[0] else GOOD
    return [
        Cell(f"{result.task}{hops}"),
        Cell(in_k(result.length)),
        number(_share(result.nsa)),
        number(_share(result.dense)),
        Cell(result.verdict, kind),
        number(str(result.nsa.asked)),
        number(f"{result.steps:,} steps, {in_short(float(result.tokens))} tokens".replace(" ", NBSP)),
        number(str(result.seed)),
        when(one.fingerprint.utc),
        Cell(f"{one.fingerprint.machine}, {version(one.commit, one.fingerprint.dirty)}"),
    ]


def _share(score: TaskScore) -> str:
    """93.2 % (90.6 to 95.1)."""
    low, high = (100 * bound for bound in score.interval)
    return f"{100 * score.share:.1f}{NBSP}% ({low:.1f}{NBSP}to{NBSP}{high:.1f})"
