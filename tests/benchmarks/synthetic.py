"""Keys, fingerprints and records as a run would make them, at sizes that cost nothing."""

from __future__ import annotations

import dataclasses
from typing import Any

from benchmarks.cases.key import NSA, Key
from benchmarks.cases.outcome import CaseOutcome, Correctness, OracleCheck
from benchmarks.history.records import Record
from benchmarks.history.samples import SampleSummary
from harness.fingerprint import Fingerprint
from nsa import NSAConfig

CONFIG = NSAConfig(l=4, d=2, l_sel=8, n_sel=4, w=8)

FINGERPRINT = Fingerprint(
    utc="2026-01-02T03:04:05Z",
    machine="cpu",
    device="A CPU",
    driver=None,
    cuda=None,
    torch="2.13.0",
    triton=None,
    python="3.11.7",
    platform="Linux",
    cpu="A CPU",
    threads=2,
    omp_wait_policy=None,
    load=None,
    commit="0123456789abcdef",
    dirty=False,
    nsa_sha256="0" * 16,
    benchmarks_sha256="1" * 16,
)

GREEN = Correctness(8, (OracleCheck("o", 1e-7, 2e-7),), "torch")


def key(mode: str = "prefill-forward", implementation: str = NSA, length: int = 64, **changes: Any) -> Key:
    """A small case: 4 heads in 2 groups, head size 16."""
    is_nsa = implementation == NSA
    made = Key(
        mode=mode,
        implementation=implementation,
        backend_asked="torch" if is_nsa else None,
        dtype="float32",
        batch=1,
        num_queries=1 if mode == "decode" else length,
        num_keys=length,
        heads=4,
        num_kv_heads=2,
        head_dim_k=16,
        head_dim_v=16,
        config=dataclasses.asdict(CONFIG) if is_nsa else None,
    )
    return dataclasses.replace(made, **changes)


def passed(the_key: Key, latency_ms: float = 10.0, utc: str = FINGERPRINT.utc, machine: str = "cpu") -> Record:
    """A green measurement."""
    return Record(
        the_key,
        CaseOutcome.PASSED,
        None,
        dataclasses.replace(FINGERPRINT, utc=utc, machine=machine),
        "python -m benchmarks run",
        GREEN,
        latency_ms=latency_ms,
        samples=SampleSummary.of((latency_ms,) * 6),
        tokens_per_s=the_key.num_queries / latency_ms * 1e3,
        clock="perf_counter",
        warmup_calls=2,
        stop_reason="enough_samples",
    )


def failed(the_key: Key, outcome: CaseOutcome, reason: str) -> Record:
    """A measurement without a number."""
    return Record(the_key, outcome, reason, FINGERPRINT, "python -m benchmarks run")
