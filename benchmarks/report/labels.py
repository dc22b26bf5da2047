"""Labels of a case, and its throughput, the same on every page and chart."""

from __future__ import annotations

from benchmarks.cases.key import PART, Key
from benchmarks.history.records import Record
from benchmarks.history.store import Point
from benchmarks.report.style import in_k

PARTS = "Parts of the forward pass"
TITLES = {
    "prefill-forward": "Prefill, forward",
    "prefill-forward-backward": "Prefill, forward + backward",
    "decode": "Decode",
    "train-step": "Train step",
    "train-loop": "Train step, a loop of one's own",
    "first-step": "First step of a new process",
    "context-parallel": "Context parallelism, forward + backward",
    "host-prefill-forward": "Host time of a prefill, forward",
    "host-prefill-forward-backward": "Host time of a prefill, forward + backward",
}


def mode(key: Key) -> str:
    """The mode as a title; one for all parts of the forward pass."""
    return PARTS if key.mode.startswith(PART) else TITLES.get(key.mode, key.mode)


def size(key: Key) -> str:
    """Length and batch, and the part where it is one: "64k", "8k × 256 sequences"."""
    part = f"{key.mode.removeprefix(PART)}, " if key.mode.startswith(PART) else ""
    return part + in_k(key.num_keys) + ("" if key.batch == 1 else f" × {key.batch} sequences")


def label(record: Record) -> str:
    """What was measured beside its mode, batch and length: "64x4x128 bfloat16 random inputs cold graph"."""
    return " ".join([record.key.what, *_details(record)])


def _details(record: Record) -> list[str]:
    """The dtype, the inputs with where they are from, and whatever is not usual; a train step has a text, and no inputs
    to name."""
    key, source = record.key, record.inputs_source
    dtype, *others = key.case.removeprefix(f"{key.mode}/{key.what}/b{key.batch}/s{key.num_keys}/").split("/")
    if key.mode == "train-step":
        return [dtype, *others]
    named = f"{key.inputs} inputs ({source})" if source else f"{key.inputs} inputs"
    return [dtype, named, *(word for word in others if word != key.inputs)]


def details(record: Record) -> str:
    """The dtype, the inputs and whatever is not usual: "bfloat16, recorded inputs (atlas e4fe0fa0f0), cold, graph"."""
    return ", ".join(_details(record))


def throughput(point: Point, latency_ms: float | None = None) -> float:
    """Tokens per second at the point's latency, or at another; calls per second where the work has no tokens."""
    at_ms = point.latency_ms if latency_ms is None else latency_ms
    return 1e3 / at_ms if point.tokens_per_s is None else point.tokens_per_s * point.latency_ms / at_ms


def interval(point: Point) -> tuple[float, float]:
    """The throughput at both ends of the latency's confidence interval; the point itself where there is none."""
    value = throughput(point)
    if point.interval_ms is None:
        return value, value
    low_ms, high_ms = point.interval_ms
    return throughput(point, high_ms), throughput(point, low_ms) if low_ms > 0 else value


def unit(point: Point) -> str:
    """Of `throughput`."""
    return "calls/s" if point.tokens_per_s is None else "tokens/s"
