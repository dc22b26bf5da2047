"""unique-60x. Reported: "torch.unique(sorted) made it 60x slower": 6-7 tokens/s before the change, 370-480 after it.

Really: 7.0 against 5.1 µs. The 60x compares 12 layers at S 1024 with one layer at S 128, under one name.
"""

from __future__ import annotations

import dataclasses
import timeit
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from benchmarks.cases.key import Key
from benchmarks.cases.outcome import CaseOutcome, Correctness, OracleCheck
from benchmarks.history import speedup
from benchmarks.history.records import Record
from harness import fingerprint
from nsa import NSAConfig
from nsa.model import SHOWCASE, DecoderLM, ModelConfig
from regression.contract import Evidence, Incident, ReproVerdict, Step
from regression.injection import Fault, injected

INCIDENT = Incident(
    id="unique-60x",
    symptom="torch.unique(sorted) made it 60x slower",
    cause="12 layers at S 1024 were compared with one layer at S 128",
    detector="a figure is comparable only with the same config in its key",
    expects=ReproVerdict.WRONG,
    fires=("wrong",),
)
LARGE = dataclasses.replace(SHOWCASE, dim=256, n_layers=6, nsa=NSAConfig(w=64))
"""The larger model with fewer layers and channels: its time per token is what counts."""
KEY = Key(
    mode="prefill-forward",
    implementation="nsa",
    backend_asked="torch",
    dtype="float32",
    batch=8,
    num_queries=128,
    num_keys=128,
    heads=SHOWCASE.n_heads,
    num_kv_heads=SHOWCASE.num_kv_heads,
    head_dim_k=SHOWCASE.d_k,
    head_dim_v=SHOWCASE.d_v,
    config=dataclasses.asdict(SHOWCASE.nsa),
)
OTHER = {
    "mode": "prefill-forward-backward",
    "implementation": "sdpa-flash",
    "backend_asked": "reference",
    "dtype": "bfloat16",
    "config": dataclasses.asdict(LARGE.nsa),
    "model": "large",
    "inputs": "local",
    "cache": "cold",
    "launch": "graph",
    "documents": (64, 64),
}
"""Another value for each field of a key that is no size."""
FREE = ("implementation", "backend_asked", "config")
"""Fields in which NSA and a dense baseline of the same case differ."""

Compare = Callable[[Record, Record], "float | None"]


def by_figure(after: Record, before: Record) -> float | None:
    """Times as many tokens per second, whatever was measured."""
    if after.tokens_per_s is None or before.tokens_per_s is None:
        return None
    return after.tokens_per_s / before.tokens_per_s


def as_the_bench_does(after: Record, before: Record) -> float | None:
    """The ratio of NSA to a baseline of the same run, where the bench pairs them."""
    paired = [pair for pair in speedup.comparisons((before, after)) if before in pair.baselines]
    return speedup.speed_up(paired[0].nsa, before) if paired else None


def _record(key: Key, tokens_per_s: float, identity: fingerprint.Fingerprint) -> Record:
    checked = Correctness(1, (OracleCheck("o", 0.0, 1.0),), key.backend_asked or key.implementation)
    tokens = key.batch * key.num_queries
    latency_ms = tokens / tokens_per_s * 1e3
    return Record(
        key, CaseOutcome.PASSED, None, identity, "", checked, latency_ms=latency_ms, tokens_per_s=tokens_per_s
    )


def _measured(
    model: ModelConfig, name: str, batch: int, tokens: int, device: str, identity: fingerprint.Fingerprint
) -> Record:
    """Tokens per second of one forward pass, the better of two."""
    torch.manual_seed(0)
    lm = DecoderLM(model).to(device)
    x = torch.randint(model.vocab_size, (batch, tokens), device=device)

    def forward() -> float:
        return lm(x).sum().item()  # waits for the device

    with torch.no_grad():
        seconds = min(timeit.repeat(forward, number=1, repeat=3)[1:])
    size = f"{model.n_layers}x{model.dim}"
    key = dataclasses.replace(KEY, implementation=name, batch=batch, num_queries=tokens, num_keys=tokens, model=size)
    return _record(key, batch * tokens / seconds, identity)


def _dedupe_us(dedupe: Callable[[torch.Tensor], object]) -> float:
    """Microseconds for the 16 blocks of one row on the CPU, the best of three thousand-call averages."""
    blocks = torch.arange(16)
    return min(timeit.repeat(lambda: dedupe(blocks), number=1000, repeat=3)) * 1e3


def _ratios_of_different_cases(compare: Compare, identity: fingerprint.Fingerprint) -> list[str]:
    """A key that differs in one field from a baseline's is compared with it, or one that does not is not."""
    baseline = dataclasses.replace(KEY, implementation="sdpa-flash", backend_asked=None, config=None)
    before = _record(baseline, 100.0, identity)
    found = []
    if compare(_record(KEY, 200.0, identity), before) is None:
        found.append("two figures of one case are not compared")
    for name in (field.name for field in dataclasses.fields(Key) if field.name not in FREE):
        ratio = compare(_record(_other(name), 200.0, identity), before)
        if ratio is not None:
            found.append(f"figures of keys that differ in {name} are compared: {ratio:.2g} times")
    return found


def _names_of_different_keys(identity: fingerprint.Fingerprint) -> list[str]:
    """What the bench takes for one series over time: every field of the key tells two apart."""
    own = _record(KEY, 100.0, identity).identity
    fields = [field.name for field in dataclasses.fields(Key)]
    return [
        f"keys that differ in {name} have one identity"
        for name in fields
        if _record(_other(name), 100.0, identity).identity == own
    ]


def _other(name: str) -> Key:
    """A key that differs in one field."""
    change: dict[str, Any] = {name: OTHER[name] if name in OTHER else getattr(KEY, name) * 2}
    return dataclasses.replace(KEY, **change)


def faulty(step: Step) -> Evidence:
    """Two real models measured as one thing, and the change that was given the credit for their ratio."""
    identity = fingerprint.take("cpu", "cpu")
    before = _measured(LARGE, "unique", 1, 512, step.device, identity)
    after = _measured(SHOWCASE, "unique_consecutive", 8, 128, step.device, identity)
    step(0)
    unique, consecutive = _dedupe_us(torch.unique), _dedupe_us(torch.unique_consecutive)
    step(1)
    claim = by_figure(after, before)
    notes = (
        f"claimed: {claim:.1f} times, {before.tokens_per_s:.0f} -> {after.tokens_per_s:.0f} tokens/s"
        f" ({before.key.case} -> {after.key.case})",
        f"the change itself: {unique:.1f} -> {consecutive:.1f} µs",
    )
    ratios = _ratios_of_different_cases(by_figure, identity)
    with inject():
        names = _names_of_different_keys(identity)
    return Evidence(wrong=(*ratios, *names) if ratios and names else (), notes=notes)  # both halves, or not caught


def product(step: Step) -> Evidence:
    """What the bench compares, and what it takes for one series."""
    identity = fingerprint.take("cpu", "cpu")
    wrong = _ratios_of_different_cases(as_the_bench_does, identity)
    step(0)
    return Evidence(wrong=(*wrong, *_names_of_different_keys(identity)))


@contextmanager
def inject() -> Iterator[None]:
    """A key that forgets what the figure was measured on."""
    case = Fault(Key, "case", property(lambda key: key.mode))
    identity = Fault(Record, "identity", property(lambda record: record.key.mode))
    with injected(case, identity):
        yield
