"""Published figures as lines of a picture: those of the same case, each with its source's name, never in a ratio."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.cases.key import Key
from benchmarks.report.published import RATIO, PublishedSeries
from harness import machines

Points = list[tuple[int, float]]


@dataclass(frozen=True)
class Reference:
    """One line that was not measured here."""

    of: str
    """What was measured: "best public NSA"."""
    label: str
    """The same with its source and GPU."""
    points: Points
    """(tokens, value), ascending; a range is drawn at its middle."""


def throughput(known: Sequence[PublishedSeries], key: Key, machine: str, batches: Mapping[int, int]) -> list[Reference]:
    """Tokens per second that others report of this case on this machine, at whatever lengths.

    `batches`: length -> sequences that were measured here; where theirs are others, the point is left out.
    """
    same = [one for one in known if _same_gpu(one, machine) and one.unit != RATIO and _same_case(one, key)]
    lines = [Reference(one.of, _label(one), _throughputs(one, batches)) for one in same]
    return [line for line in lines if line.points]


def _same_gpu(one: PublishedSeries, machine: str) -> bool:
    """A source that names a family alone is drawn beside each of its boards, but no slice of one."""
    named = one.source.machine
    return named is not None and (named == machine or machines.same_family(machine, named))


def at_length(known: Sequence[PublishedSeries], key: Key, machine: str) -> list[Reference]:
    """The throughput that others measured of exactly this case: one point each."""
    lines = throughput([one for one in known if not one.expected], key, machine, {key.num_keys: key.batch})
    return [
        Reference(line.of, line.label, [(tokens, value)])
        for line in lines
        for tokens, value in line.points
        if tokens == key.num_keys
    ]


def speed_up(known: Sequence[PublishedSeries], key: Key) -> list[Reference]:
    """Ratios that others report of this case, on whichever GPU; the label says which."""
    ratios = [one for one in known if one.unit == RATIO and _same_case(one, key)]
    return [Reference(one.of, f"{_label(one)} / {one.against}", _middles(one)) for one in ratios]


def _same_case(one: PublishedSeries, key: Key) -> bool:
    """What the source does not say is taken to fit."""
    shape = (key.heads, key.num_kv_heads, key.head_dim_k, key.head_dim_v)
    said = ((one.model, key.model), (one.shape, shape), (one.dtype, key.dtype), (one.launch, key.launch))
    known_size = one.model is not None or one.shape is not None
    return one.mode == key.mode and known_size and all(theirs in (None, ours) for theirs, ours in said)


def _middles(one: PublishedSeries) -> Points:
    return [(tokens, (low + high) / 2) for tokens, (low, high) in zip(one.tokens, one.values, strict=True)]


def _throughputs(one: PublishedSeries, batches: Mapping[int, int]) -> Points:
    """Tokens per second; nothing of another quantity, or of a time whose batch is unknown."""
    points = []
    for tokens, value in _middles(one):
        batch = one.cached_tokens // tokens if one.cached_tokens else one.batch
        if batch is not None and batch != batches.get(tokens, batch):
            continue
        if one.unit == "tokens/s":
            points.append((tokens, value))
        elif one.unit == "ms" and batch is not None:
            points.append((tokens, batch * (1 if one.mode == "decode" else tokens) / value * 1e3))
    return points


def _label(one: PublishedSeries) -> str:
    how = "computed" if one.expected else "published"
    return f"{how}: {one.of} ({one.source.id}, {one.source.gpu})"
