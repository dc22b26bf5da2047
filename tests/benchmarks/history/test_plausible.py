"""What no record can hold is found by its field, and what honest ones hold is let pass."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.ab.result import CompareVerdict
from benchmarks.cases.outcome import CaseOutcome
from benchmarks.commands import options
from benchmarks.history import incidents, merge, plausible, run_file
from benchmarks.history.mutants import Header
from harness.nvml import GpuSettings
from regression import contract, ledger, runner
from tests.benchmarks.comparisons import comparison_result
from tests.benchmarks.stored import write
from tests.benchmarks.synthetic import FINGERPRINT, failed, key, passed

GREEN_LINE = {
    "fingerprint": {"machine": "cpu", "device": "A CPU", "cpu": "A CPU"}, "incident": "x", "part": "product",
    "expects": "PASSED", "verdict": "PASSED", "ok": True, "schema_version": 1,
}  # fmt: skip


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ({"latency_ms": 1e300}, "record.latency_ms must be at most 1e+09; got 1e+300"),
        ({"latency_ms": -1e10}, "record.latency_ms must be at least 0; got -1e+10"),
        ({"latency_ms": float("nan")}, "record.latency_ms must be at most 1e+09; got nan"),
        ({"interval_ms": (1.0, 1e12)}, "record.interval_ms[1] must be at most 1e+09"),
        ({"case_s": -1.0}, "record.case_s must be at least 0; got -1"),
        ({"warmup_calls": -2}, "record.warmup_calls must be at least 0; got -2"),
        ({"clocks": {"sm_mhz_min": -1, "sm_mhz_drift": -0.1}}, "record.clocks.sm_mhz_min must be at least 0; got -1"),
        ({"clocks": {"temperature_c_max": -60}}, "record.clocks.temperature_c_max must be at least -50; got -60"),
        ({"clocks": {"temperature_c_max": 151}}, "record.clocks.temperature_c_max must be at most 150; got 151"),
        ({"clocks": {"power_w_median": 1e9}}, "record.clocks.power_w_median must be at most 1e+06"),
        ({"tokens_per_s": 1e13}, "record.tokens_per_s must be at most 1e+12"),
        ({"steps": 10**60}, "record.steps must be at most 3.5e+38"),
        ({"reason": "a\x1b[31mb"}, "record.reason must hold no control characters; got 'a\\x1b[31mb'"),
        ({"reason": "a\u202eb"}, "record.reason must hold no control characters"),
        ({"reason": "a\rb"}, "record.reason must hold no control characters"),
        ({"a\x07": 1}, "a name in record must hold no control characters"),
        ({"reason": "two\nlines\tof words: é", "tokens_per_s": 1.3e8, "seed": 2**62, "passed": True, "x": None}, None),
        ({"flops": 1e18, "bytes_moved": 1e15, "first_step_s": 3e3, "samples": [1, 2.0], "loss": 1e38}, None),
    ],
)
def test_what_cannot_be(value: Any, why: str | None) -> None:
    found = plausible.objection(value, "record")
    assert found == why or (found is not None and why is not None and found.startswith(why))


def test_a_line_of_an_incident_is_refused_and_the_others_come_along(tmp_path: Path) -> None:
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    good = GREEN_LINE
    lines = [good, {**good, "pace": {"seconds": 1e300}}, {**good, "reason": "\x1b[2J"}]
    path = theirs / "regression" / "cpu" / "one.jsonl"
    path.parent.mkdir(parents=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    merged = merge.MergeResult()
    merge.merge(theirs, ours, merged)
    assert merged.new_lines == 1
    assert [one.partition(".jsonl:")[2] for one in merged.refused] == [
        "2: line.pace.seconds must be at most 1e+07; got 1e+300",
        "3: line.reason must hold no control characters; got '\\x1b[2J'",
    ]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"verdict": "FINE"}, "verdict must be one of PASSED, "),
        ({"part": "half"}, "part must be one of faulty, product, soak; got 'half'"),
        ({"schema_version": 99}, "schema_version must be 1; got 99"),
        ({"ok": "yes"}, "ok must be bool; got 'yes'"),
        ({"verdict": "LEAK"}, "ok must be false with the verdict LEAK where PASSED is expected; got true"),
        ({"ok": False}, "ok must be true with the verdict PASSED that is expected; got false"),
        ({"verdict": "LEAK", "expects": "LEAK"}, "expects must be PASSED of the part product; got LEAK"),
        ({"part": "faulty"}, "expects must be a fault of the part faulty; got PASSED"),
        ({"part": "soak", "verdict": "SKIPPED"}, "ok must be false with the verdict SKIPPED"),
        ({"fingerprint": {"machine": "h200", "device": "A CPU"}}, "fingerprint.machine must be that of its folder"),
        ({"fingerprint": {"machine": "cpu"}}, "fingerprint.device must be str; got None"),
        (
            {"fingerprint": {"machine": "cpu", "device": "NVIDIA GeForce RTX 5090", "cpu": "A CPU"}},
            "device, cpu 'A CPU'; got 'NVIDIA GeForce RTX 5090'; leave this out, and have it measured again",
        ),
        ({"verdict": "SKIPPED"}, None),
        ({"part": "faulty", "expects": "LEAK", "verdict": "LEAK"}, None),
        ({"part": "faulty", "expects": "LEAK", "verdict": "LEAK", "ok": False}, None),
    ],
)
def test_an_incident_that_contradicts_itself(changes: dict[str, Any], why: str | None) -> None:
    line = json.dumps({**GREEN_LINE, **changes}).encode()
    found = merge.why_damaged(line, Path("regression/cpu/one.jsonl"))
    assert found is None if why is None else found is not None and why in found


def test_incidents_are_known_by_their_suites_words() -> None:
    assert set(incidents.VERDICTS) == {verdict.value for verdict in contract.ReproVerdict}
    assert incidents.SCHEMA_VERSION == ledger.SCHEMA_VERSION
    assert incidents.FOLDER == ledger.FOLDER
    assert {incidents.FAULTY, incidents.PRODUCT} == {runner.FAULTY, runner.PRODUCT}


@pytest.mark.parametrize(
    ("machine", "device", "limit_w", "why"),
    [
        (
            "h200",
            "AMD EPYC",
            None,
            "machine 'h200' does not follow from the device's name 'AMD EPYC': that is gpu-amd-",
        ),
        ("gpu-", "NVIDIA ", None, "machine 'gpu-' does not follow from the device's name 'NVIDIA ': that is none"),
        ("h200", "NVIDIA A100-SXM4-40GB", None, "that is a100-40gb-sxm or gpu-a100-sxm4-40gb"),
        ("a100-80gb-sxm", "NVIDIA A100-SXM4-80GB MIG 3g.40gb", None, "that is a100-80gb-sxm-mig-3g-40gb"),
        ("h200-capped-400w", "NVIDIA H200", None, "is capped, and the record's power limits say no limit"),
        ("h200-capped-400w", "NVIDIA H200", 500.0, "is capped, and the record's power limits say 500 W"),
        ("cpu", "NVIDIA H200", None, "must have the host's processor as its device, cpu 'A CPU'; got 'NVIDIA H200'"),
        ("cpu", "NVIDIA GeForce RTX 5090", None, "cpu 'A CPU'; got 'NVIDIA GeForce RTX 5090'"),
        ("cpu", "AMD EPYC", None, "cpu 'A CPU'; got 'AMD EPYC'"),
        ("cpu-forced-sm86", "A CPU", None, "'cpu-forced-sm86' is forced, which a CPU cannot be"),
        ("h200-forced-sm86-24gb", "A CPU", None, "machine 'h200' does not follow from the device's name 'A CPU'"),
        ("h200-forced-sm86-24gb", "NVIDIA H200", None, None),
        ("h200-capped-400w", "NVIDIA H200", 400.2, None),
        ("a100-80gb-sxm-mig-3g-40gb", "NVIDIA A100-SXM4-80GB MIG 3g.40gb", None, None),
        ("gpu-geforce-rtx-5090", "NVIDIA GeForce RTX 5090", None, None),
        ("gpu-h200", "NVIDIA H200", None, None),
        ("cpu", "A CPU", None, None),
    ],
)
def test_a_machine_follows_from_its_device(machine: str, device: str, limit_w: float | None, why: str | None) -> None:
    settings = None if limit_w is None else GpuSettings(limit_w, 700.0, True, False, True, False)
    where = dataclasses.replace(FINGERPRINT, machine=machine, device=device, gpu_settings=settings)
    record = dataclasses.replace(failed(key(), CaseOutcome.CRASHED, "x"), fingerprint=where)
    found = merge.impossible(record)
    assert found is None if why is None else found is not None and "record.fingerprint." in found and why in found


@pytest.mark.parametrize(
    ("name", "changes", "why"),
    [
        ("cpu-20260104-0123456789-laws.json", {"failed": 1}, "failures must name each of the 1 tests that failed"),
        ("cpu-20260104-0123456789-laws.json", {"seconds": -1.0}, "file.seconds must be at least 0; got -1"),
        (
            "cpu-20260104-0123456789-laws-forced-sm86.json",
            {},
            "its name says that it was forced, which a CPU cannot be",
        ),
        ("h200-20260104-0123456789-laws-forced-sm86.json", {}, None),
    ],
)
def test_a_summary_that_contradicts_itself(tmp_path: Path, name: str, changes: Any, why: str | None) -> None:
    path = tmp_path / "theirs" / "laws" / name
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"utc": "2026-01-04T00:00:00", "seconds": 2.0, "passed": 8, "failed": 0, **changes}))
    merged = merge.MergeResult()
    merge.merge(tmp_path / "theirs", tmp_path / "ours", merged)
    assert merged.refused == ([] if why is None else merged.refused)
    assert why is None or why in merged.refused[0]


def test_everything_that_is_kept_would_be_merged_again(tmp_path: Path) -> None:
    if not run_file.read_all(options.RESULTS)[0]:
        pytest.skip(f"no run in {options.RESULTS}")
    merged = merge.MergeResult()
    merge.merge(options.RESULTS, tmp_path, merged)
    assert merged.refused == []
    assert merged.new_lines > 0


def test_a_gpu_s_records_under_the_name_of_the_cpu_are_refused_by_file_and_line(tmp_path: Path) -> None:
    gpu = dataclasses.replace(FINGERPRINT, device="NVIDIA GeForce RTX 5090")
    good = passed(key())
    write(tmp_path / "theirs", good, dataclasses.replace(passed(key(length=128)), fingerprint=gpu))
    (path,) = tmp_path.glob("theirs/runs/cpu/*.jsonl")
    lines = path.read_text().splitlines()
    number = next(n for n, line in enumerate(lines, 1) if "s128" in line)
    merged = merge.MergeResult()
    merge.merge(tmp_path / "theirs", tmp_path / "ours", merged)
    (why,) = merged.refused
    assert why.startswith(f"{path}:{number}: {key(length=128).name}: record.fingerprint.machine 'cpu' must have ")
    assert why.endswith("got 'NVIDIA GeForce RTX 5090'; leave this out, and have it measured again")
    assert merged.new_lines == 1


@pytest.mark.parametrize("folder", ["verdicts", "mutants"])
def test_comparisons_and_mutants_of_another_device_are_refused_too(folder: str) -> None:
    for device, sound in (("A CPU", True), ("NVIDIA GeForce RTX 5090", False)):
        where = dataclasses.replace(FINGERPRINT, device=device)
        verdict = dataclasses.replace(comparison_result(CompareVerdict.SAME), fingerprint=where)
        made: Any = {"verdicts": verdict, "mutants": Header(where, "t" * 16, {"train": 20})}[folder]
        found = merge.why_damaged(json.dumps(dataclasses.asdict(made)).encode(), Path(folder) / "one.jsonl")
        assert found is None if sound else found is not None and "line.fingerprint.machine 'cpu' must have" in found


@pytest.mark.parametrize("listed_as_processor", [True, False])
def test_a_listed_gpu_is_no_processor(listed_as_processor: bool) -> None:
    device = "NVIDIA H200" if listed_as_processor else "AMD EPYC"
    found = plausible.not_of_device("cpu", device, device, None)
    assert (found is not None) is listed_as_processor


def test_a_record_names_its_case(tmp_path: Path) -> None:
    wild = dataclasses.replace(passed(key()), fingerprint=dataclasses.replace(FINGERPRINT, cpu="a\x1b[2J"))
    write(tmp_path / "theirs", wild)
    merged = merge.MergeResult()
    merge.merge(tmp_path / "theirs", tmp_path / "ours", merged)
    (why,) = merged.refused
    assert why.endswith(f"{wild.key.name}: record.fingerprint.cpu must hold no control characters; got 'a\\x1b[2J'")
