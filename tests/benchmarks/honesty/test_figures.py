"""Figures on the pages: units, colours, ratios of one shape, shares of the limit."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from benchmarks import runner
from benchmarks.history.samples import SampleSummary
from benchmarks.report.pages import build
from benchmarks.timing.clocks import ClockSummary
from benchmarks.timing.latency import SamplingPlan
from harness.peak import MeasuredPeak
from tests.benchmarks import full_results
from tests.benchmarks.honesty.pages import DENSE, Cells, page
from tests.benchmarks.stored import run as at
from tests.benchmarks.stored import write
from tests.benchmarks.synthetic import FINGERPRINT, key, passed


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
