"""What a run wrote is read back; a damaged, edited or torn line is named, and costs no other."""

from __future__ import annotations

import dataclasses
import errno
import gzip
import json
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from benchmarks.__main__ import main
from benchmarks.cases.key import Key
from benchmarks.cases.outcome import CaseOutcome, Correctness, OracleCheck
from benchmarks.history import run_file, samples
from benchmarks.history.records import Anchor, Record, SharedSequence
from benchmarks.history.run_file import DamagedLine
from benchmarks.history.samples import RawSamples, SampleSummary
from benchmarks.peak_memory import OutOfMemory
from benchmarks.timing.clocks import Clocks, ClockSummary
from harness import schema
from harness.peak import MeasuredPeak
from harness.repository import ROOT
from nsa.io import DiskFullError, read_lines
from tests.benchmarks.synthetic import FINGERPRINT, GREEN, failed, key, passed

COMMAND = "python -m benchmarks run --cases"
EVERYTHING = Record(
    key=key(cache="cold", launch="graph", config={"l": 32}),
    outcome=CaseOutcome.PASSED,
    reason=None,
    fingerprint=FINGERPRINT,
    command="python -m benchmarks run --cases 'a b'",
    correctness=Correctness(
        8, (OracleCheck("o", 1.5e-7, 2e-7), OracleCheck("dq, all rows", 0.0, 2e-7)), "torch", 7, 512
    ),
    latency_ms=1.25,
    interval_ms=(1.0, 1.5),
    end_to_end_ms=1.5,
    samples=SampleSummary(100, 1.0, 1.0, 1.5, 3.0, 2.5),
    tokens_per_s=51200.5,
    peak_mem_mib=0.0,
    peak_mem_source="rss_high_water",
    clock="perf_counter",
    queued_ahead=False,
    compile_s=0.0,
    warmup_calls=0,
    stop_reason="wall_limit",
    unmet="precision",
    other_load=0.25,
    clocks=ClockSummary(1200, 1500.0, 402.5, 61, {"power_cap": 2, "hardware_slowdown+thermal": 1}, -0.05),
    gpu_conditions={"waited": "waited 3 s for python (pid 1) to end"},
    case_s=2.25,
    launches_per_call=57,
    inputs_follow="an atlas",
    flops=2.5e13,
    bytes_moved=12345670.0,
    anchor=Anchor("0123456789abcdef", "2" * 16),
    shared=SharedSequence(2.4, 0.0125, 0.25, 0.0, 310.5, 64, 2.5, 0.75),
)
RECORDS = {
    "passed": passed(key()),
    "failed": failed(key(implementation="sdpa-flash"), CaseOutcome.UNSUPPORTED, "no <kernel> & no 'luck'"),
    "out of memory": dataclasses.replace(
        failed(key(), CaseOutcome.OUT_OF_MEMORY, "CUDA out of memory"),
        out_of_memory=OutOfMemory(20480.0, 5437.5, None),
        case_s=2.5,
    ),
    "not finite": Record(
        key(), CaseOutcome.NONFINITE, "NaN", FINGERPRINT, "c", Correctness(8, (OracleCheck("o", None, 2e-7),), "torch")
    ),
    "a model": passed(key("train-step", model="125m")),
    "a name with a path": passed(key(implementation="../$x")),
    "several ranks": dataclasses.replace(
        passed(key("context-parallel", ranks=2, documents=(30, 34))),
        shared=SharedSequence(None, 0.5, 0.25, 0.01, 310.5, 64),
    ),
    "everything": EVERYTHING,
}


def written(results: Path, *found: Record, command: str | None = None) -> Path:
    path = run_file.create(results, found[0].fingerprint, command)
    for record in found:
        run_file.append(path, record)
    return path


@pytest.mark.parametrize("record", RECORDS.values(), ids=RECORDS)
def test_reads_back_what_was_written(tmp_path: Path, record: Record) -> None:
    written(tmp_path, record, record)
    assert run_file.read_all(tmp_path) == ([record, record], [])


def test_every_field_that_differs_from_its_default_is_kept() -> None:
    """A field that is added to a record and not to its line would be lost."""
    for field in dataclasses.fields(Record):
        assert getattr(EVERYTHING, field.name) != field.default or field.name in ("reason", "out_of_memory"), field.name


def test_figures_keep_seven_digits_and_their_order(tmp_path: Path) -> None:
    record = dataclasses.replace(
        EVERYTHING, latency_ms=1.23456789012, interval_ms=(1.23456789011, 1.23456789013), tokens_per_s=1 / 3
    )
    written(tmp_path, record)
    ((found,), _) = run_file.read_all(tmp_path)
    assert (found.latency_ms, found.interval_ms, found.tokens_per_s) == (1.234568, (1.234568, 1.234568), 0.3333333)


def test_a_command_that_the_run_line_says_is_not_repeated(tmp_path: Path) -> None:
    own = dataclasses.replace(passed(key(length=128)), command="by hand")
    shared = dataclasses.replace(passed(key()), command=run_file.case_command(COMMAND, key()))
    path = written(tmp_path, shared, own, command=COMMAND)
    assert run_file.read_all(tmp_path) == ([shared, own], [])
    assert [b"command" in line for _, line in read_lines(path)] == [True, False, True]


def test_a_record_of_another_run_gets_a_run_line_of_its_own(tmp_path: Path) -> None:
    other = dataclasses.replace(passed(key()), fingerprint=dataclasses.replace(FINGERPRINT, load=3.0))
    written(tmp_path, passed(key()), other, passed(key()))
    assert run_file.read_all(tmp_path) == ([passed(key()), other, passed(key())], [])


def test_a_record_of_a_quick_run_takes_six_hundred_bytes(tmp_path: Path) -> None:
    on_a_gpu = dataclasses.replace(
        EVERYTHING,
        key=key(dtype="bfloat16", cache="cold", config=None),
        command=run_file.case_command(COMMAND, key(dtype="bfloat16", cache="cold", config=None)),
        correctness=Correctness(
            16, tuple(OracleCheck(f"d{i}, fresh inputs", 0.0023450123, 0.0071230456) for i in range(6)), "triton", 7, 9
        ),
        peak_mem_source="cuda_allocator",
        clock="cuda_event",
        queued_ahead=True,
        stop_reason="precise_enough",
        unmet=None,
        gpu_conditions={},
        launches_per_call=None,  # of the host's modes alone
        inputs_follow=None,  # of recorded inputs alone
        shared=None,  # of several ranks alone
    )
    path = written(tmp_path, on_a_gpu, command=COMMAND)
    (_, _), (_, line) = read_lines(path)
    assert len(line) < 680


def test_run_path_names_machine_time_and_commit(tmp_path: Path) -> None:
    assert run_file.create(tmp_path, FINGERPRINT) == tmp_path / "runs/cpu/20260102T030405Z-0123456789.jsonl"


def test_runs_of_one_second_have_files_of_their_own(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        paths = list(pool.map(lambda _: run_file.create(tmp_path, FINGERPRINT), range(24)))
    assert len(set(paths)) == len(list((tmp_path / "runs" / "cpu").iterdir())) == 24


def test_damaged_lines_are_named_and_the_rest_is_read(tmp_path: Path) -> None:
    path = written(tmp_path, passed(key()))
    run_line, whole = path.read_text().splitlines()
    tampered = json.dumps(json.loads(whole) | {"outcome": "INCORRECT", "reason": "wrong"})
    newer = run_line.replace('"schema_version":3', '"schema_version":99')
    lines = [run_line, whole, whole[:100], "[]", run_line, tampered, newer, "", "[" * 100_000]
    path.write_bytes("\n".join(lines).encode() + b"\n\xff\xfe\n" + whole.encode())
    found, damaged = run_file.read_all(tmp_path)
    assert found == [passed(key())]
    assert [(line.path, line.line) for line in damaged] == [(path, number) for number in (3, 4, 6, 7, 9, 10, 11)]
    assert "must be None with outcome INCORRECT" in damaged[2].why
    assert "schema_version of a run line must be 3; got 99" in damaged[3].why
    assert "a run line must stand before" in damaged[6].why, "which run it is of cannot be known"


@pytest.mark.parametrize(
    "harm", [lambda line: line[:60], lambda line: line[:9], lambda line: "x" + line[1:]], ids=["cut", "short", "begin"]
)
def test_no_record_is_taken_for_one_of_the_run_before(tmp_path: Path, harm: Callable[[str], str]) -> None:
    other = dataclasses.replace(passed(key()), fingerprint=dataclasses.replace(FINGERPRINT, commit="f" * 40))
    path = written(tmp_path, passed(key()), other)
    first, mine, second, theirs = path.read_text().splitlines()
    path.write_text("".join(f"{line}\n" for line in (first, mine, harm(second), theirs)))
    run_file.append(path, passed(key(length=128)))
    found, damaged = run_file.split(run_file.read(path))
    assert found == [passed(key()), passed(key(length=128))]
    assert [line.line for line in damaged] == [3, 4]


def test_two_runs_in_one_file_at_once_keep_their_records(tmp_path: Path) -> None:
    path = run_file.create(tmp_path, FINGERPRINT)
    runs = [dataclasses.replace(FINGERPRINT, load=float(n)) for n in range(4)]

    def write(number: int) -> None:
        for length in range(1, 11):
            the_key = key(length=64 * length, batch=number + 1)
            run_file.append(path, dataclasses.replace(passed(the_key), fingerprint=runs[number]))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, range(4)))
    found, damaged = run_file.split(run_file.read(path))
    assert (len(found), damaged) == (40, [])
    assert all(record.fingerprint == runs[record.key.batch - 1] for record in found)


def test_records_without_their_run_line_are_named(tmp_path: Path) -> None:
    path = written(tmp_path, passed(key()), passed(key()))
    run_line, *whole = path.read_text().splitlines()
    path.write_text("\n".join([run_line[:200], *whole]))
    found, damaged = run_file.read_all(tmp_path)
    assert found == []
    assert [line.line for line in damaged] == [1, 2, 3]
    assert "a run line must stand before" in damaged[2].why


EDITS = [
    ("peak_mem_mib", "12", "Expected `float | null`, got `str` - at `$.peak_mem_mib`"),
    ("peak_mem_mib", float("nan"), "invalid character"),
    ("peak_mem_mib", -1, "peak_mem_mib must be finite and at least 0"),
    ("latency_ms", 10**400, "Number out of range"),
    ("latency_ms", None, "PASSED needs a number"),
    ("samples", [1, 1.0, 2.0, 1.5, 3.0, None], "ascend from min_ms to max_ms"),
    ("samples", [1, -1.0, 0.0, 0.0, 0.0, None], "must be finite, at least 0"),
    ("samples", [1], "$.samples"),
    ("clocks", [1, 1, 1, 1, {"heat": 0}], "clocks.throttled must count samples"),
    ("interval_ms", [11.0, 12.0], "interval_ms must be two bounds around latency_ms"),
    ("outcome", "FINE", "Invalid enum value 'FINE' - at `$.outcome`"),
    ("reason", "\ud800", "truncated"),
    ("command", None, ""),
    ("colour", "red", "unknown field `colour`"),
    ("correctness", [8, {"": [["o", 1e-7, 2e-7]]}, 5, None, None], "Expected `str`, got `int` - at `$.correctness[2]`"),
    ("correctness", [8, {"": [None]}, "torch", None, None], "at `$.correctness[1][...][0]`"),
    ("correctness", [8, {"": [["o", 3e-7, 2e-7]]}, "torch", None, None], "PASSED needs correctness checks that passed"),
    ("correctness", [8, {}, "torch", None, None, "red"], "of at most length 5"),
    ("backend_asked", {}, "$.backend_asked"),
    ("key", "decode/4x2x16/b1/s0/float32/nsa", "key must be a case's name"),
    ("key", 3, "$.key"),
    ("config", 3, "$.config"),
    ("config", "papre", "config must be one of paper"),
]


@pytest.mark.parametrize(("field", "value", "why"), EDITS, ids=[f"{field}={value!r:.12}" for field, value, _ in EDITS])
def test_an_edited_line_is_named(tmp_path: Path, field: str, value: Any, why: str) -> None:
    path = written(tmp_path, passed(key()), passed(key()))
    run_line, line, whole = path.read_text().splitlines()
    data = json.loads(line)
    data[field] = value
    path.write_text("\n".join([run_line, json.dumps(data), whole]), encoding="utf-8")
    found, damaged = run_file.read_all(tmp_path)
    if not why:  # a command of null is none: the run line has none either, and the record stays
        return
    assert found == [passed(key())]
    assert [(one.path, one.line) for one in damaged] == [(path, 2)]
    assert why in damaged[0].why


RUN_EDITS = [
    ("fingerprint.utc", None, "run.fingerprint.utc must be str; got None"),
    ("fingerprint.utc", "yesterday", "fingerprint.utc must be like"),
    ("fingerprint.machine", "a/b", "fingerprint.machine must be of a-z"),
    ("fingerprint.machine", "../../../x", "fingerprint.machine must be of a-z"),
    ("fingerprint.machine", "cpu\n", "fingerprint.machine must be of a-z"),
    ("fingerprint.colour", "red", "run.fingerprint has no field 'colour'"),
    ("fingerprint.device", "\ud800", "surrogates not allowed"),
    ("fingerprint", [], "run.fingerprint must be a JSON object"),
    ("command", 3, "run.command must be str; got 3"),
]


@pytest.mark.parametrize(
    ("field", "value", "why"), RUN_EDITS, ids=[f"{field}={value!r:.12}" for field, value, _ in RUN_EDITS]
)
def test_an_edited_run_line_is_named(tmp_path: Path, field: str, value: Any, why: str) -> None:
    path = written(tmp_path, passed(key()))
    run_line, line = path.read_text().splitlines()
    data = json.loads(run_line)
    part = data if "." not in field else data[field.split(".")[0]]
    part[field.split(".")[-1]] = value
    path.write_text("\n".join([json.dumps(data, separators=(",", ":")), line]), encoding="utf-8")
    found, damaged = run_file.read_all(tmp_path)
    assert found == []
    assert why in damaged[0].why


@pytest.mark.parametrize("shape", [{}, {"mode": "train-step", "model": "125m"}], ids=["key by name", "key in full"])
def test_lines_with_earlier_names_are_read(tmp_path: Path, shape: dict[str, Any]) -> None:
    where = dataclasses.replace(FINGERPRINT, measured_peak=MeasuredPeak(2.0, 1.0, 0.02, 32.0))
    record = dataclasses.replace(passed(key(**shape)), fingerprint=where)
    path = written(tmp_path, record)
    text = path.read_text()
    for name, earlier in (("measured_peak", "ceilings"), ("correctness", "gate"), ("num_kv_heads", "kv_heads")):
        assert (f'"{name}":' in text) is (name != "num_kv_heads" or "model" in shape)
        text = text.replace(f'"{name}":', f'"{earlier}":')
    path.write_text(text)
    assert run_file.read_all(tmp_path) == ([record], [])
    path.write_text(text.replace('"gate":', '"correctness":[8,{},"torch"],"gate":'))
    assert "must not have 'gate' beside 'correctness'" in run_file.read_all(tmp_path)[1][0].why


def test_committed_runs_are_read() -> None:
    """Some of them have the earlier names."""
    found, damaged = run_file.read_all(ROOT / "results")
    assert damaged == []
    assert all(record.correctness for record in found if record.outcome is CaseOutcome.PASSED)


def test_the_first_field_that_is_missing_is_named() -> None:
    data = dataclasses.asdict(GREEN)
    del data["rows_checked"], data["path"], data["checks"]
    with pytest.raises(ValueError, match=r"correctness must have 'rows_checked'"):
        schema.build(Correctness, data, "correctness")


def test_a_field_that_cannot_be_read_is_no_fault_of_the_file() -> None:
    @dataclasses.dataclass
    class Folder:
        path: Path

    with pytest.raises(NotImplementedError, match=r"reads no fields of type .*Path"):
        schema.build(Folder, {"path": "/"}, "folder")


def test_a_key_of_a_line_is_checked(tmp_path: Path) -> None:
    path = written(tmp_path, passed(key("train-step", model="125m")))
    run_line, line = path.read_text().splitlines()
    for before, after, why in (
        ('"batch":1', '"batch":true', "key.batch must be int; got True"),
        ('"num_keys":64', '"num_keys":0', "key.num_keys must be at least 1; got 0"),
        ('"num_keys":64', f'"num_keys":{2**64}', "key.num_keys must fit in 64 bits"),
        ('"model"', '"colour"', "key has no field 'colour'"),
    ):
        assert before in line
        path.write_text("\n".join([run_line, line.replace(before, after)]))
        (damaged,) = run_file.read(path)
        assert isinstance(damaged, DamagedLine)
        assert why in damaged.why


def raw(the_key: Key) -> RawSamples:
    return RawSamples(the_key.name, (1.0, 2.0), Clocks((1980,) * 2, (640.0,) * 2, (61,) * 2, (1,), ("power_cap",)))


def test_raw_samples_lie_beside_the_run_and_survive_an_incomplete_end(tmp_path: Path) -> None:
    path = written(tmp_path, passed(key()))
    for length in (64, 128, 256):
        run_file.append_samples(path, raw(key(length=length)))
    assert list(samples.read_raw(path)) == [raw(key(length=length)) for length in (64, 128, 256)]
    file = samples.raw_path(path)
    file.write_bytes(file.read_bytes()[:-20])
    assert list(samples.read_raw(path)) == [raw(key(length=length)) for length in (64, 128)]


def test_samples_are_printed_or_said_to_be_gone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path, passed(key()))
    assert main(["samples", str(path)]) == 2
    said = capsys.readouterr().err
    assert "are not here" in said
    assert "90 days" in said
    run_file.append_samples(path, raw(key()))
    assert main(["samples", str(path), "--case", "prefill-*"]) == 0
    assert json.loads(capsys.readouterr().out)["samples_ms"] == [1.0, 2.0]
    assert main(["samples", str(path), "--case", "none"]) == 2
    assert "--case" in capsys.readouterr().err
    for content in (b"no gzip", gzip.compress(b"3\n"), gzip.compress(b"[" * 100_000), gzip.compress(b"\xff")):
        samples.raw_path(path).write_bytes(content)
        assert main(["samples", str(path)]) == 2
        assert f"{samples.raw_path(path)} is damaged" in capsys.readouterr().err


def test_a_full_disk_keeps_the_samples_that_are_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path, passed(key()))
    run_file.append_samples(path, raw(key()))
    whole = os.write

    def almost_full(file: int, data: bytes) -> int:
        if len(data) < 20:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return whole(file, data[:20])

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", almost_full)
        with pytest.raises(DiskFullError, match="make room"):
            run_file.append_samples(path, raw(key(length=128)))
    run_file.append_samples(path, raw(key(length=256)))
    assert samples.read_raw(path) == [raw(key()), raw(key(length=256))]
