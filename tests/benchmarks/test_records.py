"""A record without a green gate holds no number; a damaged line is named, never a crash."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from benchmarks import fingerprint, records, schema
from benchmarks.ceilings import Ceilings
from benchmarks.records import Check, Gate, Key, Outcome, Record
from tests.benchmarks.synthetic import FINGERPRINT, GREEN, failed, key, passed


@pytest.mark.parametrize(
    "record",
    [passed(key()), failed(key(implementation="sdpa-flash"), Outcome.UNSUPPORTED, "no <kernel> & no 'luck'")],
    ids=["passed", "failed"],
)
def test_reads_back_what_was_written(tmp_path: Path, record: Record) -> None:
    path = records.create_run(tmp_path, FINGERPRINT)
    records.append(path, record)
    records.append(path, record)
    assert records.read_runs(tmp_path) == ([record, record], [])


def test_run_path_names_machine_time_and_commit(tmp_path: Path) -> None:
    assert records.create_run(tmp_path, FINGERPRINT) == tmp_path / "runs/cpu/20260102T030405Z-0123456789.jsonl"


def test_runs_of_one_second_have_files_of_their_own(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        paths = list(pool.map(lambda _: records.create_run(tmp_path, FINGERPRINT), range(24)))
    assert len(set(paths)) == len(list((tmp_path / "runs" / "cpu").iterdir())) == 24


def test_a_run_is_told_apart_within_its_second() -> None:
    assert re.fullmatch(r".*:\d\d\.\d{3}Z", fingerprint.take("cpu", "cpu").utc)


@pytest.mark.parametrize("outcome", [outcome for outcome in Outcome if outcome is not Outcome.PASSED])
@pytest.mark.parametrize(
    "number", [{"latency_ms": 1.0}, {"samples_ms": (1.0,)}, {"tokens_per_s": 1.0}, {"peak_mem_mib": 0.0}], ids=str
)
def test_no_number_unless_passed(outcome: Outcome, number: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must be None with outcome"):
        Record(key(), outcome, "a reason", FINGERPRINT, "command", GREEN, **number)


@pytest.mark.parametrize("error", [3e-7, None], ids=["beyond the budget", "not finite"])
def test_passed_needs_a_green_gate(error: float | None) -> None:
    red = Gate(8, (Check("o", 1e-7, 2e-7), Check("dq", error, 2e-7)), "torch")
    for gate in (None, red):
        with pytest.raises(ValueError, match="needs a green gate"):
            Record(key(), Outcome.PASSED, None, FINGERPRINT, "command", gate, latency_ms=1.0)


@pytest.mark.parametrize("latency_ms", [0.0, -1.0, float("nan"), float("inf")])
def test_a_number_is_a_number(latency_ms: float) -> None:
    with pytest.raises(ValueError, match="latency_ms must be finite and above 0"):
        Record(key(), Outcome.PASSED, None, FINGERPRINT, "command", GREEN, latency_ms=latency_ms)


def test_passed_needs_a_number_and_failure_a_reason() -> None:
    with pytest.raises(ValueError, match="PASSED needs a number"):
        Record(key(), Outcome.PASSED, None, FINGERPRINT, "command", GREEN)
    with pytest.raises(ValueError, match="CRASHED needs a reason"):
        Record(key(), Outcome.CRASHED, None, FINGERPRINT, "command")


def test_damaged_lines_are_named_and_the_rest_is_read(tmp_path: Path) -> None:
    good = passed(key())
    tampered = json.loads(good.to_json()) | {"outcome": "INCORRECT", "reason": "wrong"}
    lines = [good.to_json(), good.to_json()[:100], "[]", '{"schema_version": 99}', json.dumps(tampered)]
    path = tmp_path / "runs" / "cpu" / "a.jsonl"
    path.parent.mkdir(parents=True)
    path.write_bytes("\n".join(lines).encode() + b"\n\xff\xfe\n" + good.to_json().encode())
    found, damaged = records.read_runs(tmp_path)
    assert found == [good, good]
    assert [(line.path, line.line) for line in damaged] == [(path, number) for number in (2, 3, 4, 5, 6)]
    assert "schema_version must be 1 or 2; got 99" in damaged[2].why
    assert "must be None with outcome INCORRECT" in damaged[3].why


EDITS = [
    ("peak_mem_mib", "12", "record.peak_mem_mib must be float; got '12'"),
    ("peak_mem_mib", float("nan"), "record.peak_mem_mib must be finite"),
    ("peak_mem_mib", -1, "peak_mem_mib must be finite and at least 0"),
    ("latency_ms", 10**400, "record.latency_ms must be float"),
    ("samples_ms", [1.0, -1.0], "samples_ms must be finite and at least 0"),
    ("samples_ms", [float("inf")], "record.samples_ms[0] must be finite"),
    ("samples_ms", "1.0", "record.samples_ms must be"),
    ("outcome", [], "Outcome"),
    ("reason", "\ud800", "surrogates not allowed"),
    ("command", None, "record.command must be str; got None"),
    ("colour", "red", "record has no field 'colour'"),
    ("fingerprint.utc", None, "record.fingerprint.utc must be str; got None"),
    ("fingerprint.utc", "yesterday", "fingerprint.utc must be like"),
    ("fingerprint.machine", "a/b", "fingerprint.machine must be of a-z"),
    ("fingerprint.machine", "$\\frac{$", "fingerprint.machine must be of a-z"),
    ("fingerprint.machine", "../../../x", "fingerprint.machine must be of a-z"),
    ("fingerprint.machine", "cpu\n", "fingerprint.machine must be of a-z"),
    ("fingerprint", [], "record.fingerprint must be a JSON object"),
    ("gate.path", 5, "record.gate.path must be str; got 5"),
    ("gate.checks", [None], "record.gate.checks[0] must be a JSON object"),
    ("key.backend_asked", {}, "record.key.backend_asked must be str; got {}"),
    ("key.num_keys", 0, "key.num_keys must be at least 1; got 0"),
    ("key.num_keys", -64, "key.num_keys must be at least 1; got -64"),
    ("key.num_keys", 2**64, "record.key.num_keys must fit in 64 bits"),
    ("key.batch", True, "record.key.batch must be int; got True"),
    ("key.config", 3, "record.key.config must be"),
]


@pytest.mark.parametrize(("field", "value", "why"), EDITS, ids=[f"{field}={value!r:.12}" for field, value, _ in EDITS])
def test_an_edited_line_is_named(tmp_path: Path, field: str, value: Any, why: str) -> None:
    good = passed(key())
    data = json.loads(good.to_json())
    *parents, last = field.split(".")
    functools.reduce(lambda part, name: part[name], parents, data)[last] = value
    path = records.create_run(tmp_path, FINGERPRINT)
    path.write_text("\n".join([json.dumps(data), good.to_json()]), encoding="utf-8")
    found, (damaged,) = records.read_runs(tmp_path)
    assert found == [good]
    assert (damaged.path, damaged.line) == (path, 1)
    assert why in damaged.why


def test_the_first_field_that_is_missing_is_named() -> None:
    data = json.loads(passed(key()).to_json())
    del data["gate"]["rows_checked"], data["gate"]["path"], data["gate"]["checks"]
    with pytest.raises(ValueError, match=r"record\.gate must have 'rows_checked'"):
        Record.from_json(json.dumps(data))


def test_a_field_that_cannot_be_read_is_no_fault_of_the_file() -> None:
    @dataclasses.dataclass
    class Folder:
        path: Path

    with pytest.raises(NotImplementedError, match=r"reads no fields of type .*Path"):
        schema.build(Folder, {"path": "/"}, "folder")


def test_a_line_that_is_too_deep_is_named(tmp_path: Path) -> None:
    records.create_run(tmp_path, FINGERPRINT).write_text("[" * 100_000, encoding="utf-8")
    found, (damaged,) = records.read_runs(tmp_path)
    assert (found, damaged.line) == ([], 1)
    assert damaged.why.startswith("RecursionError")


@pytest.mark.parametrize("number", [{"samples_ms": (1.0, float("nan"))}, {"peak_mem_mib": -1.0}], ids=str)
def test_no_impossible_number_is_recorded(number: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must be finite and at least 0"):
        Record(key(), Outcome.PASSED, None, FINGERPRINT, "command", GREEN, latency_ms=1.0, **number)


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
        dataclasses.replace(record, gate=dataclasses.replace(GREEN, path="triton")),
        passed(key(launch="graph")),
        passed(dataclasses.replace(key(), config={"l": 32})),
        failed(key(), Outcome.CRASHED, "before the oracle was asked"),
    ]
    assert len({record.identity, *(other.identity for other in others)}) == 5


def test_what_was_reached_comes_from_the_case_s_own_count() -> None:
    limits = Ceilings(bf16_tflops=400.0, float32_tflops=40.0, copy_tb_per_s=2.0, cache_mib=1e9 / 2**20)
    record = dataclasses.replace(
        passed(key(cache="cold"), latency_ms=2.0),
        fingerprint=dataclasses.replace(FINGERPRINT, ceilings=limits),
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
    no_ceilings = dataclasses.replace(record, fingerprint=FINGERPRINT)
    assert no_ceilings.share_of_limit is None


def test_reads_records_of_schema_1() -> None:
    new = json.loads(passed(key()).to_json())
    added = {"launch", "cudnn", "flash_attn", "image", "gpu_clocks", "ceilings", "interval_ms", "end_to_end_ms",
             "queued_ahead", "compile_s", "unmet", "clocks", "flops", "bytes_moved"}  # fmt: skip

    def without(part: Any) -> Any:
        if not isinstance(part, dict):
            return part
        return {name: without(value) for name, value in part.items() if name not in added}

    old = Record.from_json(json.dumps(without(new) | {"schema_version": 1}))
    assert old == dataclasses.replace(passed(key()), schema_version=1)
    assert Record.from_json(old.to_json()) == old


@pytest.mark.parametrize("interval_ms", [(1.0,), (2.0, 3.0), (0.5, 0.9)])
def test_an_interval_holds_the_latency(interval_ms: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="interval_ms must be two bounds around latency_ms"):
        Record(key(), Outcome.PASSED, None, FINGERPRINT, "command", GREEN, latency_ms=1.0, interval_ms=interval_ms)  # type: ignore[arg-type]


@pytest.mark.parametrize(("samples", "p99_ms"), [(99, None), (100, 99.0), (101, 100.0), (1000, 990.0)])
def test_p99_is_what_99_of_100_samples_do_not_exceed(samples: int, p99_ms: float | None) -> None:
    record = dataclasses.replace(passed(key()), samples_ms=tuple(map(float, range(samples, 0, -1))))
    assert record.p99_ms == p99_ms
