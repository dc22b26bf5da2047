"""What a run tells is what it did: outcomes, exit codes, plans, peaks, flushes, second oracles, colours and units."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import __main__ as bench
from benchmarks import runner, worker
from benchmarks.__main__ import main
from benchmarks.ab.worker import Worker
from benchmarks.cases.key import Key
from benchmarks.cases.outcome import CaseOutcome
from benchmarks.cases.work import Work
from benchmarks.commands import run as bench_run
from benchmarks.history import run_file
from benchmarks.history.records import Record
from benchmarks.history.samples import SampleSummary
from benchmarks.report.pages import build
from benchmarks.runner import Measurement
from benchmarks.timing import device_clock, latency, memory, peak
from benchmarks.timing.clocks import Clocks, ClockSummary
from benchmarks.timing.device_clock import EventSampler
from benchmarks.timing.latency import SamplingPlan
from benchmarks.workloads import attention, suite
from containers import pipeline
from containers.pipeline import PipelineStep, PipelineStepResult
from harness.peak import MeasuredPeak
from harness.repository import ROOT
from nsa import nsa_attention
from tests.benchmarks import full_results
from tests.benchmarks.stored import run as at
from tests.benchmarks.stored import write
from tests.benchmarks.synthetic import FINGERPRINT, GREEN, failed, key, passed

FAULTS = ["INCORRECT", "NONFINITE", "CRASHED", "STALLED", "COMPILE_ERROR"]
DENSE = key(implementation="sdpa-flash")


class Cells(HTMLParser):
    """Rows of all tables of a page: (text, class) of each cell; and the text of everything."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.rows: list[list[tuple[str, str]]] = []
        self.text, self._kind = "", ""
        self.feed(path.read_text(encoding="utf-8"))
        self.text = re.sub(r"\s+", " ", self.text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        if tag == "tr":
            self.rows.append([])
        self._kind = str(dict(attributes).get("class")) if tag == "td" else ""
        if tag == "td":
            self.rows[-1].append(("", self._kind))

    def handle_endtag(self, tag: str) -> None:
        self._kind = ""

    def handle_data(self, data: str) -> None:
        self.text += data
        if self._kind:
            text, kind = self.rows[-1][-1]
            self.rows[-1][-1] = (text + data.replace("\u00a0", " "), kind)

    def kinds(self, text: str) -> set[str]:
        """How the cells that begin with this text are set."""
        return {kind for row in self.rows for cell, kind in row if cell.startswith(text)}

    def row(self, *first: str) -> list[str]:
        """The first row that begins so."""
        return next(texts for row in self.rows if (texts := [text for text, _ in row])[: len(first)] == list(first))


def page(results: Path, machine: str = "cpu") -> Cells:
    return Cells(build(results).index.with_name(f"machine-{machine}.html"))


Run = Callable[..., tuple[int, dict[str, Any]]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    """`run` with these records in place of measurements: its exit code and its last line."""

    def of(found: list[Record], *arguments: str) -> tuple[int, dict[str, Any]]:
        monkeypatch.setattr(worker, "run", lambda *_, **__: map(Measurement, found))
        monkeypatch.setattr(peak, "measure", lambda _: None)
        monkeypatch.setattr(bench_run, "build_page", lambda results: results)
        code = main(["run", "--gpu", "cpu", "--out", str(tmp_path), *arguments])
        return code, json.loads(capsys.readouterr().out.splitlines()[-1])

    return of


@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_of_nsa_ends_a_run_with_1(fault: str, run: Run) -> None:
    wrong = failed(key(), CaseOutcome(fault), "why")
    code, told = run([passed(DENSE), wrong, passed(key(length=128))])
    assert (code, told["faults"]) == (1, [key().name])
    assert told["outcomes"] == {"PASSED": 2, fault: 1}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_red_baseline_is_named_on_the_last_line(fault: str, run: Run) -> None:
    code, told = run([failed(DENSE, CaseOutcome(fault), "why"), passed(key())])
    assert (code, told["faults"]) == (0, [])
    assert told["red_baselines"] == {DENSE.name: fault}


def test_a_baseline_that_is_absent_or_refuses_is_not_red(run: Run) -> None:
    outcomes = (CaseOutcome.NOT_PRESENT, CaseOutcome.UNSUPPORTED, CaseOutcome.OUT_OF_MEMORY, CaseOutcome.THROTTLED)
    _, told = run([*(failed(DENSE, outcome, "why") for outcome in outcomes), passed(key())])
    assert told["red_baselines"] == {}


def test_a_red_baseline_is_in_the_summary_of_a_pipeline_and_on_the_page(tmp_path: Path) -> None:
    step = PipelineStep("bench", "bench", ())
    text = pipeline.summary(
        [PipelineStepResult(step, 0, 1.0, {"faults": [], "red_baselines": {DENSE.name: "INCORRECT"}})]
    )
    assert DENSE.name in text
    assert "INCORRECT" in text
    write(tmp_path, failed(DENSE, CaseOutcome.INCORRECT, "why"), passed(key()))
    said = f"NSA is wrong on none; of the baselines {DENSE.name} is INCORRECT."
    assert said in Cells(build(tmp_path).index).text


@pytest.mark.parametrize(("arguments", "plan"), [((), runner.FULL), (("--quick",), runner.QUICK)])
def test_only_a_quick_run_measures_as_quick(
    arguments: tuple[str, ...], plan: SamplingPlan, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[list[Key], SamplingPlan]] = []
    run([passed(key())])  # what else it needs is replaced

    def measure(keys: list[Key], device: str, plan: SamplingPlan, *_: object, **__: object) -> list[Measurement]:
        asked.append((keys, plan))
        return [Measurement(passed(key()))]

    monkeypatch.setattr(worker, "run", measure)
    assert main(["run", "--gpu", "cpu", "--out", str(ROOT / "results"), "--list"]) == 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_file, "create", lambda *_: Path("nowhere"))
        patch.setattr(run_file, "append", lambda *_: None)
        assert main(["run", "--gpu", "cpu", *arguments]) == 0
    ((keys, used),) = asked
    assert used is plan
    lengths = {one.num_keys for one in keys if one.mode == "prefill-forward"}
    assert (8192 in lengths) == (plan is runner.FULL)
    assert runner.FULL.precision is not None
    assert runner.QUICK.precision is not None
    assert runner.FULL.precision < runner.QUICK.precision
    assert runner.FULL.min_time_s > runner.QUICK.min_time_s


@pytest.mark.parametrize("arguments", [(), ("--quick", "--backend", "torch", "--seed", "9")])
def test_the_command_of_a_record_measures_its_case_again_and_no_other(
    arguments: tuple[str, ...], run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: dict[str, tuple[Key, str]] = {}
    run([passed(key())])  # what else it needs is replaced

    def measure(
        keys: list[Key], device: str, plan: SamplingPlan, identity: Any, command: Any, **_: Any
    ) -> list[Measurement]:
        said.update((one.name, (one, command(one))) for one in keys)
        return [Measurement(passed(key()))]

    monkeypatch.setattr(worker, "run", measure)
    monkeypatch.setattr(run_file, "create", lambda *_: Path("nowhere"))
    monkeypatch.setattr(run_file, "append", lambda *_: None)
    assert main(["run", "--gpu", "cpu", *arguments]) == 0
    first = dict(said)
    assert len(first) > 20
    wanted = bench.parser().parse_args(["run", *arguments])
    for one, command in list(first.values())[::6]:
        words = shlex.split(command)
        asked = bench.parser().parse_args(words[3:])
        assert (asked.gpu, asked.backend, asked.quick) == ("cpu", wanted.backend, wanted.quick)
        assert asked.seed == wanted.seed if wanted.seed else asked.seed > 0
        said.clear()
        assert main(words[3:]) == 0
        assert list(said.values()) == [(one, command)]


@pytest.mark.parametrize("outcome", [*FAULTS, "THROTTLED", "OUT_OF_MEMORY"])
def test_no_page_shows_passed_or_good_for_what_did_not_pass(outcome: str, tmp_path: Path) -> None:
    write(tmp_path, failed(key(), CaseOutcome(outcome), "why"))
    found = page(tmp_path)
    assert found.row(key().case, outcome)
    assert found.kinds(outcome) == {"bad"}
    assert found.kinds("PASSED") == set()
    index = Cells(tmp_path / "report" / "index.html")
    assert "0 of 1 measurements passed" in index.text
    assert (f"NSA is wrong on {key().case}" in index.text) == (outcome in FAULTS)


def test_the_summary_counts_what_passed(tmp_path: Path) -> None:
    refused = failed(key(implementation="sdpa-cudnn"), CaseOutcome.UNSUPPORTED, "why")
    write(tmp_path, passed(DENSE), refused, passed(key()))
    assert page(tmp_path).kinds("PASSED") == {"good"}
    assert "2 of 3 measurements passed; NSA is wrong on none." in Cells(tmp_path / "report" / "index.html").text


def test_a_slowdown_is_bad_and_a_gain_is_good_on_every_page(tmp_path: Path) -> None:
    slower, faster = key(length=64), key(length=128)
    for day in range(1, 11):
        noise = 1 + 0.001 * (day % 3)
        levels = (10.0, 11.0) if day < 6 else (11.0, 10.0)
        write(tmp_path, *at(day, passed(slower, levels[0] * noise), passed(faster, levels[1] * noise)))
    full_results.write_verdicts(tmp_path)
    index = Cells(build(tmp_path).index)
    machine = Cells(tmp_path / "report" / "machine-cpu.html")
    changed = {row[1][0]: row[4] for row in machine.rows if len(row) == 6 and row[4][0].endswith(" %")}
    assert {name: (text[0], kind) for name, (text, kind) in changed.items()} == {
        slower.name: ("+", "bad"),
        faster.name: ("−", "good"),
    }
    assert index.kinds("SLOWER") == index.kinds("FAILED") == {"bad"}
    assert index.kinds("FASTER") == index.kinds("SAME") == {"good"}
    assert index.kinds("UNDECIDED") == {"plain"}


def test_a_row_has_its_figures_in_their_units_and_the_ratio_the_right_way_round(tmp_path: Path) -> None:
    samples = tuple(9.0 + 0.01 * i for i in range(200))
    mine = dataclasses.replace(
        passed(key(), 10.0), samples=SampleSummary.of(samples), interval_ms=(9.5, 10.5), end_to_end_ms=12.0,
    )  # fmt: skip
    few = dataclasses.replace(passed(key(length=128), 10.0), samples=SampleSummary.of(samples[:99]))
    peak = dataclasses.replace(
        passed(key("memory")), latency_ms=None, samples=None, tokens_per_s=None, peak_mem_mib=69.0
    )
    write(tmp_path, passed(DENSE, 25.0), mine, few, peak)
    found = page(tmp_path)
    wanted = ["torch", "10 ms", "9.5 to 10.5", "10.97", "12", "–", "25 ms (2.50×)"]
    assert found.row(key().case, "PASSED")[2:] == wanted
    assert found.row(key(length=128).case, "PASSED")[5] == "–", "p99 of 99 samples"
    assert found.row(key("memory").case, "PASSED")[3] == "69 MiB"


def test_samples_at_lowered_clocks_are_told(tmp_path: Path) -> None:
    clocks = ClockSummary(1200, 1200.0, 300.0, 88, {"thermal": 1})
    write(tmp_path, dataclasses.replace(passed(key()), clocks=clocks))
    assert page(tmp_path).row(key().name)[1] == "1 samples at lowered clocks (thermal)"


def test_a_ratio_is_never_taken_against_another_shape(tmp_path: Path) -> None:
    write(tmp_path, passed(DENSE, 25.0), passed(key(), 10.0), passed(key(length=128), 10.0))
    found = page(tmp_path)
    assert found.row(key().case)[-1] == "25 ms (2.50×)"
    assert found.row(key(length=128).case)[-1] == "not run"


def test_the_share_of_the_limit_is_of_the_nearer_peak_and_caches_count_for_nothing() -> None:
    limits = MeasuredPeak(100.0, 10.0, 1.0, 50.0)
    where = dataclasses.replace(FINGERPRINT, measured_peak=limits)
    made = dataclasses.replace(passed(key(), 1.0), fingerprint=where, flops=2e9, bytes_moved=5e8)
    cached = 50 * 2**20 / 1e9
    assert made.share_of_limit == pytest.approx(0.5 - cached)  # TB/s beside 1; 2 TFLOP/s of 10 are 0.2
    cold = dataclasses.replace(made, key=key(cache="cold"))
    assert cold.share_of_limit == pytest.approx(0.5)
    assert dataclasses.replace(cold, flops=8e9).share_of_limit == pytest.approx(0.8)
    half = dataclasses.replace(cold, key=key(cache="cold", dtype="bfloat16"), flops=8e10)
    assert half.share_of_limit == pytest.approx(0.8)


@pytest.mark.parametrize(("mode", "tokens"), [("prefill-forward", 2 * 64), ("decode", 2)])
def test_tokens_per_second_are_queries_not_keys(mode: str, tokens: int) -> None:
    record = runner.measure(key(mode, batch=2), "cpu", SamplingPlan(2, 0.0, 1.0), FINGERPRINT, "command").record
    assert record.latency_ms is not None
    assert record.tokens_per_s == pytest.approx(tokens / record.latency_ms * 1e3)


def test_the_peak_is_the_call_s_not_that_of_the_process() -> None:
    before = torch.ones(500 * memory.MIB // 4)
    del before
    needed = memory.of_this_process(lambda: torch.ones(400 * memory.MIB // 4))
    assert needed.mib == pytest.approx(400, abs=5)  # in units of 1000 KiB it would read as 410


def test_a_gpu_s_peak_is_the_call_s_above_what_stood_before(monkeypatch: pytest.MonkeyPatch) -> None:
    state = {"now": 100 * memory.MIB, "peak": 900 * memory.MIB}
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: state["now"])
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: state["peak"])
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: state.update(peak=state["now"]))
    found = memory.of_cuda(lambda: state.update(peak=max(state["peak"], state["now"] + 69 * memory.MIB)))
    assert (found.mib, found.source) == (69.0, "cuda_allocator")


class L2:
    """A cache of a simulated GPU: who has been in it since."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.bytes, self.flushed = 1000, 0
        l2 = self

        class Buffer:
            def __init__(self, size: int) -> None:
                self.size = size

            def zero_(self) -> None:
                l2.flushed += self.size > l2.bytes

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                pass

            def record(self) -> None: ...
            def synchronize(self) -> None: ...
            def query(self) -> bool:
                return False

            def elapsed_time(self, other: object) -> float:
                return 1.0

        properties = type("Properties", (), {"L2_cache_size": self.bytes})()
        monkeypatch.setattr(torch, "empty", lambda size, **_: Buffer(size))
        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "_sleep", lambda _: None)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)


@pytest.mark.parametrize("cache", ["cold", "warm"])
def test_every_cold_call_finds_a_flushed_l2_and_no_warm_one_does(cache: str, monkeypatch: pytest.MonkeyPatch) -> None:
    l2 = L2(monkeypatch)
    found: list[int] = []

    def call() -> None:
        found.append(l2.flushed)
        l2.flushed = 0

    timed = latency.measure(call, "cuda", cache, SamplingPlan(3, 0.0, 10.0))
    assert (timed.cache, len(timed.samples_ms)) == (cache, 3)
    assert set(found) == {1 if cache == "cold" else 0}
    assert len(found) >= 3 + 2 + 3  # samples, warm-ups, end to end


def test_the_clocks_are_read_beside_the_samples_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    L2(monkeypatch)
    looks: list[int] = []

    class Watch:
        def observe(self) -> None:
            looks.append(1)

        def clocks(self) -> Clocks:
            return Clocks((1,) * len(looks), (1.0,) * len(looks), (1,) * len(looks))

    monkeypatch.setattr(latency.clocks, "monitor", Watch)
    timed = latency.measure(lambda: None, "cuda", "warm", SamplingPlan(4, 0.0, 10.0))
    assert timed.clocks is not None
    assert len(timed.clocks.sm_mhz) == len(timed.samples_ms) == 4
    assert timed.queued_ahead, "the samples hold launch latency"


def test_a_gpu_s_work_that_nobody_waits_for_is_refused_by_the_timer(monkeypatch: pytest.MonkeyPatch) -> None:
    L2(monkeypatch)
    monkeypatch.setattr(EventSampler, "require_joined", lambda self, ms: (_ for _ in ()).throw(UnjoinedError(ms)))
    with pytest.raises(UnjoinedError, match=r"1\.0"):
        latency.measure(lambda: None, "cuda", "warm", SamplingPlan(3, 0.0, 10.0))


class UnjoinedError(device_clock.UnjoinedWorkError):
    pass


def timed_wrong(*arguments: Any, return_aux: bool = False, **options: Any) -> Any:
    """Right where it is checked, wrong where it is timed."""
    found = nsa_attention(*arguments, return_aux=return_aux, **options)
    return found if return_aux else found * 1.01


def test_compare_asks_the_oracle_again_about_what_was_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def played() -> list[str]:
        child = Worker()
        asked = {"prepare": dataclasses.asdict(key(length=96)), "device": "cpu", "check": True}
        outcomes = [child.answer(asked)["outcome"]]
        child.answer({"slowdowns": []})
        assert child.answer({"sample": 2})["sample_ms"][0] > 0
        return [*outcomes, child.answer({"finish": True})["outcome"]]

    assert played() == ["PASSED", "PASSED"]
    monkeypatch.setattr(attention, "nsa_attention", timed_wrong)
    assert played() == ["PASSED", "INCORRECT"]


def test_compare_times_nothing_that_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*arguments: Any, **options: Any) -> Any:
        found = nsa_attention(*arguments, **options)
        return (found[0] * 1.01, found[1]) if isinstance(found, tuple) else found * 1.01

    monkeypatch.setattr(attention, "nsa_attention", wrong)
    asked = {"prepare": dataclasses.asdict(key(length=96)), "device": "cpu", "check": True}
    assert Worker().answer(asked)["outcome"] == "INCORRECT"


def test_compare_sees_inputs_that_were_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    def attend(q: Any, k: Any, *arguments: Any, return_aux: bool = False, **options: Any) -> Any:
        if not return_aux:
            k.mul_(1.0001)
        return nsa_attention(q, k, *arguments, return_aux=return_aux, **options)

    monkeypatch.setattr(attention, "nsa_attention", attend)
    child = Worker()
    child.answer({"prepare": dataclasses.asdict(key(length=96)), "device": "cpu", "check": True})
    child.answer({"slowdowns": []})
    found = child.answer({"finish": True})
    assert (found["outcome"], "changed its inputs: k" in found["reason"]) == ("INCORRECT", True)


def test_the_first_call_counts_as_compilation_and_not_as_latency() -> None:
    made: list[int] = []

    def call() -> tuple[torch.Tensor, ...]:
        if not made:
            torch.rand(1500, 1500) @ torch.rand(1500, 1500)
        made.append(1)
        return (torch.zeros(1),)

    work = Work(lambda _: GREEN, call, 1)
    record = runner.measure(key(), "cpu", SamplingPlan(3, 0.0, 5.0), FINGERPRINT, "command", lambda *_: work).record
    assert record.compile_s is not None
    assert record.latency_ms is not None
    assert record.compile_s * 1e3 > 10 * record.latency_ms
    assert record.warmup_calls is not None
    assert record.warmup_calls >= 2


def test_a_case_is_planned_with_its_own_shape(run: Run) -> None:
    """A ratio is of one case: a baseline of another shape would stand in another row."""

    for name in ("cpu", "24gb", "80gb"):
        for quick in (True, False):
            keys = suite.planned(suite.table(name), quick=quick, backend="auto", on_gpu=name != "cpu")
            ours = {one.case: one for one in keys if one.implementation == "nsa"}
            for one in keys:
                same = ours[one.case]
                assert all(getattr(one, size) == getattr(same, size) for size in Key.SIZES)
                assert (one.inputs, one.cache, one.launch, one.dtype) == (
                    same.inputs, same.cache, same.launch, same.dtype,
                )  # fmt: skip
                assert one.cache == "warm" or name != "cpu"
