"""A record without correctness checks that passed holds no number, and no number is an impossible one."""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Any

import pytest

from benchmarks.cases.key import Key
from benchmarks.cases.outcome import CaseOutcome, Correctness, OracleCheck
from benchmarks.history.records import Record, SharedSequence
from benchmarks.history.samples import RawSamples, SampleSummary
from harness import fingerprint
from harness.peak import MeasuredPeak
from tests.benchmarks.synthetic import FINGERPRINT, GREEN, failed, key, passed


def test_a_run_is_told_apart_within_its_second() -> None:
    assert re.fullmatch(r".*:\d\d\.\d{3}Z", fingerprint.take("cpu", "cpu").utc)


@pytest.mark.parametrize("outcome", [outcome for outcome in CaseOutcome if outcome is not CaseOutcome.PASSED])
@pytest.mark.parametrize(
    "number",
    [{"latency_ms": 1.0}, {"samples": SampleSummary.of((1.0,))}, {"tokens_per_s": 1.0}, {"peak_mem_mib": 0.0}],
    ids=str,
)
def test_no_number_unless_passed(outcome: CaseOutcome, number: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must be None with outcome"):
        Record(key(), outcome, "a reason", FINGERPRINT, "command", GREEN, **number)


@pytest.mark.parametrize("error", [3e-7, None], ids=["beyond the budget", "not finite"])
def test_passed_needs_checks_that_passed(error: float | None) -> None:
    red = Correctness(8, (OracleCheck("o", 1e-7, 2e-7), OracleCheck("dq", error, 2e-7)), "torch")
    for correctness in (None, red):
        with pytest.raises(ValueError, match="needs correctness checks that passed"):
            Record(key(), CaseOutcome.PASSED, None, FINGERPRINT, "command", correctness, latency_ms=1.0)


@pytest.mark.parametrize("latency_ms", [0.0, -1.0, float("nan"), float("inf")])
def test_a_number_is_a_number(latency_ms: float) -> None:
    with pytest.raises(ValueError, match="latency_ms must be finite and above 0"):
        Record(key(), CaseOutcome.PASSED, None, FINGERPRINT, "command", GREEN, latency_ms=latency_ms)


def test_passed_needs_a_number_and_failure_a_reason() -> None:
    with pytest.raises(ValueError, match="PASSED needs a number"):
        Record(key(), CaseOutcome.PASSED, None, FINGERPRINT, "command", GREEN)
    with pytest.raises(ValueError, match="CRASHED needs a reason"):
        Record(key(), CaseOutcome.CRASHED, None, FINGERPRINT, "command")


@pytest.mark.parametrize("number", [{"peak_mem_mib": float("nan")}, {"peak_mem_mib": -1.0}], ids=str)
def test_no_impossible_number_is_recorded(number: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must be finite and at least 0"):
        Record(key(), CaseOutcome.PASSED, None, FINGERPRINT, "command", GREEN, latency_ms=1.0, **number)


def test_name_holds_what_tells_cases_apart() -> None:
    assert key().name == "prefill-forward/4x2x16/b1/s64/float32/nsa"
    assert dataclasses.replace(key(), head_dim_v=8).what == "4x2x16:8"
    assert key("train-step", model="125m").case == "train-step/125m/b1/s64/float32"


def test_a_word_stands_for_each_thing_that_is_not_usual() -> None:
    assert key("decode", inputs="local", cache="cold", launch="graph").name == (
        "decode/4x2x16/b1/s64/float32/local/cold/graph/nsa"
    )
    assert key(launch="graph").case == "prefill-forward/4x2x16/b1/s64/float32/graph"


@pytest.mark.parametrize(("name", "value"), [("launch", "replayed"), ("cache", "tepid")])
def test_a_key_knows_its_words(name: str, value: str) -> None:
    with pytest.raises(ValueError, match=f"key.{name} must be one of .*; got '{value}'"):
        key(**{name: value})


def test_identity_is_the_key_and_the_path_that_ran() -> None:
    record = passed(key())
    assert passed(key(), latency_ms=3.0).identity == record.identity
    assert record.key.name  # what is derived from a key is no part of it
    assert json.loads(record.identity).keys() == {"path", *(field.name for field in dataclasses.fields(Key))}
    assert json.loads(record.identity)["path"] == "torch"
    others = [
        dataclasses.replace(record, correctness=dataclasses.replace(GREEN, path="triton")),
        passed(key(launch="graph")),
        passed(dataclasses.replace(key(), config={"l": 32})),
        failed(key(), CaseOutcome.CRASHED, "before the oracle was asked"),
    ]
    assert len({record.identity, *(other.identity for other in others)}) == 5


def test_what_was_reached_comes_from_the_case_s_own_count() -> None:
    limits = MeasuredPeak(bf16_tflops=400.0, float32_tflops=40.0, copy_tb_per_s=2.0, cache_mib=1e9 / 2**20)
    record = dataclasses.replace(
        passed(key(cache="cold"), latency_ms=2.0),
        fingerprint=dataclasses.replace(FINGERPRINT, measured_peak=limits),
        flops=4e10,
        bytes_moved=3e9,
    )
    assert (record.tflops, record.tb_per_s) == (pytest.approx(20.0), pytest.approx(1.5))
    assert record.share_of_limit == pytest.approx(0.75)  # of the copy; 0.5 of the product in float32
    assert dataclasses.replace(record, key=key()).share_of_limit == pytest.approx(0.5)  # a third of the bytes is cached
    half = dataclasses.replace(record, key=key(dtype="bfloat16"), bytes_moved=None)
    assert half.share_of_limit == pytest.approx(0.05)
    unknown = passed(key())
    assert (unknown.tflops, unknown.tb_per_s, unknown.share_of_limit) == (None, None, None)
    no_peak = dataclasses.replace(record, fingerprint=FINGERPRINT)
    assert no_peak.share_of_limit is None


@pytest.mark.parametrize("interval_ms", [(1.0,), (2.0, 3.0), (0.5, 0.9)])
def test_an_interval_holds_the_latency(interval_ms: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="interval_ms must be two bounds around latency_ms"):
        Record(key(), CaseOutcome.PASSED, None, FINGERPRINT, "command", GREEN, latency_ms=1.0, interval_ms=interval_ms)  # type: ignore[arg-type]


@pytest.mark.parametrize(("samples", "p99_ms"), [(99, None), (100, 99.0), (101, 100.0), (1000, 990.0)])
def test_p99_is_what_99_of_100_samples_do_not_exceed(samples: int, p99_ms: float | None) -> None:
    summary = SampleSummary.of(tuple(map(float, range(samples, 0, -1))))
    assert summary.p99_ms == p99_ms
    assert (summary.count, summary.min_ms, summary.max_ms) == (samples, 1.0, samples)
    quarter = -(-samples // 4)
    assert (summary.p25_ms, summary.p75_ms) == (quarter, -(-3 * samples // 4))


@pytest.mark.parametrize("samples_ms", [(1.0, -1.0), (1.0, float("nan")), (float("inf"),)])
def test_no_impossible_sample_is_kept(samples_ms: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="samples"):
        SampleSummary.of(samples_ms)
    with pytest.raises(ValueError, match="samples_ms must be finite and at least 0"):
        RawSamples("a case", samples_ms)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"head_dim_v": 8},
        {"mode": "decode", "num_queries": 1, "batch": 8},
        {"mode": "decode", "num_queries": 4, "inputs": "local", "cache": "cold", "launch": "graph"},
        {"inputs": "recorded-p10", "cache": "cold"},
        {"num_queries": 16, "cache": "cold", "implementation": "sdpa-flash"},
        {"mode": "part-selected", "dtype": "bfloat16"},
        {"mode": "context-parallel", "ranks": 8, "inputs": "recorded-p10"},
        {"mode": "context-parallel", "ranks": 2, "documents": (30, 34)},
        {"documents": (12, 12, 12, 3, 25)},
    ],
)
def test_a_name_is_read_back(changes: dict[str, Any]) -> None:
    wanted = dataclasses.replace(key(), backend_asked=None, config=None, **changes)
    assert Key.from_name(wanted.name) == wanted


@pytest.mark.parametrize(
    "name",
    [
        "",
        "context-parallel/4x2x16/b1/s64/float32/p2/p4/nsa",
        "nsa",
        "train-step/125m/b1/s64/float32/nsa",
        "decode/4x2x16/b1/s64/float32/cold/warm/nsa",
    ],
)
def test_a_name_that_does_not_say_all_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="is no name of a case"):
        Key.from_name(name)


def test_documents_are_the_whole_sequence() -> None:
    for documents in ((30, 33), (64, 0)):
        with pytest.raises(ValueError, match=r"key\.documents must add up to the 64 tokens"):
            key(documents=documents)


def test_shares_of_several_ranks() -> None:
    of_two = dataclasses.replace(passed(key(ranks=2), 5.0), shared=SharedSequence(9.0, 0.25, 1.0, 0.0, 300.0, 64))
    assert of_two.share_of_ideal == pytest.approx(9.0 / 2 / 5.0)
    assert of_two.exposed_share == pytest.approx(0.05)
    too_long = dataclasses.replace(of_two, shared=SharedSequence(None, 0.25, 1.0, 0.0, 300.0, 64))
    assert too_long.share_of_ideal is None
    assert passed(key()).exposed_share is None
    for wrong in (
        (0.0, 0.25, 1.0, 0.0, 1.0, 64),
        (9.0, -0.25, 1.0, 0.0, 1.0, 64),
        (9.0, 0.25, float("nan"), 0.0, 1.0, 64),
        (9.0, 0.25, 1.0, 0.0, 1.0, 64, float("inf")),
        (9.0, 0.25, 1.0, 0.0, 1.0, 64, 9.5, 0.0),
    ):
        with pytest.raises(ValueError, match="must be finite"):
            SharedSequence(*wrong)
