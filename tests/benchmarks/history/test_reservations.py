"""Which figures are not to be trusted, and why."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from benchmarks.cases.outcome import CaseOutcome
from benchmarks.history import reservations
from benchmarks.history.records import Record
from benchmarks.history.samples import SampleSummary
from benchmarks.timing.clocks import ClockSummary
from harness.nvml import GpuSettings
from tests.benchmarks.synthetic import failed, key, passed


def record(threads: int = 2, load: float | None = None, driver: str | None = None, **changes: Any) -> Record:
    made = dataclasses.replace(passed(key()), **changes)
    return dataclasses.replace(
        made, fingerprint=dataclasses.replace(made.fingerprint, threads=threads, load=load, driver=driver)
    )


@pytest.mark.parametrize(
    ("made", "names"),
    [
        (record(), []),
        (record(load=0.2, other_load=0.25), []),
        (record(other_load=0.26), ["load"]),
        (record(threads=32, other_load=3.2), []),
        (record(threads=32, other_load=3.3), ["load"]),
        (record(load=6.2), ["load"]),
        (record(load=6.2, other_load=0.0), []),  # what ran before the run had ended
        (record(load=6.2, driver="560", other_load=6.0), []),  # a GPU's own time
        (record(unmet="4 of 6 samples", samples=SampleSummary.of((1.0,) * 5)), ["unmet", "few_samples"]),
        (record(samples=SampleSummary.of((1.0,) * 6)), []),
        (record(gpu_conditions={"waited": "20 s", "other_process": "sleep", "cooled": "3 s"}), ["other_process"]),
        (record(gpu_conditions={"hot": "90 degrees C", "unseen": "", "warmer": "", "idle_process": ""}), ["hot"]),
        (failed(key(), CaseOutcome.CRASHED, "boom"), []),
    ],
)
def test_reasons(made: Record, names: list[str]) -> None:
    assert list(reservations.of(made)) == names


def test_counts_figures_and_reasons() -> None:
    some = [record(), record(other_load=2.0), record(other_load=2.0, unmet="4 of 6 samples")]
    assert reservations.count(some) == {"figures": 2, "load": 2, "unmet": 1}
    assert reservations.count([record()]) == {}


def test_the_pages_tell_what_the_device_did_too() -> None:
    calm = passed(key())
    assert reservations.with_device(calm, calm.fingerprint) == tuple(reservations.of(calm).values())
    clocks = ClockSummary(1200, 1200.0, 300.0, 88, {"thermal": 1})
    made = dataclasses.replace(calm, unmet="half width 3 % > 1 %", queued_ahead=False, clocks=clocks)
    assert reservations.with_device(made, calm.fingerprint)[-2:] == (
        "the device waited for the host: the figure holds launches too",
        "1 samples at lowered clocks (thermal)",
    )
    assert "unmet precision (half width 3 % > 1 %)" in reservations.with_device(made, calm.fingerprint)


def settings(display: bool | None) -> GpuSettings:
    return GpuSettings(350.0, 350.0, True, display, None, False)


@pytest.mark.parametrize(
    ("clocks", "said"),
    [
        (ClockSummary(1900, 1980.0, 300.0, 70, {}, -0.03), []),
        (ClockSummary(1700, 1980.0, 300.0, 84, {}, -0.06), ["the SM clock drifted by -6 % over the samples, up to 84"]),
        (ClockSummary(1980, 1980.0, 300.0, 40, {}, 0.04), ["the SM clock drifted by +4 %"]),
        (
            ClockSummary(1860, 1980.0, 300.0, 60, {}, 0.0),
            ["clocks are not locked: SM 1860 MHz beside a median"],
        ),
        (ClockSummary(1860, 1980.0, 300.0, 60, {"power_cap": 2}, 0.0), ["2 samples at lowered clocks (power_cap)"]),
        (ClockSummary(1890, 1980.0, 300.0, 60), []),
    ],
)
def test_clocks_that_moved_are_marked(clocks: ClockSummary, said: list[str]) -> None:
    made = record(driver="580", clocks=clocks)
    found = reservations.with_device(made, made.fingerprint)
    assert len(found) == len(said)
    assert all(one.startswith(words) for one, words in zip(found, said, strict=True))
    assert reservations.of(made) == {}


def test_a_screen_and_what_nvml_does_not_tell_are_marked() -> None:
    made = record(driver="580", gpu_conditions={"unseen": "NVML does not tell other processes"})
    for display, said in ((True, ["the GPU draws a screen"]), (False, []), (None, [])):
        drawing = dataclasses.replace(made.fingerprint, gpu_settings=settings(display))
        assert list(reservations.with_device(made, drawing)) == [*said, "NVML does not tell other processes"]
